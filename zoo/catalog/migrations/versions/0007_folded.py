"""Marks of usage that queues of requests have kept and that is counted."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "folded_usage",
        sa.Column("queue", sa.String(length=32), nullable=False),
        sa.Column("id", sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint("queue", "id", name=op.f("pk_folded_usage")),
    )
