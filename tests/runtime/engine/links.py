"""Two ends of direct links in one process; their notices are carried from one to the other by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from runtime.config import DirectConfig
from runtime.engine.tensors.links import DirectLinks
from runtime.engine.tensors.process_groups import Gloo
from runtime.engine.tensors.rendezvous import Rendezvous
from runtime.transport.interfaces import ArrivedTensor, PeerNotice

LIMIT = 60.0


class Wire:
    """The two ends, `a` and `b`. `changes` may replace a notice on its way, or drop it by returning None."""

    def __init__(self, config: DirectConfig, rails: tuple[Gloo, Gloo] | None = None, as_bytes: bool = False) -> None:
        one, other = rails or (Gloo(), Gloo())
        self.ends = {"a": DirectLinks(one, config, as_bytes), "b": DirectLinks(other, config, as_bytes)}
        self.changes: Callable[[str, PeerNotice], PeerNotice | None] = lambda who, said: said
        self.over: list[tuple[str, bool, str]] = []
        for end in self.ends.values():
            end.begin(lambda: None)

    @property
    def a(self) -> DirectLinks:
        return self.ends["a"]

    @property
    def b(self) -> DirectLinks:
        return self.ends["b"]

    def pump(self) -> None:
        for name, end in self.ends.items():
            for said in end.drain_notices():
                if not said.key:
                    self.over.append((name, said.outgoing, said.reason))
                told = self.changes(name, said)
                if told is None:
                    continue
                other = self.ends[told.peer]
                if told.key:
                    other.handle_rendezvous(name, not told.outgoing, told.key, told.value)
                else:
                    other.handle_close(name, not told.outgoing, told.reason)

    def until(self, condition: Callable[[], Any], seconds: float = LIMIT) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, (self.over, [dict(each.state()) for each in self.ends.values()])
            self.pump()
            time.sleep(0.001)

    def link(self) -> None:
        """Set up the link from a to b."""
        self.a.offer("b")
        self.until(lambda: self.a.carries("b", 1))

    def came(self, count: int = 1, seconds: float = LIMIT) -> list[ArrivedTensor]:
        """Wait for so many arrivals that `b` expects from `a`, and return them."""
        out: list[ArrivedTensor] = []

        def enough() -> bool:
            out.extend(self.b.drain_arrivals())
            return len(out) >= count

        self.until(enough, seconds)
        return out

    def close(self) -> None:
        for end in self.ends.values():
            end.close()


class Faulty(Gloo):
    """A Gloo transport with faults.

    It drops the tensors of the tags in `swallows`, flips a byte in those of the tags in `changes`, and creates groups
    only after `delay` seconds. While `sound` is set, tensors pass unharmed.
    """

    def __init__(self, swallows: tuple[int, ...] = (), changes: tuple[int, ...] = (), delay: float = 0.0) -> None:
        super().__init__()
        self._swallows, self._changes, self._delay = swallows, changes, delay
        self.sound = False

    def group(self, store: Rendezvous, rank: int, seconds: float) -> Any:
        time.sleep(self._delay)
        return super().group(store, rank, seconds)

    def send(self, group: Any, tensor: Tensor, tag: int, to: int = 1) -> Any:
        if tag in self._swallows and not self.sound:
            return None
        if tag in self._changes and not self.sound:
            tensor = tensor.clone()
            tensor[0] ^= 1
        return super().send(group, tensor, tag, to)

    def arrived(self, work: Any, seconds: float) -> None:
        if work is not None:
            super().arrived(work, seconds)
