"""Records of migrations under way: which blocks, from which device to which, and how far each is.

Contract: `Moves` tracks each migration under way, the pages taken for it at its destination, and totals. It decides
nothing; the one message that it sends ends the migration of a sequence that leaves its devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from runtime.chains import Chain, Hop, Path, devices_of
from runtime.messages import FinishMigration, MigrationReady, StartMigration
from runtime.policy.migration.recompute_source import Front
from runtime.scheduler.kv.page_accounting import PageHolding
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Why K and V are brought elsewhere: the sequence moves (BL-16), or its prompt is done where none decodes (TI-15).
Purpose = Literal["move", "handoff"]


@dataclass(slots=True)
class MovePart:
    """The part of a migration between one pair of devices.

    Fields:
        number: Its number in messages.
        hop: The blocks on the source, as a hop: components and layers.
        target: The destination.
        front: What pages are recomputed from, from the front.
        asked: Whether an answer of the destination is awaited.
        last: Latest answer of the destination.
    """

    number: int
    hop: Hop
    target: str
    front: Front
    asked: bool = True
    last: MigrationReady | None = None

    @property
    def source(self) -> str:
        return self.hop.device

    @property
    def pages(self) -> int:
        """Pages per page set at the destination."""
        return self.hop.layers[1] - self.hop.layers[0]


@dataclass(slots=True)
class Migration:
    """One migration of blocks of a running sequence to other devices.

    Fields:
        number: That of its first part.
        parts: What is brought from which device to which; several only in a hand-off.
        path: The sequence's path after the migration.
        copy: Whether pages are copied, from the back.
        upto: Tokens that the destinations have been asked for.
        groups: Page sets at each destination: taken, or there already.
        there: Those that are there already, the first ones, shared with another sequence; empty for none.
        donor: Name of that sequence.
        stages: Number of requests to the destinations so far.
        orphan: Whether the source is dead.
        crowded: Whether it was aborted because a destination had no room for what was computed meanwhile.
        as_written: Whether the latest request was for tokens of which the row was under way (layer grain).
        began: Time of the first request in ns.
        estimate: Expected time until its answer, in seconds.
    """

    number: int
    sequence: ScheduledSequence
    chain: Chain
    parts: tuple[MovePart, ...]
    path: Path
    copy: bool
    purpose: Purpose = "move"
    upto: int = 0
    groups: int = 0
    there: PageHolding = field(default_factory=PageHolding)
    donor: str = ""
    stages: int = 0
    orphan: bool = False
    crowded: bool = False
    as_written: bool = False
    began: int = 0
    estimate: float = 0.0

    @property
    def source(self) -> str:
        """Source of its first part."""
        return self.parts[0].source

    @property
    def target(self) -> str:
        """Destination of its first part."""
        return self.parts[0].target

    @property
    def awaits_answer(self) -> bool:
        """Whether an answer of any destination is awaited."""
        return any(part.asked for part in self.parts)

    @property
    def early(self) -> bool:
        """Whether it is a hand-off of a sequence whose context is not computed yet (chunk and layer grain)."""
        return self.purpose == "handoff" and self.sequence.phase != "decode"

    @property
    def present(self) -> int:
        """Tokens that the destinations have of the sequence already."""
        return self.there.groups * self.sequence.spec.page_tokens

    @property
    def taken_pages(self) -> Mapping[str, int]:
        """Pages that were taken for it, by destination."""
        return self.pages_on(self.groups - self.there.groups)

    @property
    def recompute(self) -> bool:
        return any(part.front.origin != "none" for part in self.parts)

    def request(self, part: MovePart) -> StartMigration:
        """Return the request to the destination of a part for the sequence's first `upto` tokens."""
        sequence, hop = self.sequence, part.hop
        return StartMigration(
            part.number,
            sequence.seq,
            sequence.epoch,
            self.chain.stage(hop.lo, hop.hi),
            hop.layers,
            sequence.spec.page_tokens,
            part.source,
            self.upto,
            sequence.first(self.upto) if part.front.origin == "tokens" else (),
            self.copy,
            sequence.device_request,
            part.front.origin == "inputs",
            as_written=self.as_written,
            shared=(self.donor, self.present) if self.donor else None,
        )

    def pages_on(self, groups: int) -> Mapping[str, int]:
        """Return the pages of so many page sets, by destination."""
        pages: Counter[str] = Counter()
        for part in self.parts:
            pages[part.target] += part.pages * groups
        return pages


@dataclass(slots=True)
class MigrationCounts:
    """Totals of migrations since the start.

    Fields:
        copied, recomputed: Tokens, in committed migrations; of each of their parts.
        nbytes: Bytes of K and V sent, in committed migrations.
        inputs: Bytes of hidden states sent, in committed migrations.
    """

    started: int = 0
    committed: int = 0
    aborted: int = 0
    copied: int = 0
    recomputed: int = 0
    nbytes: int = 0
    inputs: int = 0


