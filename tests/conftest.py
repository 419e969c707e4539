"""Servers that several packages of tests use; each is started once per process, when a test first needs it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from tests import postgres, rabbitmq


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[str]:
    """URL of a PostgreSQL server of the tests' own."""
    binaries = postgres.find_binaries()
    if binaries is None:
        pytest.skip("PostgreSQL is NOT tested here: no initdb and pg_ctl (Debian: apt-get install postgresql)")
    with postgres.cluster(binaries) as url:
        yield url


@pytest.fixture(scope="session")
def rabbit() -> Iterator[rabbitmq.Broker]:
    """A RabbitMQ broker of the tests' own. A test that kills it starts it again."""
    program = rabbitmq.find_server()
    if program is None or find_spec("aio_pika") is None:
        pytest.skip("RabbitMQ is NOT tested here: no broker (apt-get install rabbitmq-server) or no package aio-pika")
    with rabbitmq.broker(program) as made:
        yield made
