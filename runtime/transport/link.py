"""Define the link that an agent's loop uses, and its implementation for a scheduler on the same thread.

Both behave as `transport.messenger.Messenger`, which is a Link.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol

from runtime.chains import Array
from runtime.messages import SCHEDULER, Message
from runtime.transport.messenger import Envelope, PeerCut


class Link(Protocol):
    """Define the messenger methods that an agent's loop uses."""

    address: str

    def send(self, to: str, message: Message, arrays: Sequence[Array] = ()) -> bool: ...

    def receive(self, timeout: float) -> list[Envelope | PeerCut]: ...

    def learn(self, name: str, incarnation: int, address: str) -> None: ...

    def remove_peer(self, name: str) -> None: ...

    def deny(self, name: str, reason: str) -> None: ...

    def wake(self) -> None: ...

    def prepare(self) -> None: ...


class InlineLink:
    """Connect a scheduler and one agent on one thread by handing over message objects.

    Only `wake` may be called from another thread.
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
        """Return and remove the messages that the agent has sent."""
        out, self._out = self._out, []
        return out

    # -- the agent's side --------------------------------------------------------------------------------------------

    def send(self, to: str, message: Message, arrays: Sequence[Array] = ()) -> bool:
        """Send to the scheduler, which takes no arrays; False for any other receiver."""
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
        """Do nothing: messages are not encoded."""

    def learn(self, name: str, incarnation: int, address: str) -> None:
        """Do nothing: there are no other peers."""

    def remove_peer(self, name: str) -> None:
        """Do nothing: there are no other peers."""

    def deny(self, name: str, reason: str) -> None:
        """Do nothing: there are no other peers."""
