"""Tables for aliases and their history."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "alias_changes",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("alias", sa.String(length=255), nullable=False),
        sa.Column("kind", sa.String(length=16), nullable=False),
        sa.Column("targets", sa.Text(), nullable=False),
        sa.Column("previous", sa.Integer(), nullable=True),
        sa.Column("figures", sa.Text(), nullable=False),
        sa.Column("created", sa.DateTime(), nullable=False),
        sa.ForeignKeyConstraint(["previous"], ["alias_changes.id"], name=op.f("fk_alias_changes_previous")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_alias_changes")),
    )
    op.create_index(op.f("ix_alias_changes_alias"), "alias_changes", ["alias"], unique=False)
    op.create_index(op.f("ix_alias_changes_previous"), "alias_changes", ["previous"], unique=False)
    op.create_table(
        "aliases",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("change", sa.Integer(), nullable=False),
        sa.ForeignKeyConstraint(["change"], ["alias_changes.id"], name=op.f("fk_aliases_change")),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_aliases")),
    )
    op.create_index(op.f("ix_aliases_change"), "aliases", ["change"], unique=False)
