"""Manage the page tables of one device while steps run.

`SequencePageTables` wraps a `PageBook` and tracks two more things: which page sets of a table the engine has received
(`told`), and which tables a running step writes, so that they cannot be freed yet.

- A key names one table and is never used again.
- `grow` takes pages from the pool; `announce_pages` returns the page sets that the engine has not received yet.
- A table released while a step writes it is freed by `settle`, after the step.
- `take_released` returns the tables that the next plan tells the engine to forget.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from runtime.kv.pages import Group, Layers, OutOfPages, PageBook, groups_for
from runtime.loans import with_change
from runtime.messages import LostLayers
from runtime.types import CameBack, ModelSpec, PlaceChange, SentAway


@dataclass(frozen=True, slots=True)
class TableSlice:
    """Layers [first, last) of a table, counted from the table's own first layer."""

    key: str
    first: int
    last: int


class SequencePageTables:
    """The page tables of one device, by key, and what the engine has received of each."""

    def __init__(self, capacity: int) -> None:
        self.book = PageBook(capacity)
        self._specs: dict[str, ModelSpec] = {}
        #: Per table that the engine has: tokens that fit into the page sets it has received.
        self.told: dict[str, int] = {}
        self._writing: set[str] = set()
        self._leaving: set[str] = set()
        self._serial = 0
        self.released: list[str] = []
        #: What the next plan tells the engine of pages that are on other devices now.
        self.place_changes: list[PlaceChange] = []
        self._away: dict[str, tuple[SentAway, ...]] = {}

    def open(self, seq: str, lo: int, spec: ModelSpec) -> str:
        """Open an empty table for a stage of a sequence and return its key. `lo`: the stage's first component."""
        self._serial += 1
        key = f"{seq}#{self._serial}@{lo}"
        self.book.open(key, spec)
        self._specs[key] = spec
        return key

    def has(self, key: str) -> bool:
        """Return whether a table exists and has not been released."""
        return key in self._specs and key not in self._leaving

    def spec(self, key: str) -> ModelSpec:
        return self._specs[key]

    def on(self, stage: str) -> bool:
        """Return whether any table belongs to this stage, given by its id."""
        return any(spec.name == stage for spec in self._specs.values())

    def share(self, key: str, other: str, tokens: int, layers: slice = slice(None)) -> bool:
        """Share the first `tokens` tokens of some layers of table `other` (`PageBook.share`).

        Returns False, and changes nothing, if that is not possible.
        """
        try:
            self.book.share(key, other, tokens, layers=layers)
        except (ValueError, KeyError):
            return False
        return True

    def share_layers(self, key: str, other: str, tokens: int, layers: int) -> bool:
        """Share the first `tokens` tokens of the first `layers` layers of table `other` (`PageBook.share_layers`).

        Returns False, and changes nothing, if that is not possible.
        """
        try:
            self.book.share_layers(key, other, tokens, layers)
        except (ValueError, KeyError, OutOfPages):
            return False
        return True

    def copy(self, key: str, tokens: int) -> bool:
        """Take pages for `tokens` tokens that the engine copies into a new table.

        Returns False, and changes nothing, if too few are free.
        """
        if not self.grow(key, tokens):
            return False
        self.book.fill(key, tokens)
        return True

    def recut(
        self, seq: str, new: Sequence[tuple[int, ModelSpec, Sequence[TableSlice]]], old: Sequence[str], tokens: int
    ) -> list[str]:
        """Turn tables of a sequence into tables of other stages (`PageBook.recut`) and return the new keys.

        Args:
            seq: The sequence.
            new: Per new table: the stage's first component, its spec, and the slices of old tables that it consists of.
            old: Keys of the tables that end here.
            tokens: Tokens written in each new table.
        """
        made: dict[str, tuple[ModelSpec, Sequence[tuple[str, int, int]]]] = {}
        for lo, spec, pieces in new:
            self._serial += 1
            made[f"{seq}#{self._serial}@{lo}"] = spec, [(piece.key, piece.first, piece.last) for piece in pieces]
        self.book.recut(made, old, tokens)
        for key in old:
            self._forget_key(key)
        self._specs.update((key, spec) for key, (spec, _) in made.items())
        return list(made)

    def grow(self, key: str, tokens: int) -> bool:
        """Take pages for `tokens` more tokens than are written.

        Returns False, and changes nothing, if too few are free.
        """
        try:
            self.book.extend(key, tokens)
        except OutOfPages:
            return False
        return True

    def reach(self, key: str, start: int, tokens: int) -> bool:
        """Take pages for `tokens` tokens from position `start` on, which may lie behind what a running step writes.

        Returns False, and changes nothing, if too few are free.
        """
        return self.grow(key, start + tokens - self.book.tokens_of(key) if key in self._writing else tokens)

    def fits(self, key: str, tokens: int) -> bool:
        """Return whether enough pages are free for `grow` to succeed."""
        spec, book = self._specs[key], self.book
        more = groups_for(spec, book.tokens_of(key) + tokens) - book.holds(key)
        return more * spec.kv_layers <= book.free

    def write(self, keys: Iterable[str]) -> None:
        """Mark tables as written by a step that is about to start."""
        self._writing.update(keys)

    def writes(self, key: str) -> bool:
        """Return whether a running step writes the table."""
        return key in self._writing

    def introduce(self, key: str) -> bool:
        """Record that the engine learns of a table with the next plan; return False if it has it already."""
        if key in self.told:
            return False
        self.told[key] = 0
        return True

    def announce_pages(self, key: str, tokens: int) -> tuple[Group, ...]:
        """Return the page sets that the first `tokens` tokens need and that the engine has not received yet.

        Never returns page sets beyond those: a migration may be writing them.
        """
        told = self.told[key]
        if tokens <= told:
            return ()
        spec = self._specs[key]
        need, width = groups_for(spec, tokens), spec.page_tokens
        self.told[key] = need * width
        return self.book.groups_of(key, told // width, need)

    def pages(self, key: str, lo: int, hi: int, layers: slice = slice(None)) -> tuple[int, ...]:
        """Return the page ids of tokens [lo, hi), in whole page sets, ordered by token and then by layer.

        `layers`: only these, counted from the table's first layer.
        """
        width = self._specs[key].page_tokens
        return tuple(page for group in self.book.groups_of(key, lo // width, -(-hi // width)) for page in group[layers])

    def fill(self, key: str, tokens: int) -> None:
        self.book.fill(key, tokens)

    def rewind(self, key: str, tokens: int) -> None:
        """Mark what lies behind the first `tokens` tokens as unwritten: it is about to be written again."""
        if self.book.tokens_of(key) > tokens:
            self.book.rewind(key, tokens)

    def send_away(self, key: str, creditor: str, loan: int, first: int, last: int, layers: Layers) -> bool:
        """Free the pages of tokens [first, last) of a table, which another device has now (`PageBook.send_away`).

        Returns False, and changes nothing, if that is not possible.
        """
        if key in self._writing:
            return False
        try:
            self.book.send_away(key, first, last, layers)
        except (ValueError, KeyError):
            return False
        self._change_place(SentAway(key, creditor, loan, first, last, layers))
        return True

    def bring_back(self, key: str, other: str, loan: int, first: int, layers: Layers) -> bool:
        """Give a table the pages of another one, which is gone, from token `first` on (`PageBook.bring_back`).

        Returns False, and changes nothing, if that is not possible.

        Args:
            loan: Of which these are page sets.
            layers: The layers of this table that the other one has.
        """
        if key in self._writing:
            return False
        last = first + self.book.tokens_of(other)
        try:
            groups = self.book.groups_of(other)
            self.book.bring_back(key, other, first, layers=layers)
        except (ValueError, KeyError):
            return False
        self._forget_key(other)
        self._change_place(CameBack(key, loan, first, last, groups, layers))
        return True

    def close_gap(self, key: str, gap: str, first: int, lost: Sequence[LostLayers]) -> bool:
        """Give a table the pages of lost layers of another one (`open_gap`), which is gone.

        Returns False, and changes nothing, if that is not possible.
        """
        if key in self._writing:
            return False
        last = self.book.tokens_of(gap)
        try:
            groups = self.book.groups_of(gap, first // self._specs[gap].page_tokens)
            self.book.bring_back(key, gap, first, first, taken=[each.layers for each in lost])
        except (ValueError, KeyError):
            return False
        self._forget_key(gap)
        for each in lost:
            here = tuple(group[each.layers[0] : each.layers[1]] for group in groups)
            self._change_place(CameBack(key, each.loan, first, last, here, each.layers))
        return True

    def open_gap(self, key: str, seq: str, lo: int, first: int) -> str | None:
        """Open a table for tokens of another table that are lost, from `first` on: it begins as that table does.

        Its rows attend to all tokens before, wherever these are, and have pages of their own in all layers. Returns its
        key; None, and changes nothing, if the other table does not begin so.
        """
        made = self.open(seq, lo, self._specs[key])
        try:
            self.book.share(made, key, first, away=True)
        except (ValueError, KeyError):
            self._free(made)
            return None
        for each in self._away.get(key, ()):
            if each.first < first:
                self._change_place(replace(each, seq=made, last=min(each.last, first)))
        return made

    def take_place_changes(self) -> tuple[PlaceChange, ...]:
        """Return what the engine has to learn of pages on other devices; each is returned once.

        Changes of a table that it has not received, as after a migration, wait until it does.
        """
        changes = tuple(each for each in self.place_changes if each.seq in self.told)
        self.place_changes = [each for each in self.place_changes if each.seq not in self.told]
        return changes

    def release(self, key: str) -> None:
        """Free a table now, or after the step that writes it."""
        if key in self._writing:
            self._leaving.add(key)
        else:
            self._free(key)

    def settle(self, keys: Iterable[str]) -> None:
        """Record that the step that wrote these tables is over, and free those released meanwhile."""
        self._writing.difference_update(keys)
        if not self._leaving:
            return
        over = sorted(self._leaving - self._writing)
        for key in over:
            self._free(key)
        self._leaving.difference_update(over)

    def queue_releases(self, keys: Sequence[str], released: Sequence[str]) -> None:
        """Release the tables of a failed step (`keys`) with the next plan, and once more those that its
        plan released.
        """
        self.released.extend((*released, *keys))
        for key in keys:
            self.told.pop(key, None)

    def take_released(self) -> tuple[str, ...]:
        """Return the tables that the engine has to forget; each is returned once."""
        gone, self.released = tuple(self.released), []
        return gone

    def check(self, held: set[str]) -> None:
        """Verify that exactly the tables `held` and those being released exist.

        Raises PageBookDamaged or RuntimeError.
        """
        self.book.check()
        if set(self._specs) != held | self._leaving:
            raise RuntimeError(f"tables of nobody: {sorted(set(self._specs) ^ (held | self._leaving))[:5]}")

    def _change_place(self, change: PlaceChange) -> None:
        self._away[change.seq] = with_change(self._away.get(change.seq, ()), change)
        self.place_changes.append(change)

    def _free(self, key: str) -> None:
        self.book.release(key)
        self._forget_key(key)

    def _forget_key(self, key: str) -> None:
        del self._specs[key]
        self._away.pop(key, None)
        if self.told.pop(key, None) is not None:
            self.released.append(key)
        elif self.place_changes:
            self.place_changes = [each for each in self.place_changes if each.seq != key]