class Moves:
    """Migrations under way, by the numbers of their parts."""

    def __init__(self, state: ClusterState) -> None:
        self._state = state
        self._moves: dict[int, Migration] = {}
        self._parts: dict[int, Migration] = {}
        self._number = 0
        self.counts = MigrationCounts()

    def __len__(self) -> int:
        return len(self._moves)

    def __iter__(self) -> Iterator[Migration]:
        return iter(tuple(self._moves.values()))

    def new_number(self) -> int:
        """Return the number of a new part of a migration, or of a loan."""
        self._number += 1
        return self._number

    def get(self, number: int) -> Migration | None:
        """Return the migration with a part of this number, None if it is over."""
        return self._parts.get(number)

    def get_move(self, sequence: ScheduledSequence) -> Migration | None:
        """Return the migration that a sequence is in, None if it is in none."""
        return self._moves.get(sequence.waits.move)

    def targets(self, sequence: ScheduledSequence) -> tuple[str, ...]:
        """Return the destinations of a sequence's migration; none if it is in none."""
        move = self.get_move(sequence)
        return () if move is None else tuple(part.target for part in move.parts)

    def totals(self) -> MigrationCounts:
        """Return a copy of the totals."""
        return replace(self.counts)

    def pinned(self) -> list[PageHolding]:
        """Return what other sequences have at destinations and stays there for migrations."""
        return [move.there for move in self._moves.values() if move.donor]

    def held(self) -> dict[str, int]:
        """Return the pages that are taken for migrations, by destination."""
        held: dict[str, int] = {}
        for move in self._moves.values():
            for target, pages in move.taken_pages.items():
                held[target] = held.get(target, 0) + pages
        return held

    def handed_to(self) -> Mapping[str, int]:
        """Return how many sequences hand-offs under way bring to each device."""
        coming: Counter[str] = Counter()
        for move in self._moves.values():
            if move.purpose == "handoff":
                coming.update({part.target for part in move.parts} - move.sequence.place.devices)
        return coming

    def bound_for(self, device: str, blocks: Collection[str]) -> bool:
        """Return whether a migration of any of these blocks to a device is under way."""
        there = ((move, part) for move in self._moves.values() for part in move.parts if part.target == device)
        return any(not move.chain.blocks(part.hop.lo, part.hop.hi).isdisjoint(blocks) for move, part in there)

    def begin(self, move: Migration) -> None:
        """Add a migration."""
        self._moves[move.number] = move
        self._parts.update((part.number, move) for part in move.parts)
        move.sequence.moves(move.number)
        self.counts.started += 1

    def end_move(self, move: Migration, committed: bool = False) -> None:
        """Remove a migration, and release its pages at the destinations.

        On a commit the page accounting takes them for the sequence next (`SequenceLifecycle.reseat`), and those that
        were there stay until then.
        """
        del self._moves[move.number]
        for part in move.parts:
            del self._parts[part.number]
        move.sequence.moves(0)
        for target, pages in move.taken_pages.items():
            device = self._state.devices[target]
            if device.alive:
                device.pages.used -= pages
                self._state.changed = True
        if move.donor and not committed:
            self._state.page_accounting.free(move.there)

    def cancel(self, sequence: ScheduledSequence) -> None:
        """Abort the migration of a sequence that leaves its devices."""
        move = self.get_move(sequence)
        if move is not None:
            self.end_move(move)
            self.counts.aborted += 1
            for part in move.parts:
                end = FinishMigration(part.number, sequence.seq, sequence.epoch, False)
                self._state.out.add_message(part.target, end)


def sendable(sequence: ScheduledSequence, by_layer: bool) -> int:
    """Return how many tokens of a context can be requested before it is computed.

    Those in full pages, so that no page is sent twice; all of them once its last row is under way, if `by_layer`.
    """
    if by_layer and sequence.flying and sequence.computed + sequence.issued == sequence.tokens and sequence.samples:
        return sequence.tokens
    return sequence.computed - (sequence.computed + sequence.spec.virtual_tokens) % sequence.spec.page_tokens


def part_of(chain: Chain, blocks: range, device: str) -> Hop:
    """Return these blocks of a chain on a device in the form of a hop."""
    first = sum(use.kv_layers for use in chain.uses[: blocks.start])
    last = first + sum(use.kv_layers for use in chain.uses[blocks.start : blocks.stop])
    return Hop(device, chain.uses[blocks.start].lo, chain.uses[blocks.stop - 1].hi, (first, last))


def crossings(chain: Chain, before: Path, after: Path) -> tuple[tuple[Hop, str], ...]:
    """Return what changes its device between two paths of a chain, as hops of the former, each with its new device.

    Each is as long as possible: consecutive blocks with the same two devices.
    """
    found: list[tuple[Hop, str]] = []
    old, new = devices_of(chain, before), devices_of(chain, after)
    first = 0
    for at in range(1, len(old) + 1):
        if at == len(old) or (old[at], new[at]) != (old[first], new[first]):
            if old[first] != new[first]:
                found.append((part_of(chain, range(first, at), old[first]), new[first]))
            first = at
    return tuple(found)
