"""Choose the stages that leave a device so that another one fits (QL-13).

    stages_to_unload(resident, incoming, limit, order)      the stages that leave, or None if too few can

A queue of waiting sequences tells which stages are needed next, so the stage with the furthest next use leaves first
(Belady's rule); stages that no waiting sequence needs leave before the rest, the least recently used of them first.
`lru` looks at the last use only, and is the baseline. Blocks that several stages share count once, and leave with the
last stage that has them. Pure functions; sizes in bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from runtime.config import EvictionOrder


@dataclass(frozen=True, slots=True)
class StageWeights:
    """The weights of a stage.

    Fields:
        blocks: Bytes of its blocks, by id.
        own: Bytes that no other stage can share, such as adapters.
    """

    blocks: Mapping[str, int]
    own: int = 0


@dataclass(frozen=True, slots=True)
class ResidentStage:
    """A stage on a device.

    Fields:
        name: Its id.
        weights: Its bytes.
        next_use: Place of its first waiting sequence in the order of all that wait; None if none waits.
        used: Time of its latest use, in ns.
        pinned: Whether it cannot leave now: sequences run on it, or it is being loaded.
    """

    name: str
    weights: StageWeights
    next_use: int | None = None
    used: int = 0
    pinned: bool = False


Named = TypeVar("Named", bound=ResidentStage)


@dataclass(slots=True)
class Footprint:
    """Bytes of a set of stages, each block once."""

    nbytes: int = 0
    _users: Counter[str] = field(default_factory=Counter)

    def add(self, weights: StageWeights) -> None:
        self.nbytes += weights.own + sum(size for block, size in weights.blocks.items() if not self._users[block])
        self._users.update(weights.blocks.keys())

    def remove(self, weights: StageWeights) -> None:
        self._users.subtract(weights.blocks.keys())
        self.nbytes -= weights.own + sum(size for block, size in weights.blocks.items() if not self._users[block])

    def missing(self, weights: StageWeights) -> int:
        """Return the bytes that come if this stage is added (UN-04)."""
        return weights.own + sum(size for block, size in weights.blocks.items() if not self._users[block])


def footprint_of(stages: Iterable[StageWeights]) -> Footprint:
    """Return the footprint of these stages together."""
    made = Footprint()
    for each in stages:
        made.add(each)
    return made


def stages_to_unload(
    resident: Sequence[Named], incoming: StageWeights, limit: int, order: EvictionOrder, place: int | None = None
) -> list[Named] | None:
    """Return the stages that leave so that an incoming one fits into `limit` bytes; None if too few can leave.

    An empty list says that it fits already. No stage leaves whose departure frees nothing that is needed.

    Args:
        place: Place of the sequence that needs the incoming stage in the order of those that wait: stages that earlier
            ones need do not leave. None: any may leave that is not pinned.
    """
    held = footprint_of(each.weights for each in resident)
    held.add(incoming)
    if held.nbytes <= limit:
        return []
    candidates = sorted(
        (each for each in resident if not each.pinned and (place is None or _later(each, place))),
        key=_used if order == "lru" else _furthest,
    )
    gone: list[Named] = []
    for each in candidates:
        held.remove(each.weights)
        gone.append(each)
        if held.nbytes <= limit:
            break
    else:
        return None
    return _needed(gone, held, limit)


def _later(stage: ResidentStage, place: int) -> bool:
    return stage.next_use is None or stage.next_use > place


def _furthest(stage: ResidentStage) -> tuple[bool, int, int, str]:
    unused = stage.next_use is None
    return not unused, -(stage.next_use or 0), stage.used, stage.name


def _used(stage: ResidentStage) -> tuple[int, str]:
    return stage.used, stage.name


def _needed(gone: list[Named], held: Footprint, limit: int) -> list[Named]:
    """Return those of the stages that have to leave: each stage stays, the last chosen first, where it fits."""
    kept: list[Named] = []
    for each in reversed(gone):
        held.add(each.weights)
        if held.nbytes > limit:
            held.remove(each.weights)
            kept.append(each)
    return kept[::-1]
