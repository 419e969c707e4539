"""Let host memory read the weights of the models that are needed next, before it is their turn (QL-13, warm start).

    tick: review -> the stages that each device needs next, in the order of the queue, as far as host memory has room
                 -> ReadAhead, if they have changed since the last review

The paper keeps the models of a virtual queue's longest beginning that fits warm. Here the bytes of a block count once,
and blocks that the device has count nothing (UN-04). Left out are chains with several instances of a block: which of
them a sequence will run on is not known before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.chains import Chain, Stage
from runtime.messages.to_agent import AHEAD_STAGES
from runtime.scheduler.devices.devices import Device, DeviceFacts
from runtime.scheduler.placement.block_map import blocks_of
from runtime.scheduler.state import ClusterState


@dataclass(slots=True)
class _Ahead:
    """What a device is to read.

    Fields:
        room: Bytes that its host memory still has for it.
        there: Blocks on the device, and those of `stages`.
        full: Whether a stage did not fit: what comes after it is not read.
    """

    room: int
    there: set[str]
    stages: list[tuple[Stage, tuple[str, ...]]] = field(default_factory=list)
    full: bool = False


class ReadingAhead:
    """What the devices of one cluster read ahead."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        #: What each device was told last, with the facts of its incarnation then.
        self._told: dict[str, tuple[DeviceFacts, tuple[Stage, ...]]] = {}

    def review(self) -> None:
        """Tell devices which stages they need next, where these have changed. Call it on every tick."""
        found = {
            device.name: _Ahead(device.host_free, _blocks_on(device))
            for device in self._state.devices.living.values()
            if device.facts.host_memory
        }
        if found:
            self._add_next(found)
        for name, ahead in found.items():
            stages, facts = tuple(stage for stage, _ in ahead.stages), self._state.devices[name].facts
            before = self._told.get(name)
            if stages != (before[1] if before is not None and before[0] is facts else ()):
                self._told[name] = facts, stages
                self._state.read_ahead(name, ahead.stages)

    def _add_next(self, found: dict[str, _Ahead]) -> None:
        seen = set[str]()
        for sequence in self._state.waiting.heads():
            chain = sequence.chain
            route = None if chain.version in seen else self._state.router.only(chain)
            seen.add(chain.version)
            for name, stage in () if route is None else self._state.router.lacking(route):
                ahead = found.get(name)
                if ahead is not None and not ahead.full:
                    self._add_stage(self._state.devices[name], ahead, chain, stage)
            if all(each.full for each in found.values()):
                return

    def _add_stage(self, device: Device, ahead: _Ahead, chain: Chain, stage: Stage) -> None:
        if stage in device.stages.loading or stage in device.stages.refused:
            return
        blocks = blocks_of(chain, stage)
        missing = {name: size for name, size in self._state.sizes_of(blocks).items() if name not in ahead.there}
        ahead.room -= sum(missing.values())
        ahead.full = ahead.room < 0 or len(ahead.stages) >= AHEAD_STAGES
        if not ahead.full:
            ahead.there.update(blocks)
            ahead.stages.append((stage, blocks))


def _blocks_on(device: Device) -> set[str]:
    """Return the blocks that a device has, or is loading."""
    stages = device.stages
    return stages.warm | {block for stage in stages.loading for block in stages.wanted.get(stage, ())}
