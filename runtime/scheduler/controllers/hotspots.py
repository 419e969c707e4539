"""Describe the load of devices by parts of chains: which blocks fill a device, and for which sequences.

A `ChainPart` is a run of blocks on a device that the same chains use: what two models share is one part, what only one
has is another. So a block that one chain uses alone is scaled alone, and blocks that are always used together stay
together.

Contract: snapshots, made from running and waiting sequences; only devices that a caller asks for are examined. It
decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.chains import Chain
from runtime.kv.pages import groups_for
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Limits: waiting chains that are examined, and devices for each of their blocks.
_CHAINS, _PLACES = 64, 16


@dataclass(frozen=True, slots=True)
class ChainPart:
    """Neighbouring blocks on a device that are used by the same sequences.

    Fields:
        pages: Pages that the sequences have there for these blocks.
        layers: Pages per page set.
    """

    blocks: tuple[str, ...]
    sequences: tuple[ScheduledSequence, ...]
    pages: int
    layers: int

    @property
    def name(self) -> str:
        return " ".join(self.blocks)


@dataclass(frozen=True, slots=True)
class Hotspots:
    """Load of waiting sequences. Those of a chain are divided among the devices that could take them.

    Fields:
        sequences: Expected sequences, by device.
        pages: Pages that they will take, by device.
        chains: Chains with waiting sequences and their number, by version.
    """

    sequences: Mapping[str, float]
    pages: Mapping[str, float]
    chains: Mapping[str, tuple[Chain, int]]


def queues_of(state: ClusterState) -> Hotspots:
    """Return the load of waiting sequences, on the devices that have their blocks."""
    sequences: dict[str, float] = {}
    pages: dict[str, float] = {}
    chains: dict[str, tuple[Chain, int]] = {}
    if len(state.waiting):
        counts = state.waiting.by_chain()
        for head in state.waiting.heads()[:_CHAINS]:
            count = counts[head.chain.version]
            chains[head.chain.version] = head.chain, count
            groups = groups_for(head.spec, head.tokens)
            for device, (part, layers) in _places(state, head.chain).items():
                sequences[device] = sequences.get(device, 0.0) + count * part
                pages[device] = pages.get(device, 0.0) + count * groups * layers
    return Hotspots(sequences, pages, chains)


def _places(state: ClusterState, chain: Chain) -> dict[str, tuple[float, float]]:
    """For one sequence of a chain, return the expected share and the expected attention layers of each device."""
    found: dict[str, tuple[float, float]] = {}
    for use in chain.uses:
        where = [name for name in state.block_map.instances.get(use.block, ())[:_PLACES] if state.devices.alive(name)]
        for name in where:
            part, layers = found.get(name, (0.0, 0.0))
            found[name] = max(part, 1 / len(where)), layers + use.kv_layers / len(where)
    return found


def parts_of(device: Device) -> list[ChainPart]:
    """Return the chain parts on a device, by pages, then by sequences, largest first."""
    stages: dict[tuple[str, int, int], list[ScheduledSequence]] = {}
    for sequences in _by_path(device):
        for hop in sequences[0].path:
            if hop.device == device.name:
                stages.setdefault((sequences[0].chain.version, hop.lo, hop.hi), []).extend(sequences)
    users: dict[str, list[tuple[str, int, int]]] = {}
    for key, sequences in stages.items():
        for use in sequences[0].chain.uses:
            if key[1] <= use.lo and use.hi <= key[2]:
                users.setdefault(use.block, []).append(key)
    found: dict[tuple[str, ...], ChainPart] = {}
    for key, sequences in stages.items():
        for blocks, layers in _cut(sequences[0].chain, key, users):
            if blocks not in found:
                all_of_them = [sequence for each in dict.fromkeys(users[blocks[0]]) for sequence in stages[each]]
                found[blocks] = ChainPart(
                    blocks, tuple(all_of_them), layers * sum(sequence.pages.groups for sequence in all_of_them), layers
                )
    return sorted(found.values(), key=lambda part: (-part.pages, -len(part.sequences), part.blocks))


def _by_path(device: Device) -> list[list[ScheduledSequence]]:
    """Return the sequences on a device, grouped by path."""
    found: dict[int, list[ScheduledSequence]] = {}
    for sequence in device.passing.here.values():
        found.setdefault(id(sequence.place.path_usage), []).append(sequence)
    return list(found.values())


def _cut(
    chain: Chain, key: tuple[str, int, int], users: Mapping[str, list[tuple[str, int, int]]]
) -> Iterable[tuple[tuple[str, ...], int]]:
    """Yield the blocks of a stage in runs with the same users, each with its number of attention layers."""
    run: list[str] = []
    layers = 0
    for use in chain.uses:
        if not (key[1] <= use.lo and use.hi <= key[2]):
            continue
        if run and users[use.block] != users[run[-1]]:
            yield tuple(run), layers
            run, layers = [], 0
        run.append(use.block)
        layers += use.kv_layers
    if run:
        yield tuple(run), layers


def stages_of(device: Device, queues: Hotspots) -> list[ChainPart]:
    """Return, as one part each, what sequences use on a device; most sequences first.

    What waiting chains have there is a part without sequences. A copy of such a part on another device adds no hop.
    """
    found: dict[tuple[str, ...], list[ScheduledSequence]] = {}
    for sequences in _by_path(device):
        uses = sequences[0].chain.uses
        spans = [(hop.lo, hop.hi) for hop in sequences[0].path if hop.device == device.name]
        blocks = tuple(use.block for use in uses if any(lo <= use.lo and use.hi <= hi for lo, hi in spans))
        found.setdefault(blocks, []).extend(sequences)
    for chain, _ in queues.chains.values():
        if blocks := tuple(use.block for use in chain.uses if use.block in device.plan.blocks):
            found.setdefault(blocks, [])
    parts = [ChainPart(blocks, tuple(sequences), 0, 1) for blocks, sequences in found.items()]
    return sorted(parts, key=lambda part: (-len(part.sequences), part.blocks))
