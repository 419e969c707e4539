"""What residency keeps of stages on devices, and of sequences that wait for room."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from runtime.chains import Stage
from runtime.policy.residency.eviction import ResidentStage
from runtime.scheduler.sequences.sequence import ScheduledSequence


@dataclass(frozen=True, slots=True)
class OnDevice(ResidentStage):
    """A resident stage with the key that the scheduler knows it by."""

    stage: Stage | None = None


@dataclass(slots=True)
class RoomWaiter:
    """The first sequence that waits for room on a device.

    Fields:
        closed: Stages that take no new sequences for it.
        holds: Whether later sequences take no pages for it.
    """

    sequence: ScheduledSequence
    since: int
    closed: set[Stage] = field(default_factory=set)
    holds: bool = False


class InTheWay(NamedTuple):
    """Stages in use that would leave for a waiting sequence, by device, and the expected time in ns of its load."""

    stages: Mapping[str, frozenset[Stage]]
    load: int


#: `Residency.close`.
Closing = Callable[[Mapping[str, Iterable[Stage]], int], None]


@dataclass(slots=True)
class SwapCounts:
    """Totals of stages loaded and unloaded on demand.

    Fields:
        loads: Stages loaded.
        unloads: Stages unloaded to make room.
        loaded_bytes: Bytes of the blocks that loads added, each once.
        load_ns: Duration of all loads, from request to report.
    """

    loads: int = 0
    unloads: int = 0
    loaded_bytes: int = 0
    load_ns: int = 0
