"""Keys with bounds for months; prices of prompt tokens that a cache had, and how many of them keys use."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("client_keys", sa.Column("tokens_per_month", sa.BigInteger(), nullable=True))
    op.add_column("client_keys", sa.Column("money_per_month", sa.BigInteger(), nullable=True))
    op.add_column("prices", sa.Column("cached", sa.BigInteger(), nullable=True))
    op.add_column("model_usage", sa.Column("cached_tokens", sa.BigInteger(), nullable=False, server_default="0"))
