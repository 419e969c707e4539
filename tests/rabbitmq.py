"""A RabbitMQ broker for tests: its consumer time-out is short, so that messages that are held for longer come again.

What they ask for must still count once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.queue.rabbitmq import SETTLED, Broker, find_server
from benchmarks.queue.rabbitmq import broker as private_broker

__all__ = ["CONSUMER_TIMEOUT_MS", "SETTLED", "Broker", "broker", "find_server"]

#: Milliseconds for which a consumer may hold a message.
CONSUMER_TIMEOUT_MS = 2000


@contextmanager
def broker(program: Path) -> Iterator[Broker]:
    """Run a broker until the block ends."""
    with private_broker(program, CONSUMER_TIMEOUT_MS) as made:
        yield made
