"""Send an agent's heartbeats while its loop may be in a step."""

from __future__ import annotations

from collections.abc import Callable

from runtime.messages import SCHEDULER, Heartbeat
from runtime.transport.messenger import Messenger


def beat(messenger: Messenger, stalled_ns: Callable[[], int], seconds: float, wait: Callable[[float], bool]) -> None:
    """Send a Heartbeat with the loop's stalled time every `seconds`, until `wait(seconds)` returns True.

    Runs on a thread of its own with a messenger of its own.
    """
    while not wait(seconds):
        messenger.send(SCHEDULER, Heartbeat(stalled_ns() // 1_000_000))
        messenger.receive(0.0)
