"""Count the traffic of rows between blocks, between devices and between servers (BL-26).

    gather(most)     add what was counted along paths since the last call, for at most this many paths, in turn
    turn()           end the period: blend its counts with those before

Contract: a token that passed a path counts once for each pair of neighbouring blocks, wherever they ran, and once for
each change of device and of server on that path. Of very many paths those without sequences are forgotten. It decides
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from runtime.policy.placement.locality import blend
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.routing.path_usage import Passes
from runtime.scheduler.routing.used_paths import UsedPaths

#: Above this many paths, those without sequences are forgotten.
_KEPT = 1024


@dataclass(slots=True)
class Crossings:
    """Totals of rows.

    Fields:
        steps: Passes from one block to the next.
        hops: Passes that changed the device.
        crossings: Passes that changed the server.
    """

    steps: int = 0
    hops: int = 0
    crossings: int = 0


class TrafficCounter:
    """Traffic counts of past periods, and totals."""

    def __init__(self, devices: Devices, used_paths: UsedPaths) -> None:
        self._devices = devices
        self._used_paths = used_paths
        self._left: list[Passes] = []
        self._pairs: Counter[tuple[str, str]] = Counter()
        #: (sender, receiver) block -> rows, over past periods.
        self.pairs: Mapping[tuple[str, str], float] = {}
        #: (server, server) -> rows, since the start.
        self.servers: Counter[tuple[str, str]] = Counter()
        self.totals = Crossings()

    def gather(self, most: int | None = None) -> None:
        """Add the counts of paths: all of them, or the next `most`."""
        if not self._left or most is None:
            self._left = list(self._used_paths)
        first = 0 if most is None else max(0, len(self._left) - most)
        some = self._left[first:]
        del self._left[first:]
        by_chain: dict[str, tuple[Passes, int]] = {}
        idle: list[Passes] = []
        for path_usage in some:
            tokens = path_usage.tokens - path_usage.counted
            if not tokens:
                if not path_usage.users and len(self._used_paths) > _KEPT:
                    idle.append(path_usage)
                continue
            path_usage.counted = path_usage.tokens
            known = by_chain.get(path_usage.chain.version)
            by_chain[path_usage.chain.version] = path_usage, tokens + (known[1] if known is not None else 0)
            if len(path_usage.path) > 1:
                self._cross(path_usage, tokens)
        for path_usage, tokens in by_chain.values():
            self.totals.steps += tokens * (len(path_usage.chain.uses) - 1)
            for sender, receiver in pairwise(path_usage.chain.uses):
                self._pairs[sender.block, receiver.block] += tokens
        for path_usage in idle:
            self._used_paths.remove_path(path_usage)

    def turn(self) -> None:
        """Begin another period."""
        self.pairs = blend(self.pairs, self._pairs)
        self._pairs.clear()

    def _cross(self, path_usage: Passes, tokens: int) -> None:
        self.totals.hops += tokens * (len(path_usage.path) - 1)
        for one, other in pairwise(path_usage.path):
            here, there = self._devices[one.device].facts.server, self._devices[other.device].facts.server
            if here != there:
                self.totals.crossings += tokens
                self.servers[here, there] += tokens
