"""An agent's heart: tells the scheduler that its process lives, while its loop may be in a step."""

from __future__ import annotations

from collections.abc import Callable

from runtime.messages import SCHEDULER, Heartbeat
from runtime.transport.messenger import Messenger


def beat(messenger: Messenger, stalled_ns: Callable[[], int], seconds: float, wait: Callable[[float], bool]) -> None:
    """Tell the scheduler every so often that the process lives, and how its loop does, until `wait(seconds)` says to
    end.

    For a thread of its own, with a post of its own.
    """
    while not wait(seconds):
        messenger.send(SCHEDULER, Heartbeat(stalled_ns() // 1_000_000))
        messenger.receive(0.0)
