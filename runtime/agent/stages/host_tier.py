"""Translate what host memory keeps from units of the engine to blocks of the scheduler (UN-04).

    expect_stage    the blocks of a stage, each with its number of components     from LoadStages
    add_units       the unit of each of its components                            once the engine has loaded it
    expect_ahead, add_read                the same for stages that are read ahead (QL-13)
    change          bytes of units in host memory, as they come and go            to HostWeights: changed blocks only

A unit is remembered while a stage that has it is loaded, or host memory keeps it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from runtime.chains import Stage
from runtime.control.agent_io import Send
from runtime.messages import SCHEDULER, HostWeights
from runtime.messages.to_scheduler import HOST_CHANGES


class HostTier:
    """What the host memory of one device keeps of blocks that are not on the device."""

    def __init__(self, device: str) -> None:
        self._device = device
        #: Blocks of each expected stage, one for each component.
        self._expected: dict[str, tuple[str, ...]] = {}
        self._ahead: dict[str, tuple[str, ...]] = {}  # the same of stages that are read ahead
        self._units: dict[str, tuple[str, ...]] = {}  # units of each loaded stage
        self._blocks: dict[str, set[str]] = {}  # blocks of each unit
        self._kept: dict[str, int] = {}  # bytes of units in host memory
        self._sums: dict[str, int] = {}  # the same by block
        self._unsent: dict[str, int] = {}  # changed blocks, with their bytes

    def expect_stage(self, stage: Stage, blocks: Sequence[str], counts: Sequence[int]) -> None:
        """Record the blocks of a stage that is to be loaded; `counts` are ignored unless they add up to the stage."""
        if (found := _by_component(stage, blocks, counts)) is not None:
            self._expected[stage.id] = found

    def expect_ahead(
        self, stages: Sequence[Stage], blocks: Sequence[Sequence[str]], counts: Sequence[Sequence[int]]
    ) -> None:
        """Record the blocks of the stages that are read ahead from now on."""
        self._ahead = {
            stage.id: found
            for stage, some, many in zip(stages, blocks, counts, strict=True)
            if (found := _by_component(stage, some, many)) is not None
        }

    def add_units(self, stage: str, units: Sequence[str]) -> None:
        """Record the units of a loaded stage, one for each component."""
        blocks = self._expected.pop(stage, ())
        if len(blocks) != len(units):
            return
        self._units[stage] = tuple(units)
        self._name_units(units, blocks)

    def add_read(self, stage: str, units: Sequence[str]) -> None:
        """Record the units of a stage that was read ahead."""
        if len(blocks := self._ahead.get(stage, ())) == len(units):
            self._name_units(units, blocks)

    def _name_units(self, units: Sequence[str], blocks: Sequence[str]) -> None:
        for unit, block in zip(units, blocks, strict=True):
            known = self._blocks.setdefault(unit, set())
            if block not in known:
                known.add(block)
                self._add_bytes(block, self._kept.get(unit, 0))

    def cancel_stage(self, stage: str) -> None:
        """Forget a stage that could not be loaded."""
        self._expected.pop(stage, None)

    def change(self, units: Mapping[str, int], dropped: Collection[str] = ()) -> Iterator[Send]:
        """Record the bytes of units that host memory has now; yield the message to the scheduler if blocks changed.

        `dropped`: stages that have left the device.
        """
        for unit, nbytes in units.items():
            more = nbytes - self._kept.pop(unit, 0)
            if nbytes:
                self._kept[unit] = nbytes
            for block in self._blocks.get(unit, ()):
                self._add_bytes(block, more)
        for stage in dropped:
            self._units.pop(stage, None)
        self._forget_units()
        some = dict(list(self._unsent.items())[:HOST_CHANGES])
        for block, nbytes in some.items():
            del self._unsent[block]
            if not nbytes:
                del self._sums[block]
        if some:
            yield Send(SCHEDULER, HostWeights(self._device, tuple(some.items())))

    def _add_bytes(self, block: str, more: int) -> None:
        if more:
            self._sums[block] = self._unsent[block] = self._sums.get(block, 0) + more

    def _forget_units(self) -> None:
        used = {unit for units in self._units.values() for unit in units}
        for unit in [unit for unit in self._blocks if unit not in self._kept and unit not in used]:
            del self._blocks[unit]


def _by_component(stage: Stage, blocks: Sequence[str], counts: Sequence[int]) -> tuple[str, ...] | None:
    """Return the block of each component of a stage; None unless the counts add up to it."""
    if len(blocks) != len(counts) or sum(counts) != stage.hi - stage.lo:
        return None
    return tuple(block for block, count in zip(blocks, counts, strict=True) for _ in range(count))
