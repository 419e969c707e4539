"""Bookkeeping of one device's pages: which are free, whose the others are, and how full. O(1) per page.

Contract: a *page* holds K and V of one layer for `page_tokens` tokens; a *group* is one page per attention layer of a
model, so that a sequence's table is a list of groups in token order. The map is

    (sequence, token position, layer) -> table[sequence].groups[position // page_tokens][layer], slot position %
    page_tokens

A page goes free -> reserved (given to a sequence, nothing written) -> filling -> resident (full, never written
again)
-> free. Lending and moving join as further states: a row in `_NEXT` and a field in `_COUNTED_AS`.

It does not know tensors, devices, models' weights, clocks or what the pages are for; and it decides nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from runtime.types import ModelSpec, PageCounts

Group = tuple[int, ...]


class OutOfPages(Exception):
    """Fewer pages are free than an `extend` needs. Nothing was changed."""


class PageBookDamaged(Exception):
    """The book contradicts itself: a defect of the program, never of its input."""


class PageState(IntEnum):
    FREE = 0
    RESERVED = 1
    FILLING = 2
    RESIDENT = 3


_NEXT: Mapping[int, frozenset[PageState]] = {
    PageState.FREE: frozenset({PageState.RESERVED}),
    PageState.RESERVED: frozenset({PageState.FILLING, PageState.RESIDENT, PageState.FREE}),
    PageState.FILLING: frozenset({PageState.RESIDENT, PageState.RESERVED, PageState.FREE}),
    # Filling again, or as if nothing were written: the last tokens were written by a row that did not come through, and
    # are forgotten.
    PageState.RESIDENT: frozenset({PageState.FILLING, PageState.RESERVED, PageState.FREE}),
}

_COUNTED_AS: Mapping[PageState, str] = {
    PageState.FREE: "free",
    PageState.RESERVED: "reserved",
    PageState.FILLING: "local",
    PageState.RESIDENT: "local",
}


def groups_for(spec: ModelSpec, tokens: int) -> int:
    """Page groups that `tokens` tokens of one sequence take."""
    return -(-tokens // spec.page_tokens)


def pages_for(spec: ModelSpec, tokens: int) -> int:
    """Pages that `tokens` tokens of one sequence take, over all layers."""
    return groups_for(spec, tokens) * spec.kv_layers


@dataclass(slots=True)
class _Table:
    """One sequence's groups in token order. `tokens`: how many have been written."""

    spec: ModelSpec
    groups: list[Group] = field(default_factory=list)
    tokens: int = 0

    @property
    def room(self) -> int:
        return len(self.groups) * self.spec.page_tokens


