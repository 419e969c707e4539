"""Who may be heard on a post: lives of peers by number, how many messages came of each link, who was cut off. Pure
bookkeeping.

A link is known by the name that whoever connects gives itself, `name/incarnation/purpose`; a process that is connected
to, as `…/link`.
"""

from __future__ import annotations

import re
from functools import lru_cache

from runtime.transport.validate import WireError

#: Of a process; also what stands in paths of sockets.
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_WHO = re.compile(rb"([A-Za-z0-9][A-Za-z0-9_.-]{0,63})/([0-9]{1,9})/([a-z]{1,8})")


def link(name: str, incarnation: int, purpose: str = "main") -> bytes:
    return f"{name}/{incarnation}/{purpose}".encode()


@lru_cache(maxsize=1024)
def _read(who: bytes) -> tuple[str, int] | None:
    known = _WHO.fullmatch(who)
    return None if known is None else (known[1].decode(), int(known[2]))


class Peers:
    """See the top of the file. What is known of the links of a life goes with it."""

    def __init__(self) -> None:
        self._newest: dict[str, int] = {}
        #: By peer: link -> the number that is due; None for one that was cut.
        self._links: dict[str, dict[bytes, int | None]] = {}

    def identify_link(self, who: bytes) -> tuple[str, int] | None:
        """A link's peer and incarnation; None for whoever is not to be heard."""
        known = _read(who)
        if known is None or self.outdated(*known) or self._links.get(known[0], {}).get(who, 0) is None:
            return None
        return known

    def count(self, who: bytes, number: int) -> None:
        """A message came. Raises WireError unless it is the one behind the last: a link that broke may have lost
        some.
        """
        links = self._incarnations_by_link(who)
        expected = links.get(who, 0)
        if number != expected:
            raise WireError(f"number {number} came where {expected} was due")
        links[who] = expected + 1

    def outdated(self, name: str, incarnation: int) -> bool:
        """Whether a later life of a peer is known, or is all that may be heard."""
        return incarnation < self._newest.get(name, 0)

    def start_incarnation(self, name: str, incarnation: int) -> None:
        """Earlier lives of it are over."""
        self._newest[name] = incarnation
        links = self._links.get(name, {})
        for who in [who for who in links if _life(who) < incarnation]:
            del links[who]

    def end_incarnation(self, name: str, incarnation: int | None) -> None:
        """That life of a peer is over; None: the latest that is known."""
        last = self._newest.get(name, -1) if incarnation is None else incarnation
        self.start_incarnation(name, max(self._newest.get(name, 0), last + 1))

    def cut(self, *links: bytes) -> None:
        """Hear them no more."""
        for who in links:
            self._incarnations_by_link(who)[who] = None

    def _incarnations_by_link(self, who: bytes) -> dict[bytes, int | None]:
        return self._links.setdefault(who.partition(b"/")[0].decode(), {})


def _life(who: bytes) -> int:
    return int(who.split(b"/")[1])
