"""A PostgreSQL server for the queue, as for the store's contract."""

from tests.runtime.queueing.conftest import postgres_server

__all__ = ["postgres_server"]