class PageBook:
    """The pages of one device. Verbs: `open`, `share`, `extend`, `fill`, `rewind`, `release`; each is complete or
    changes nothing.
    """

    def __init__(self, capacity: int) -> None:
        """`capacity`: pages of the device, numbered from 0. Raises ValueError unless positive."""
        if capacity < 1:
            raise ValueError(f"a device needs at least one page, not {capacity}")
        self.capacity = capacity
        # Last in, first out: a page just given back is the likeliest to be in a cache. Page 0 goes out first.
        self._free = list(range(capacity - 1, -1, -1))
        self._state = bytearray(capacity)
        self._refs = [0] * capacity
        self._in_state = [capacity] + [0] * (len(PageState) - 1)
        self._tables: dict[str, _Table] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def holds(self, seq: str) -> int:
        """Groups in the table of `seq`; 0 if it has none."""
        table = self._tables.get(seq)
        return 0 if table is None else len(table.groups)

    def pages_of(self, seq: str) -> int:
        """Pages in the table of `seq`, over all layers; 0 if it has none."""
        table = self._tables.get(seq)
        return 0 if table is None else len(table.groups) * table.spec.kv_layers

    def groups_of(self, seq: str, lo: int = 0, hi: int | None = None) -> tuple[Group, ...]:
        """Groups number [lo, hi) of the table of `seq`. KeyError: no such table."""
        return tuple(self._tables[seq].groups[lo:hi])

    def tokens_of(self, seq: str) -> int:
        """Tokens of `seq` that have been written; 0 if it has no table."""
        table = self._tables.get(seq)
        return 0 if table is None else table.tokens

    def open(self, seq: str, spec: ModelSpec) -> None:
        """Begin an empty table. Raises ValueError if the sequence has one."""
        if seq in self._tables:
            raise ValueError(f"sequence {seq} has a table already")
        self._tables[seq] = _Table(spec)

    def share(self, seq: str, other: str, tokens: int) -> tuple[Group, ...]:
        """Begin the empty table of `seq` with the first `tokens` tokens of another's, whole groups that are full
        (BL-32). Returns them.

        Raises ValueError if these are no whole groups, if the other has not written as many, or if `seq` holds some;
        KeyError for no table.
        """
        mine, theirs = self._tables[seq], self._tables[other]
        width = theirs.spec.page_tokens
        same = (mine.spec.page_tokens, mine.spec.kv_layers) == (width, theirs.spec.kv_layers)
        if mine.groups or tokens % width or tokens > theirs.tokens or not same:
            raise ValueError(f"{seq} cannot share {tokens} tokens of {other}")
        groups = theirs.groups[: tokens // width]
        for page in (page for group in groups for page in group):
            self._refs[page] += 1
        mine.groups.extend(groups)
        mine.tokens = tokens
        return tuple(groups)

    def recut(
        self, new: Mapping[str, tuple[ModelSpec, Sequence[tuple[str, int, int]]]], old: Sequence[str], tokens: int
    ) -> None:
        """Turn tables of one sequence into others, layer by layer: no page moves.

        Args:
            new: by name the spec of each new table, and which layers [first, last) of which old ones it is made of, in
                order.
            old: tables that end here; pages of theirs that no new one takes are given back.
            tokens: that the new ones have written; an old one may have more, which are forgotten.

        Raises ValueError, and changes nothing, if a name is taken, layers do not add up, or an old table has fewer.
        KeyError: no table.
        """
        tables = {name: self._tables[name] for name in old}
        self._check_recut(new, tables, tokens)
        made: dict[str, _Table] = {}
        taken: set[tuple[str, int]] = set()
        for name, (spec, sources) in new.items():
            count = groups_for(spec, tokens)
            parts = [[group[first:last] for group in tables[source].groups[:count]] for source, first, last in sources]
            groups: list[Group] = (
                [tuple(page for part in row for page in part) for row in zip(*parts, strict=True)]
                if parts
                else [()] * count
            )
            made[name] = _Table(spec, groups, tokens)
            taken.update((source, layer) for source, first, last in sources for layer in range(first, last))
        for name, table in tables.items():
            count = groups_for(table.spec, tokens)
            for index, group in enumerate(table.groups):
                self._give_back(
                    tuple(page for layer, page in enumerate(group) if index >= count or (name, layer) not in taken)
                )
            del self._tables[name]
        self._tables.update(made)
        for table in made.values():
            for page in table.groups[-1] if tokens % table.spec.page_tokens and table.groups else ():
                self._move(
                    (page,), PageState.FILLING
                )  # one by one: of one old table more may have been written than of another

    def _check_recut(
        self,
        new: Mapping[str, tuple[ModelSpec, Sequence[tuple[str, int, int]]]],
        old: Mapping[str, _Table],
        tokens: int,
    ) -> None:
        used = [
            (source, layer)
            for _, sources in new.values()
            for source, first, last in sources
            for layer in range(first, last)
        ]
        if len(used) != len(set(used)) or any(layer >= old[source].spec.kv_layers for source, layer in used):
            raise ValueError("a layer has one table to go to, and must be there")
        for name, (spec, sources) in new.items():
            if name in self._tables or sum(last - first for _, first, last in sources) != spec.kv_layers:
                raise ValueError(f"{name} is there, or its layers do not add up")
        if any(table.tokens < tokens for table in old.values()):
            raise ValueError(f"only tables with {tokens} tokens can be made into others")

    def extend(self, seq: str, tokens: int) -> tuple[Group, ...]:
        """Make room for `tokens` more tokens than are written; returns the groups that were added, perhaps none.

        Raises OutOfPages, and changes nothing, unless every page that is needed is free. KeyError: no such table.
        """
        table = self._tables[seq]
        if table.tokens + tokens <= len(table.groups) * table.spec.page_tokens:
            return ()
        count = groups_for(table.spec, table.tokens + tokens) - len(table.groups)
        layers = table.spec.kv_layers
        if count * layers > len(self._free):
            raise OutOfPages(f"{count * layers} pages needed, {len(self._free)} free")
        added = tuple(self._allocate_group(layers) for _ in range(count))
        table.groups.extend(added)
        return added

    def fill(self, seq: str, tokens: int) -> None:
        """K and V of `tokens` more tokens have been written. Raises ValueError if there is no room for them."""
        table = self._tables[seq]
        width, after = table.spec.page_tokens, table.tokens + tokens
        within = table.tokens % width
        if within and 0 <= tokens < width - within:  # of a group that is filling, and is not full yet
            table.tokens = after
            return
        if tokens < 0 or after > table.room:
            raise ValueError(f"sequence {seq}: {after} tokens do not fit {table.room}")
        for index in range(table.tokens // width, groups_for(table.spec, after)):
            full = (index + 1) * width <= after
            self._move(table.groups[index], PageState.RESIDENT if full else PageState.FILLING)
        table.tokens = after

    def rewind(self, seq: str, tokens: int) -> None:
        """Forget what lies behind the first `tokens` tokens: it will be written again. The groups stay (UN-13's
        roll-back).

        Raises ValueError, and changes nothing, if fewer are written, or another table has pages of these, too.
        """
        table = self._tables[seq]
        width = table.spec.page_tokens
        groups = table.groups[tokens // width : groups_for(table.spec, table.tokens)]
        if not 0 <= tokens <= table.tokens or any(self._refs[page] != 1 for group in groups for page in group):
            raise ValueError(f"sequence {seq}: what lies behind {tokens} of {table.tokens} tokens cannot be forgotten")
        if tokens == table.tokens:
            return
        for at, group in enumerate(groups):
            self._move(group, PageState.RESERVED if at or not tokens % width else PageState.FILLING)
        table.tokens = tokens

    def release(self, seq: str) -> int:
        """Forget a sequence; its pages that no other table holds are free again. Returns how many that were.

        A sequence without a table is nothing to do: an abort may come in any phase.
        """
        table = self._tables.pop(seq, None)
        if table is None:
            return 0
        before = len(self._free)
        for group in reversed(table.groups):
            self._give_back(group)
        return len(self._free) - before

    def counts(self) -> PageCounts:
        """Pages by state, now."""
        fields: Counter[str] = Counter()
        for state, name in _COUNTED_AS.items():
            fields[name] += self._in_state[state]
        return PageCounts(
            capacity=self.capacity, free=fields["free"], local=fields["local"], reserved=fields["reserved"]
        )

    def check(self) -> None:
        """Verify every invariant from scratch, in O(capacity). Raises PageBookDamaged with the first that fails."""
        refs: Counter[int] = Counter()
        for seq, table in self._tables.items():
            self._check_table(seq, table)
            refs.update(page for group in table.groups for page in group)
        if [refs[page] for page in range(self.capacity)] != self._refs:
            raise PageBookDamaged("reference counts differ from the tables")
        unowned = {page for page in range(self.capacity) if not self._refs[page]}
        if len(self._free) != len(set(self._free)) or set(self._free) != unowned:
            raise PageBookDamaged("the free list is not the set of pages without references")
        if any((self._state[page] == PageState.FREE) != (page in unowned) for page in range(self.capacity)):
            raise PageBookDamaged("a page's state contradicts its references")
        seen = Counter(self._state)
        if [seen[state] for state in PageState] != self._in_state:
            raise PageBookDamaged("the counts by state differ from the pages")
        counts = self.counts()
        if counts.free + counts.local + counts.lent + counts.reserved + counts.in_flight != self.capacity:
            raise PageBookDamaged(f"pages are missing: {counts}")

    def _check_table(self, seq: str, table: _Table) -> None:
        width = table.spec.page_tokens
        if not 0 <= table.tokens <= table.room or any(len(group) != table.spec.kv_layers for group in table.groups):
            raise PageBookDamaged(f"sequence {seq}: its table has the wrong shape")
        for index, group in enumerate(table.groups):
            written = min(max(table.tokens - index * width, 0), width)
            if written == 0:
                expected = PageState.RESERVED
            else:
                expected = PageState.RESIDENT if written == width else PageState.FILLING
            if any(
                self._state[page] != expected for page in group
            ):  # a shared group is full in every table that has it
                raise PageBookDamaged(f"sequence {seq}: group {index} should be {expected.name.lower()}")

    def _allocate_group(self, layers: int) -> Group:
        group = tuple(self._free.pop() for _ in range(layers))
        for page in group:
            self._refs[page] = 1
        self._move(group, PageState.RESERVED)
        return group

    def _give_back(self, group: Group) -> None:
        for page in reversed(group):
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._move((page,), PageState.FREE)
                self._free.append(page)

    def _move(self, group: Group, to: PageState) -> None:
        """Change the state of pages that have one state in common, if it is another.

        Raises PageBookDamaged for a change that the life of a page does not have.
        """
        if not group:  # of a part of a chain that does not attend
            return
        now = self._state[group[0]]
        if now == to:
            return
        if to not in _NEXT[now]:
            raise PageBookDamaged(f"page {group[0]} cannot go from {PageState(now).name.lower()} to {to.name.lower()}")
        self._in_state[now] -= len(group)
        self._in_state[to] += len(group)
        for page in group:
            self._state[page] = to
