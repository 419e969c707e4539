"""Servers of the module `child`, one life after the other."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.runtime.server.durable.forks import Forks, forking


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    with forking() as made:
        yield made
