"""Where the two ends of a direct link find each other: a store of torch.distributed whose keys travel as messages of
the cluster.

torch's own stores listen on a port that nobody guards, or share a folder. Here a key that one end sets is said to the
other (`tell`), and what the other says is `learn`t; so addresses go where all control messages go, encrypted and
authenticated where those are. torch asks from threads of its own for what has not come yet, and waits, up to a limit.

Contract: keys and values are bounded, and so is their number; whoever says more is not heard. `tell` is called on
torch's threads.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

#: Keys of one rendezvous, at most. (gloo has two, NCCL a few.)
_MOST = 64


class Rendezvous(Store):
    """See the top of the file. `seconds`: that this may take in all, from now on."""

    def __init__(self, tell: Callable[[str, bytes], None], seconds: float) -> None:
        super().__init__()
        self._tell, self._end = tell, time.monotonic() + seconds
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._over = ""

    # -- of whoever makes the link -----------------------------------------------------------------------------------

    def learn(self, key: str, value: bytes) -> None:
        """The other end has set it."""
        with self._changed:
            if len(self._values) < _MOST or key in self._values:
                self._values[key] = value
                self._changed.notify_all()

    def end(self, reason: str) -> None:
        """Nothing more comes."""
        with self._changed:
            self._over = self._over or reason
            self._changed.notify_all()

    # -- what torch calls, on threads of its own ---------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Raises TimeoutError where it does not come."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Raises TimeoutError where they do not come."""
        left = self._end - time.monotonic()
        with self._changed:
            there = self._changed.wait_for(
                lambda: self._over or all(key in self._values for key in keys), max(0.0, left)
            )
            if self._over or not there:
                raise TimeoutError(self._over or "the other end did not say where it is in time")

    def check(self, keys: Sequence[str]) -> bool:
        with self._changed:
            return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        """Here; the other end keeps what it knows."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """The limit is one for all of it."""
