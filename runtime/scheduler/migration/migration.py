"""Sequences that change a device, as the scheduler has them (`handover`): which blocks, from where to where, how far it
is; and the table of those under way.

Contract: `Moves` keeps the books of moves: each that is under way, the pages taken for it at its destination, and
totals. It decides nothing; the one message that it sends is the end of a move whose sequence leaves its devices."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from runtime.chains import Chain, Hop, Path
from runtime.messages import FinishMigration, MigrationReady
from runtime.policy.migration.recompute_source import Front
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


@dataclass(slots=True)
class Migration:
    """One move: blocks of a chain, components and layers of `part`, from `source` to `target`; then the sequence's path
    is `path`.

    `front`: what it recomputes from. `upto`: tokens that the destination has been asked for; `groups`: page groups
    taken there. `asked`: an answer is awaited; `last`: the latest; `orphan`: the source is dead.
    """

    number: int
    sequence: ScheduledSequence
    chain: Chain
    part: Hop
    target: str
    path: Path
    copy: bool
    front: Front
    upto: int = 0
    groups: int = 0
    stages: int = 0
    asked: bool = True
    orphan: bool = False
    last: MigrationReady | None = None

    @property
    def source(self) -> str:
        return self.part.device

    @property
    def recompute(self) -> bool:
        return self.front.origin != "none"

    @property
    def pages(self) -> int:
        """Of a group."""
        return self.part.layers[1] - self.part.layers[0]


@dataclass(slots=True)
class MigrationCounts:
    """Totals since the beginning. Tokens are those that were copied and recomputed in committed moves; `nbytes` of K
    and V travelled, and `inputs` of hidden states."""

    started: int = 0
    committed: int = 0
    aborted: int = 0
    copied: int = 0
    recomputed: int = 0
    nbytes: int = 0
    inputs: int = 0


class Moves:
    """Moves that are under way, by number."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._moves: dict[int, Migration] = {}
        self.counts = MigrationCounts()

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Migration]:
        return iter(tuple(self._moves.values()))

    def get(self, number: int) -> Migration | None:
        return self._moves.get(number)

    def get_move(self, sequence: ScheduledSequence) -> Migration | None:
        """The move that a sequence is in."""
        return self._moves.get(sequence.waits.move)

    def target(self, sequence: ScheduledSequence) -> str | None:
        """Where the move goes that a sequence is in, if it is in one."""
        move = self.get_move(sequence)
        return None if move is None else move.target

    def totals(self) -> MigrationCounts:
        """A copy of the counts so far."""
        return replace(self.counts)

    def held(self) -> dict[str, int]:
        """Pages that are taken for moves, by destination."""
        held: dict[str, int] = {}
        for move in self._moves.values():
            held[move.target] = held.get(move.target, 0) + move.pages * move.groups
        return held

    def bound_for(self, device: str, blocks: Collection[str]) -> bool:
        """Whether a move of any of these blocks to a device is under way."""
        there = (move for move in self._moves.values() if move.target == device)
        return any(not move.chain.blocks(move.part.lo, move.part.hi).isdisjoint(blocks) for move in there)

    def begin(self, move: Migration) -> None:
        """A move is under way."""
        self._moves[move.number] = move
        move.sequence.moves(move.number)
        self.counts.started += 1

    def end_move(self, move: Migration) -> None:
        """A move is over: its pages at the destination are the sequence's, or nobody's."""
        del self._moves[move.number]
        move.sequence.moves(0)
        device = self._state.devices[move.target]
        if device.alive:
            device.pages.used -= move.pages * move.groups
            self._state.changed = True

    def cancel(self, sequence: ScheduledSequence) -> None:
        """A sequence leaves its devices: its move is over."""
        move = self.get_move(sequence)
        if move is not None:
            self.end_move(move)
            self.counts.aborted += 1
            self._state.out.add_message(move.target, FinishMigration(move.number, sequence.seq, sequence.epoch, False))


def part_of(chain: Chain, blocks: range, device: str) -> Hop:
    """These blocks as if they were a hop."""
    first = sum(use.kv_layers for use in chain.uses[: blocks.start])
    last = first + sum(use.kv_layers for use in chain.uses[blocks.start : blocks.stop])
    return Hop(device, chain.uses[blocks.start].lo, chain.uses[blocks.stop - 1].hi, (first, last))
