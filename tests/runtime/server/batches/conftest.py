"""A PostgreSQL server for the tests of batches, as for those of the queue."""

from __future__ import annotations

from tests.runtime.queueing.conftest import postgres_server

__all__ = ["postgres_server"]
