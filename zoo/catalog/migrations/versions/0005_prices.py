"""What keys use by model, and what it cost; a table of prices; keys with a bound on money."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # A table of another name: a server of the version before, if one still runs, fails instead of counting wrongly.
    op.create_table(
        "model_usage",
        sa.Column("name", sa.String(length=255), nullable=False),
        sa.Column("day", sa.String(length=10), nullable=False),
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("prompt_tokens", sa.BigInteger(), nullable=False),
        sa.Column("generated_tokens", sa.BigInteger(), nullable=False),
        sa.Column("answers", sa.BigInteger(), nullable=False),
        sa.Column("cost", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", "day", "model", name=op.f("pk_model_usage")),
    )
    op.execute(
        "INSERT INTO model_usage (name, day, model, requests, prompt_tokens, generated_tokens, answers, cost) "
        "SELECT name, day, '', requests, prompt_tokens, generated_tokens, 0, 0 FROM key_usage"
    )
    op.drop_table("key_usage")
    op.create_table(
        "prices",
        sa.Column("model", sa.String(length=255), nullable=False),
        sa.Column("prompt", sa.BigInteger(), nullable=False),
        sa.Column("generated", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_prices")),
    )
    op.add_column("client_keys", sa.Column("money_per_day", sa.BigInteger(), nullable=True))
