"""Tables for results about models: scored pairs of runs, and documents."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "equivalences",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("relation", sa.String(length=16), nullable=False),
        sa.Column("a_model", sa.Integer(), nullable=False),
        sa.Column("a_lo", sa.Integer(), nullable=False),
        sa.Column("a_hi", sa.Integer(), nullable=False),
        sa.Column("b_model", sa.Integer(), nullable=False),
        sa.Column("b_lo", sa.Integer(), nullable=False),
        sa.Column("b_hi", sa.Integer(), nullable=False),
        sa.Column("probe", sa.String(length=64), nullable=False),
        sa.Column("similarity", sa.Double(), nullable=False),
        sa.Column("control", sa.Double(), nullable=True),
        sa.Column("metrics", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["a_model"], ["models.id"], name=op.f("fk_equivalences_a_model"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["b_model"], ["models.id"], name=op.f("fk_equivalences_b_model"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_equivalences")),
    )
    op.create_index(op.f("ix_equivalences_a_model"), "equivalences", ["a_model"], unique=False)
    op.create_index(op.f("ix_equivalences_b_model"), "equivalences", ["b_model"], unique=False)
    op.create_table(
        "documents",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("kind", sa.String(length=32), nullable=False),
        sa.Column("model", sa.Integer(), nullable=False),
        sa.Column("key", sa.String(length=255), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["model"], ["models.id"], name=op.f("fk_documents_model"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_documents")),
    )
    op.create_index(op.f("ix_documents_model"), "documents", ["model"], unique=False)
