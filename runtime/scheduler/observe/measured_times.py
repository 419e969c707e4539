"""Keep what hops, loads and moves cost on this cluster, learned while it serves, and how far estimates were off.

    hop     a row's hidden states from one device to another that waits for them      (server boundary, bytes)
    load    a stage: bytes that a device gets for the first time, and bytes that it has had before, which the host's
            memory may still hold
    move    K and V of a sequence, copied from the back and recomputed from the front (BL-16)

Each is a `policy.measured_cost.MeasuredCost`. Until there are outcomes, the links and loading times of `zoo profile`
hold, or else `ControlConfig.bandwidth` and `crossing_us`. Every estimate is kept beside its outcome, the latest
`_KEPT` of each kind, and both are traced (`estimate`).

Contract: it decides nothing. Callers are paths and variants (BL-13, BL-20, BL-21), pauses (BL-17) and locality (BL-26).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from runtime.chains import Stage
from runtime.config import ControlConfig
from runtime.control.trace_events import TraceEvents
from runtime.policy.measured_cost import MeasuredCost
from runtime.policy.migration.cost import ChunkSeconds, Costs, finish_time
from runtime.policy.profiles import BlockProfile, DeviceProfile, LinkProfile

Kind = Literal["hop", "load", "move", "request"]
KINDS: tuple[Kind, ...] = ("hop", "load", "move", "request")

#: Estimates with their outcomes that are kept of each kind.
_KEPT = 512
#: Sizes at which an assumed rate stands for a link, in bytes.
_SIZES = (1 << 12, 1 << 16, 1 << 20, 1 << 24)
#: Assumed speed of recomputing: bytes of weights times tokens, per second.
_RECOMPUTE = 1e11


@dataclass(frozen=True, slots=True)
class EstimateOutcome:
    """An estimate and what was measured, in seconds."""

    kind: Kind
    estimate: float
    measured: float


@dataclass(slots=True)
class _Load:
    """A load under way. `x`: 1, bytes that come for the first time, bytes that come again."""

    estimate: float
    x: tuple[float, float, float]
    blocks: tuple[str, ...]


@dataclass(slots=True)
class _DeviceLoads:
    """Loads of one device. `had`: blocks that it has had; `coming`: blocks on their way, by number of loads."""

    had: set[str] = field(default_factory=set)
    coming: Counter[str] = field(default_factory=Counter)
    under_way: dict[Stage, _Load] = field(default_factory=dict)


class MeasuredTimes:
    """Learned costs of one cluster.

    Args:
        config: Rates that are assumed where nothing was measured.
        profile: What `zoo profile` has measured; None for nothing.
        tell: Gets each estimate with its outcome.
    """

    def __init__(self, config: ControlConfig, profile: DeviceProfile | None, tell: TraceEvents) -> None:
        self._tell = tell
        link = _process_link(profile)
        crossing = config.crossing_us / 1e6
        copies = _points(link, config.bandwidth, 0.0)
        self._hops: Mapping[bool, MeasuredCost] = {
            True: MeasuredCost(_points(link, config.bandwidth, 0.0 if link is not None else crossing)),
            False: MeasuredCost(_points(link, config.bandwidth, crossing)),
        }
        blocks = () if profile is None else profile.blocks
        self._load = MeasuredCost([*_first_loads(blocks, config.bandwidth), ((1.0, 0.0, 1e8), 1e8 / config.bandwidth)])
        self._copy = MeasuredCost(copies)
        self._recompute = MeasuredCost([((1.0, _RECOMPUTE), 1.0)])
        self._loads: dict[str, _DeviceLoads] = {}
        self._outcomes: dict[Kind, deque[EstimateOutcome]] = {kind: deque(maxlen=_KEPT) for kind in KINDS}

    # -- hops ----------------------------------------------------------------------------------------------------------

    def hop_seconds(self, same_server: bool, nbytes: float) -> float:
        """Return the time that hidden states take to another device of the same or another server."""
        return self._hops[same_server].at((1.0, nbytes))

    def add_hop(self, now: int, same_server: bool, nbytes: int, seconds: float) -> None:
        """Add a hop that a device has measured."""
        self._add(now, "hop", self.hop_seconds(same_server, nbytes), seconds)
        self._hops[same_server].add((1.0, nbytes), seconds)

    # -- loads ---------------------------------------------------------------------------------------------------------

    def load_seconds(self, device: str, sizes: Mapping[str, int], own: int = 0) -> float:
        """Return the time to load blocks that a device lacks, by their bytes, and `own` bytes of adapters.

        Loads under way come first; what they bring is not counted again.
        """
        loads = self._loads.get(device)
        missing = {block: size for block, size in sizes.items() if loads is None or not loads.coming[block]}
        return self._pending(loads) + self._load.at(self._load_of(device, missing, own))

    def load_delay(self, device: str) -> float:
        """Return the time until a load's first byte comes: loads under way, and the fixed part of a load."""
        return self._pending(self._loads.get(device)) + self._load.coefficients[0]

    def block_load_seconds(self, device: str, block: str, nbytes: int) -> float:
        """Return the time that the bytes of one block take to a device, 0 if they are on their way."""
        loads = self._loads.get(device)
        if loads is not None and loads.coming[block]:
            return 0.0
        _, first, again = self._load.coefficients
        return nbytes * (again if loads is not None and block in loads.had else first)

    @staticmethod
    def _pending(loads: _DeviceLoads | None) -> float:
        return 0.0 if loads is None else sum(each.estimate for each in loads.under_way.values())

    def begin_load(self, device: str, stage: Stage, sizes: Mapping[str, int], own: int, there: Collection[str]) -> None:
        """Record that a stage is requested. `there`: blocks that are loaded already."""
        loads = self._loads.setdefault(device, _DeviceLoads())
        missing = {block: size for block, size in sizes.items() if block not in there and not loads.coming[block]}
        x = self._load_of(device, missing, own)
        loads.under_way[stage] = _Load(self._load.at(x), x, tuple(sizes))
        loads.coming.update(sizes.keys())

    def end_load(self, now: int, device: str, stage: Stage, seconds: float | None) -> None:
        """Record that a stage is loaded, after `seconds` of work for it alone; None: it could not be loaded."""
        loads = self._loads.get(device)
        load = None if loads is None else loads.under_way.pop(stage, None)
        if loads is None or load is None:
            return
        loads.coming.subtract(load.blocks)
        loads.coming = +loads.coming
        if seconds is not None:
            loads.had.update(load.blocks)
            self._add(now, "load", load.estimate, seconds)
            self._load.add(load.x, seconds)

    def remove_device(self, device: str) -> None:
        """Forget the loads of a device that has died."""
        self._loads.pop(device, None)

    def remove_blocks(self, blocks: Collection[str]) -> None:
        """Forget blocks that no chain has any more."""
        for loads in self._loads.values():
            loads.had.difference_update(blocks)

    @property
    def seconds_per_byte(self) -> float:
        """Time to load one byte that a device has not had."""
        return self._load.coefficients[1]

    def _load_of(self, device: str, sizes: Mapping[str, int], own: int) -> tuple[float, float, float]:
        """Return the coordinates of a load: 1, bytes that come for the first time, bytes that come again."""
        had = self._loads[device].had if device in self._loads else ()
        again = sum(size for block, size in sizes.items() if block in had)
        return 1.0, float(sum(sizes.values()) - again + own), float(again)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def move_seconds(
        self, tokens: int, page_tokens: int, chunk: int, set_bytes: float | None, recompute: ChunkSeconds | None
    ) -> float:
        """Return the time until K and V of `tokens` tokens are at another device (BL-16).

        Args:
            page_tokens: Tokens of a page set.
            chunk: Tokens that are recomputed in one step.
            set_bytes: Bytes of a page set on the link; None: nothing is copied.
            recompute: Time of a chunk at the destination; None: nothing is recomputed.
        """
        fixed, rate = self._copy.coefficients
        costs = Costs(page_tokens, chunk, recompute, math.inf if set_bytes is None else rate * set_bytes)
        meeting = finish_time(tokens, costs)
        return meeting.seconds + (fixed if meeting.tokens < tokens else 0.0)  # the fixed part is that of a copy

    @property
    def knows_recompute(self) -> bool:
        """Whether the time of recomputing was learned, not only assumed."""
        return self._recompute.count > 0

    def recompute_seconds(self, weights: int) -> ChunkSeconds:
        """Return the time of recomputing chunks through `weights` bytes."""

        def seconds(context: int, tokens: int) -> float:
            return self._recompute.at((1.0, float(weights) * tokens))

        return seconds

    def add_copy(self, nbytes: int, seconds: float) -> None:
        """Add the time that `nbytes` of K and V took to be copied."""
        self._copy.add((1.0, nbytes), seconds)

    def add_recompute(self, chunks: Sequence[int], weights: int, seconds: float) -> None:
        """Add the time that chunks of so many tokens took to be recomputed through `weights` bytes."""
        self._recompute.add((float(len(chunks)), float(weights) * sum(chunks)), seconds)

    def add_move(self, now: int, estimate: float, seconds: float) -> None:
        """Record how long a move took beside its estimate; its two ends are learned apart."""
        self._add(now, "move", estimate, seconds)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def outcomes(self, kind: Kind) -> Sequence[EstimateOutcome]:
        """Return the latest estimates of a kind with their outcomes, oldest first."""
        return tuple(self._outcomes[kind])

    def record_request(self, now: int, estimate: float, measured: float) -> None:
        """Record the forecast of a request's time from its arrival to its end, and what it took, in seconds."""
        self._add(now, "request", estimate, measured)

    def _add(self, now: int, kind: Kind, estimate: float, measured: float) -> None:
        self._outcomes[kind].append(EstimateOutcome(kind, estimate, measured))
        self._tell.estimate(now, kind, estimate, measured)


def _process_link(profile: DeviceProfile | None) -> LinkProfile | None:
    links = () if profile is None else profile.links
    return next((each for each in links if (each.a, each.b) == ("host", "process")), None)


def _points(link: LinkProfile | None, rate: float, fixed: float) -> list[tuple[tuple[float, float], float]]:
    """Return points of a link: measured ones, or those of a rate in bytes per second; `fixed` seconds more each."""
    if link is None:
        return [((1.0, size), fixed + size / rate) for size in _SIZES]
    return [((1.0, size), fixed + link.seconds(size)) for size in link.line.xs]


def _first_loads(blocks: Iterable[BlockProfile], rate: float) -> list[tuple[tuple[float, float, float], float]]:
    """Return points of loads from the profiles' loading times, or those of a rate in bytes per second."""
    measured = [((1.0, float(each.nbytes), 0.0), each.load_seconds) for each in blocks if each.load_seconds > 0]
    return measured[:_KEPT] or [((1.0, size, 0.0), size / rate) for size in (1e6, 1e8)]
