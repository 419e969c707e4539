"""Page tables of a device whose sequences come and go while steps run: what the engine knows of them, and what may not
be freed yet.

Contract: a key names one table, once. `grow` takes pages; `tell` says which groups the engine has not heard of yet; a
table that is released while a step writes it is freed by `settle`. The next plan tells the engine what has gone
(`take_released`). Decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from runtime.kv.pages import Group, OutOfPages, PageBook, groups_for
from runtime.types import ModelSpec


@dataclass(frozen=True, slots=True)
class TableSlice:
    """Layers [first, last) of a table, counted from its own first one."""

    key: str
    first: int
    last: int


class SequencePageTables:
    def __init__(self, capacity: int) -> None:
        self.book = PageBook(capacity)
        self._specs: dict[str, ModelSpec] = {}
        #: Of those that the engine knows: the tokens that the groups it has heard of can hold.
        self.told: dict[str, int] = {}
        self._writing: set[str] = set()
        self._leaving: set[str] = set()
        self._serial = 0
        self.released: list[str] = []

    def open(self, seq: str, lo: int, spec: ModelSpec) -> str:
        """A new, empty table for a stage of a sequence; its key."""
        self._serial += 1
        key = f"{seq}#{self._serial}@{lo}"
        self.book.open(key, spec)
        self._specs[key] = spec
        return key

    def has(self, key: str) -> bool:
        """Whether a table is there and not about to go."""
        return key in self._specs and key not in self._leaving

    def spec(self, key: str) -> ModelSpec:
        return self._specs[key]

    def on(self, stage: str) -> bool:
        """Whether any table is on a stage, by its id."""
        return any(spec.name == stage for spec in self._specs.values())

    def share(self, key: str, other: str, tokens: int) -> bool:
        """As PageBook.share; false, and nothing has changed, where that cannot be."""
        try:
            self.book.share(key, other, tokens)
        except (ValueError, KeyError):
            return False
        return True

    def copy(self, key: str, tokens: int) -> bool:
        """Pages for so many tokens that are copied into a new table; false, and nothing has changed, where pages
        are short.
        """
        if not self.grow(key, tokens):
            return False
        self.book.fill(key, tokens)
        return True

    def recut(
        self, seq: str, new: Sequence[tuple[int, ModelSpec, Sequence[TableSlice]]], old: Sequence[str], tokens: int
    ) -> list[str]:
        """Turn tables into others (PageBook.recut): for each new one the first component, the spec, and what it is made
        of; their keys.
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
        """Make room for `tokens` more tokens than are written; false, and nothing has changed, where pages are
        short.
        """
        try:
            self.book.extend(key, tokens)
        except OutOfPages:
            return False
        return True

    def reach(self, key: str, start: int, tokens: int) -> bool:
        """As `grow`, for tokens from `start` on, which may lie behind what a step under way writes."""
        return self.grow(key, start + tokens - self.book.tokens_of(key) if key in self._writing else tokens)

    def fits(self, key: str, tokens: int) -> bool:
        """Whether `grow` would find its pages."""
        spec, book = self._specs[key], self.book
        more = groups_for(spec, book.tokens_of(key) + tokens) - book.holds(key)
        return more * spec.kv_layers <= book.free

    def write(self, keys: Iterable[str]) -> None:
        """A step is about to write them."""
        self._writing.update(keys)

    def writes(self, key: str) -> bool:
        """Whether a step that is under way writes it."""
        return key in self._writing

    def introduce(self, key: str) -> bool:
        """Whether the engine is to hear of it now, for the first time."""
        if key in self.told:
            return False
        self.told[key] = 0
        return True

    def announce_pages(self, key: str, tokens: int) -> tuple[Group, ...]:
        """Groups that `tokens` tokens need and the engine has not heard of. Never more: what lies beyond may be on its
        way here.
        """
        told = self.told[key]
        if tokens <= told:
            return ()
        spec = self._specs[key]
        need, width = groups_for(spec, tokens), spec.page_tokens
        self.told[key] = need * width
        return self.book.groups_of(key, told // width, need)

    def pages(self, key: str, lo: int, hi: int, layers: slice = slice(None)) -> tuple[int, ...]:
        """Pages of tokens [lo, hi), whole groups, in the order of tokens and then layers; of some of its layers."""
        width = self._specs[key].page_tokens
        return tuple(page for group in self.book.groups_of(key, lo // width, -(-hi // width)) for page in group[layers])

    def fill(self, key: str, tokens: int) -> None:
        self.book.fill(key, tokens)

    def rewind(self, key: str, tokens: int) -> None:
        """What lies behind so many tokens is about to be written again."""
        if self.book.tokens_of(key) > tokens:
            self.book.rewind(key, tokens)

    def release(self, key: str) -> None:
        """Forget a table: now, or when the step that writes it is over."""
        if key in self._writing:
            self._leaving.add(key)
        else:
            self._free(key)

    def settle(self, keys: Iterable[str]) -> None:
        """The step that wrote these is over."""
        self._writing.difference_update(keys)
        if not self._leaving:
            return
        over = sorted(self._leaving - self._writing)
        for key in over:
            self._free(key)
        self._leaving.difference_update(over)

    def queue_releases(self, keys: Sequence[str], released: Sequence[str]) -> None:
        """After a failed step: the engine is to forget these, and once more what it had been told to forget."""
        self.released.extend((*released, *keys))
        for key in keys:
            self.told.pop(key, None)

    def take_released(self) -> tuple[str, ...]:
        """What the engine is to forget; each is told once."""
        gone, self.released = tuple(self.released), []
        return gone

    def check(self, held: set[str]) -> None:
        """Verify that exactly these tables and those that are leaving exist. Raises PageBookDamaged or RuntimeError."""
        self.book.check()
        if set(self._specs) != held | self._leaving:
            raise RuntimeError(f"tables of nobody: {sorted(set(self._specs) ^ (held | self._leaving))[:5]}")

    def _free(self, key: str) -> None:
        self.book.release(key)
        self._forget_key(key)

    def _forget_key(self, key: str) -> None:
        del self._specs[key]
        if self.told.pop(key, None) is not None:
            self.released.append(key)
