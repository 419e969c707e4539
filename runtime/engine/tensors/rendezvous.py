"""The rendezvous of a direct link: a torch.distributed store with its keys sent as messages of the cluster.

torch's own stores listen on an unprotected port or share a folder. Here a key that one end sets is sent to the other
with `tell`, and what the other end sends arrives through `learn`. So addresses travel like all control messages,
encrypted and authenticated where those are. torch reads keys on threads of its own and waits for missing ones until a
deadline.

Contract: the number of keys is bounded; keys beyond the limit are dropped. `tell` is called on torch's threads.
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
    """A torch.distributed store shared by the two ends of one link.

    `seconds`: the time limit for the whole rendezvous, from the construction on.
    """

    def __init__(self, tell: Callable[[str, bytes], None], seconds: float) -> None:
        super().__init__()
        self._tell, self._end = tell, time.monotonic() + seconds
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._over = ""

    # -- called by the link's endpoint -------------------------------------------------------------------------------

    def learn(self, key: str, value: bytes) -> None:
        """Store a key that the other end has set."""
        with self._changed:
            if len(self._values) < _MOST or key in self._values:
                self._values[key] = value
                self._changed.notify_all()

    def end(self, reason: str) -> None:
        """End the rendezvous: waiting calls raise TimeoutError with this reason."""
        with self._changed:
            self._over = self._over or reason
            self._changed.notify_all()

    # -- called by torch, on threads of its own ----------------------------------------------------------------------

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.learn(key, data)
        self._tell(key, data)

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value. Raises TimeoutError if it does not arrive in time."""
        self.wait([key])
        return self._values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait for keys until the rendezvous' own deadline; `timeout` is ignored.

        Raises TimeoutError if they do not arrive in time.
        """
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
        """Delete a key here only; the other end keeps its copy."""
        with self._changed:
            return self._values.pop(key, None) is not None

    def set_timeout(self, timeout: timedelta) -> None:
        """Do nothing: one deadline holds for the whole rendezvous."""
