"""Keep what hops, loads and moves cost on this cluster, learned while it serves, and how far estimates were off.

    hop     rows' hidden states from one device to another that waits for them: bytes, and the work of a message in
            full at both ends, which one of a batch that decodes on is spared     (on one server, between servers)
    load    a stage, by the tier that its bytes come from (`load_times`)
    move    its order and answer, and K and V of a sequence, copied from the back and recomputed from the front (BL-16)

Each is a `policy.measured_cost.MeasuredCost`. Until there are outcomes, the links and loading times of `zoo profile`
hold, or else `ControlConfig.bandwidth` and `crossing_us`. Every estimate is kept beside its outcome, the latest
`_KEPT` of each kind, and both are traced (`estimate`).

Contract: it decides nothing. Callers are paths and variants (BL-13, BL-20, BL-21), pauses (BL-17) and locality (BL-26).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from runtime.chains import Stage
from runtime.config import ControlConfig
from runtime.control.trace_events import TraceEvents
from runtime.policy.measured_cost import MeasuredCost
from runtime.policy.migration.cost import ChunkSeconds, Costs, finish_time
from runtime.policy.profiles import DeviceProfile, LinkProfile
from runtime.scheduler.observe.load_times import LoadTimes

Kind = Literal["hop", "load", "move", "request", "copy", "prefill"]
KINDS: tuple[Kind, ...] = ("hop", "load", "move", "request", "copy", "prefill")

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
            True: MeasuredCost(_hops(_points(link, config.bandwidth, 0.0 if link is not None else crossing))),
            False: MeasuredCost(_hops(_points(link, config.bandwidth, crossing))),
        }
        #: What loads cost.
        self.loads = LoadTimes(() if profile is None else profile.blocks, config.bandwidth)
        self._copy = MeasuredCost(copies)
        self._recompute = MeasuredCost([((1.0, _RECOMPUTE), 1.0)])
        self._order = MeasuredCost([((1.0,), 0.0)])
        self._outcomes: dict[Kind, deque[EstimateOutcome]] = {kind: deque(maxlen=_KEPT) for kind in KINDS}

    # -- hops ----------------------------------------------------------------------------------------------------------

    def hop_seconds(self, same_server: bool, nbytes: float, in_full: bool) -> float:
        """Return the time that hidden states take to another device of the same or another server.

        `in_full`: those of a prompt, or of the first step of a batch.
        """
        return self._hops[same_server].at((1.0, nbytes, float(in_full)))

    def add_hop(self, now: int, same_server: bool, nbytes: int, seconds: float, in_full: bool) -> None:
        """Add a hop that a device has measured."""
        self._add(now, "hop", self.hop_seconds(same_server, nbytes, in_full), seconds)
        self._hops[same_server].add((1.0, nbytes, float(in_full)), seconds)

    # -- loads ---------------------------------------------------------------------------------------------------------

    def end_load(
        self, now: int, device: str, stage: Stage, seconds: float | None, disk: int = -1, host: int = 0
    ) -> None:
        """Record that a stage is loaded, as `LoadTimes.end`, with its estimate beside the outcome."""
        estimate = self.loads.end(device, stage, seconds, disk, host)
        if estimate is not None and seconds is not None:
            self._add(now, "load", estimate, seconds)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def move_seconds(
        self,
        tokens: int,
        page_tokens: int,
        chunk: int,
        set_bytes: float | None,
        recompute: ChunkSeconds | None,
        fetch_sets: int = 8,
        between_steps: bool = False,
    ) -> float:
        """Return the time until K and V of `tokens` tokens are at another device (BL-16).

        Args:
            page_tokens: Tokens of a page set.
            chunk: Tokens that are recomputed in one step.
            set_bytes: Bytes of a page set on the link; None: nothing is copied.
            recompute: Time of a chunk at the destination; None: nothing is recomputed.
            fetch_sets: Page sets that the destination has under way at once.
            between_steps: Whether it takes pages between its steps only.
        """
        turn, rate = self._copy.coefficients
        copy = math.inf if set_bytes is None else rate * set_bytes
        costs = Costs(
            page_tokens,
            chunk,
            recompute,
            copy,
            copy_turn=turn,
            fetch_sets=fetch_sets,
            between_steps=between_steps,
        )
        order = self._order.at((1.0,)) if self._order.count else 0.0
        return order + finish_time(tokens, costs).seconds

    @property
    def knows_recompute(self) -> bool:
        """Whether the time of recomputing was learned, not only assumed."""
        return self._recompute.count > 0

    def recompute_seconds(self, weights: int) -> ChunkSeconds:
        """Return the time of recomputing chunks through `weights` bytes."""

        def seconds(context: int, tokens: int) -> float:
            return self._recompute.at((1.0, float(weights) * tokens))

        return seconds

    def add_copy(self, turns: int, nbytes: int, seconds: float) -> None:
        """Add the time that `nbytes` of K and V took to be copied, in so many turns of source and destination."""
        self._copy.add((float(turns), nbytes), seconds)

    def add_recompute(self, chunks: Sequence[int], weights: int, seconds: float) -> None:
        """Add the time that chunks of so many tokens took to be recomputed through `weights` bytes."""
        self._recompute.add((float(len(chunks)), float(weights) * sum(chunks)), seconds)

    def add_move(self, now: int, estimate: float, seconds: float, ends: float) -> None:
        """Record how long a move took beside its estimate; `ends`: from its order's arrival to its last page.

        The two ends are learned apart; what is left is the way of the order and of the answer.
        """
        self._order.add((1.0,), seconds - ends)
        self._add(now, "move", estimate, seconds)

    # -- outcomes ------------------------------------------------------------------------------------------------------

    def outcomes(self, kind: Kind) -> Sequence[EstimateOutcome]:
        """Return the latest estimates of a kind with their outcomes, oldest first."""
        return tuple(self._outcomes[kind])

    def record_request(self, now: int, estimate: float, measured: float) -> None:
        """Record the forecast of a request's time from its arrival to its end, and what it took, in seconds."""
        self._add(now, "request", estimate, measured)

    def record_outcome(self, now: int, kind: Kind, estimate: float, measured: float) -> None:
        """Record an estimate that is learned elsewhere beside its outcome, in seconds."""
        self._add(now, kind, estimate, measured)

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


def _hops(points: Sequence[tuple[tuple[float, float], float]]) -> list[tuple[tuple[float, float, float], float]]:
    """Return points of a link as those of hops; that a message is in full is assumed to cost nothing."""
    return [((*x, 0.0), seconds) for x, seconds in points]
