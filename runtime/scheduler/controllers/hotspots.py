"""What loads the devices of a cluster, seen by parts of chains: which blocks fill a device, for whom, and who waits for
them.

A `ChainPart` is blocks that run back to back on a device for the same chains: what two models share is a part, what
only one has is another. So a block that a device holds for itself is scaled by itself, and blocks that nobody uses
apart are not torn apart.

Contract: pictures of this moment, made of what was let in and what waits; a device is looked into only where somebody
asks. Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from runtime.chains import Chain
from runtime.kv.pages import groups_for
from runtime.policy.migration.order import Mover
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Chains whose queues are looked at, and devices of each of their blocks.
_CHAINS, _PLACES = 64, 16


@dataclass(frozen=True, slots=True)
class ChainPart:
    """Neighbouring blocks on a device, used by the same sequences. `pages`: those they take there; `layers`: pages of a
    group.
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
    """Who waits: by device, sequences and pages that they will take there, each chain's divided by the devices that
    could take it.
    """

    sequences: Mapping[str, float]
    pages: Mapping[str, float]
    chains: Mapping[str, tuple[Chain, int]]


def queues_of(state: ClusterState) -> Hotspots:
    """What waits to be let in, laid on the devices that its blocks are on."""
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
    """Of one sequence of a chain: the part of it that each device can expect, and layers."""
    found: dict[str, tuple[float, float]] = {}
    for use in chain.uses:
        where = [name for name in state.block_map.instances.get(use.block, ())[:_PLACES] if state.devices.alive(name)]
        for name in where:
            part, layers = found.get(name, (0.0, 0.0))
            found[name] = max(part, 1 / len(where)), layers + use.kv_layers / len(where)
    return found


def parts_of(device: Device) -> list[ChainPart]:
    """What runs on a device, most pages first, of equals most sequences."""
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
    """Sequences on a device, those of one path together."""
    found: dict[int, list[ScheduledSequence]] = {}
    for sequence in device.passing.here.values():
        found.setdefault(id(sequence.place.path_usage), []).append(sequence)
    return list(found.values())


def _cut(
    chain: Chain, key: tuple[str, int, int], users: Mapping[str, list[tuple[str, int, int]]]
) -> Iterable[tuple[tuple[str, ...], int]]:
    """The blocks of a stage, cut where who uses them changes; with the layers of each run."""
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
    """All that a sequence uses on a device, as one part; most sequences first. A copy of it elsewhere adds no hop."""
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


def movers_of(sequences: Iterable[ScheduledSequence]) -> tuple[Mover, ...]:
    """Sequences of a part as `move_order` wants them, with page groups for pages, each its own; paused ones resume
    later.
    """
    made: list[Mover] = []
    first = 0
    for sequence in sequences:
        if not sequence.waits.move and not sequence.waits.doomed:
            made.append(
                Mover(sequence.seq, frozenset(range(first, first + sequence.pages.groups)), sequence.waits.paused or 0)
            )
            first += sequence.pages.groups
    return tuple(made)
