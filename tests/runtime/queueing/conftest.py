"""Queues for tests: each test with `target` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.queueing.database import QueueDatabase
from tests import postgres


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a queue may be kept: an empty folder, or an empty database."""
    if request.param == "sqlite":
        return str(tmp_path / "queue")
    return postgres.new_database(request.getfixturevalue("postgres_server"))


@pytest.fixture
def queue(target: str) -> Iterator[QueueDatabase]:
    database = QueueDatabase(target)
    yield database
    database.close()
