"""What the tables of all databases here have in common."""

from __future__ import annotations

from sqlalchemy import MetaData


def named_constraints() -> MetaData:
    """Return metadata whose constraints get predictable names, so that later migrations can refer to them."""
    return MetaData(
        naming_convention={
            "ix": "ix_%(table_name)s_%(column_0_N_name)s",
            "uq": "uq_%(table_name)s_%(column_0_N_name)s",
            "fk": "fk_%(table_name)s_%(column_0_N_name)s",
            "pk": "pk_%(table_name)s",
        }
    )
