"""Bound wrong keys in the page's login form: per address, and altogether, within a minute.

Kept are the failures of the last minute, of which there are `MOST` at most: whatever is tried, the memory is that. Once
a bound is reached no key is checked, the right one neither, since an answer would tell it apart.
"""

from __future__ import annotations

import ipaddress
import math
import time
from collections import deque
from collections.abc import Callable

#: Failures within so many seconds: of one address, and of all.
SECONDS = 60.0
MOST_OF_ADDRESS = 10
MOST = 60
#: Bits of an IPv6 address that one network has for itself.
_OWN_BITS = 64


class LoginLimit:
    """The failed logins of one server. Used on the event loop's thread only."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: deque[tuple[float, str]] = deque(maxlen=MOST)

    def wait_seconds(self, address: str) -> int | None:
        """Return the seconds, at least 1, until an address may try again; None: it may now."""
        now, source = self._clock(), _source(address)
        while self._failed and self._failed[0][0] <= now - SECONDS:
            self._failed.popleft()
        own = [at for at, of in self._failed if of == source]
        ends = [times[-most] for times, most in ((own, MOST_OF_ADDRESS), (self._all(), MOST)) if len(times) >= most]
        return max(1, math.ceil(max(ends) + SECONDS - now)) if ends else None

    def count_failure(self, address: str) -> None:
        self._failed.append((self._clock(), _source(address)))

    def _all(self) -> list[float]:
        return [at for at, _ in self._failed]


def _source(address: str) -> str:
    """Return what an address is counted as: an IPv6 one as its network, since one machine may have all of that."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address[:64]
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((int(found) >> _OWN_BITS << _OWN_BITS, _OWN_BITS)))
    return str(found)
