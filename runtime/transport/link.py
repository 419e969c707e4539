"""What an agent's loop needs of whoever carries its messages, and the one that carries them nowhere: the scheduler is
on the same thread.

Contract of a Link: as `transport.messenger.Post`, which is one.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from runtime.chains import Array
from runtime.messages import SCHEDULER, Message
from runtime.transport.messenger import Envelope, PeerCut


class Link(Protocol):
    address: str

    def send(self, to: str, message: Message, arrays: Sequence[Array] = ()) -> bool: ...

    def receive(self, timeout: float) -> list[Envelope | PeerCut]: ...

    def learn(self, name: str, incarnation: int, address: str) -> None: ...

    def remove_peer(self, name: str) -> None: ...

    def deny(self, name: str, reason: str) -> None: ...

    def wake(self) -> None: ...

    def prepare(self) -> None: ...


class InlineLink:
    """Between a scheduler and one agent on one thread: messages as they are. `wake` alone may be called from
    another.
    """

    address = "inproc://here"

    def __init__(self) -> None:
        self._in: list[Envelope | PeerCut] = []
        self._out: list[Message] = []
        self._woken = threading.Event()

    # -- the scheduler's side ----------------------------------------------------------------------------------------

    def deliver(self, message: Message) -> None:
        self._in.append(Envelope(SCHEDULER, 0, message))

    def drain_messages(self) -> list[Message]:
        """All that the agent has said since the last look."""
        out, self._out = self._out, []
        return out

    # -- the agent's side --------------------------------------------------------------------------------------------

    def send(self, to: str, message: Message, arrays: Sequence[Array] = ()) -> bool:
        """There is nobody but the scheduler, who takes no arrays."""
        if to != SCHEDULER:
            return False
        self._out.append(message)
        return True

    def receive(self, timeout: float) -> list[Envelope | PeerCut]:
        if not self._in and timeout > 0:
            self._woken.wait(timeout)
        self._woken.clear()
        out, self._in = self._in, []
        return out

    def wake(self) -> None:
        self._woken.set()

    def prepare(self) -> None:
        """Messages are handed over as they are."""

    def learn(self, name: str, incarnation: int, address: str) -> None:
        """Nobody else is there."""

    def remove_peer(self, name: str) -> None:
        """Nobody else is there."""

    def deny(self, name: str, reason: str) -> None:
        """Nobody else is there."""
