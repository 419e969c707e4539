"""Who may be heard on a post: lives of peers by number, how many messages came of each link, who was cut off. Pure bookkeeping.

A link is known by the name that whoever connects gives itself, `name/incarnation/purpose`; a process that is connected to, as `…/link`.
"""

from __future__ import annotations

import re

from runtime.cluster.wire import WireError

#: Of a process; also what stands in paths of sockets.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WHO = re.compile(rb"([A-Za-z0-9][A-Za-z0-9_.-]{0,63})/([0-9]{1,9})/([a-z]{1,8})")


def link(name: str, incarnation: int, purpose: str = "main") -> bytes:
    return f"{name}/{incarnation}/{purpose}".encode()


class Register:
    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        self._expected: dict[bytes, int] = {}
        self._cut: set[bytes] = set()

    def heard(self, who: bytes) -> tuple[str, int] | None:
        """A link's peer and incarnation; None for whoever is not to be heard."""
        known = _WHO.fullmatch(who)
        if known is None or who in self._cut:
            return None
        name, incarnation = known[1].decode(), int(known[2])
        return None if self.outdated(name, incarnation) else (name, incarnation)

    def count(self, who: bytes, number: int) -> None:
        """A message came. Raises WireError unless it is the one behind the last: a link that broke may have lost some."""
        expected = self._expected.get(who, 0)
        if number != expected:
            raise WireError(f"number {number} came where {expected} was due")
        self._expected[who] = expected + 1

    def outdated(self, name: str, incarnation: int) -> bool:
        """Whether a later life of a peer is known, or is all that may be heard."""
        return incarnation < self._newest.get(name, 0)

    def met(self, name: str, incarnation: int) -> None:
        """Earlier lives of it are over."""
        self._newest[name] = incarnation

    def gone(self, name: str, incarnation: int | None) -> None:
        """That life of a peer is over; None: the latest that is known."""
        last = self._newest.get(name, -1) if incarnation is None else incarnation
        self._newest[name] = max(self._newest.get(name, 0), last + 1)

    def cut(self, *links: bytes) -> None:
        """Hear them no more."""
        self._cut.update(links)
