"""Track which links a messenger accepts.

It keeps the newest incarnation of each peer, the next message number of each link, and the links that were cut. Pure
bookkeeping. A link is named by the connecting end, `name/incarnation/purpose`; the end that is connected to is named
`…/link`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from runtime.transport.validate import WireError

#: Name of a process; also used in paths of sockets.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WHO = re.compile(rb"([A-Za-z0-9][A-Za-z0-9_.-]{0,63})/([0-9]{1,9})/([a-z]{1,8})")


def link(name: str, incarnation: int, purpose: str = "main") -> bytes:
    return f"{name}/{incarnation}/{purpose}".encode()


@lru_cache(maxsize=1024)
def _read(who: bytes) -> tuple[str, int] | None:
    known = _WHO.fullmatch(who)
    return None if known is None else (known[1].decode(), int(known[2]))


class Peers:
    """Track the accepted links; see the module docstring. A link's state is dropped with its incarnation."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        #: By peer: link -> number of its next message; None if it was cut.
        self._links: dict[str, dict[bytes, int | None]] = {}

    def identify_link(self, who: bytes) -> tuple[str, int] | None:
        """Return a link's peer and incarnation; None if the link is malformed, outdated or cut."""
        known = _read(who)
        if known is None or self.outdated(*known) or self._links.get(known[0], {}).get(who, 0) is None:
            return None
        return known

    def count(self, who: bytes, number: int) -> None:
        """Count a received message.

        Raises WireError unless its number is the next: a broken connection may have lost some.
        """
        links = self._incarnations_by_link(who)
        expected = links.get(who, 0)
        if number != expected:
            raise WireError(f"number {number} came where {expected} was due")
        links[who] = expected + 1

    def due(self, who: bytes) -> int | None:
        """Return the number of a link's next message; None if the link is cut, outdated or none."""
        return None if self.identify_link(who) is None else self._incarnations_by_link(who).get(who, 0)

    def skip(self, who: bytes, count: int) -> None:
        """Count messages that were received elsewhere."""
        links = self._incarnations_by_link(who)
        if (due := links.get(who, 0)) is not None:
            links[who] = due + count

    def outdated(self, name: str, incarnation: int) -> bool:
        """Return whether a later incarnation of a peer is known, or this one was ended."""
        return incarnation < self._newest.get(name, 0)

    def start_incarnation(self, name: str, incarnation: int) -> None:
        """Register an incarnation; earlier ones end."""
        self._newest[name] = incarnation
        links = self._links.get(name, {})
        for who in [who for who in links if _life(who) < incarnation]:
            del links[who]

    def end_incarnation(self, name: str, incarnation: int | None) -> None:
        """End an incarnation of a peer (None: the latest known)."""
        last = self._newest.get(name, -1) if incarnation is None else incarnation
        self.start_incarnation(name, max(self._newest.get(name, 0), last + 1))

    def cut(self, *links: bytes) -> None:
        """Accept nothing more from these links."""
        for who in links:
            self._incarnations_by_link(who)[who] = None

    def _incarnations_by_link(self, who: bytes) -> dict[bytes, int | None]:
        return self._links.setdefault(who.partition(b"/")[0].decode(), {})


def _life(who: bytes) -> int:
    return int(who.split(b"/")[1])
