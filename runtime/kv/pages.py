"""Track one device's pages: which are free, which sequence has the rest, and how full they are. O(1) per page.

A *page* holds K and V of one layer for `page_tokens` tokens. A page set (`Group`) is one page per attention layer of a
model. A sequence's table is a list of page sets in token order:

    (sequence, position, layer)  ->  page table[sequence].groups[position // page_tokens][layer],
                                     slot position % page_tokens

A page goes free -> reserved (allocated, nothing written) -> filling -> resident (full, not written again) -> free.
A page that is held for another device goes free -> reserved -> lent -> free. Pages of full page sets may be away, on
another device: then the table has `AWAY` in their places.
`NEXT` holds the allowed transitions, `COUNTED_AS` the field of `PageCounts` that counts each state.

Where weights and pages share one budget (`runtime.scheduler.devices`), `limit` is how many of the pages may be in use
now. A page is *touched* from when it is taken until it is given back to the system; touched pages are never more than
the limit, so neither is the memory behind them.

Pure bookkeeping: no tensors, devices, clocks or decisions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from runtime.kv.page_table import ALL, COUNTED_AS, NEXT, PageState, PageTable, check_free, check_table
from runtime.kv.page_table import Group as Group
from runtime.kv.page_table import Layers as Layers
from runtime.kv.page_table import PageBookDamaged as PageBookDamaged
from runtime.types import AWAY, ModelSpec, PageCounts


class OutOfPages(Exception):
    """Raised when fewer pages are free than an `extend` needs. Nothing was changed."""


def groups_for(spec: ModelSpec, tokens: int) -> int:
    """Return the number of page sets that `tokens` tokens of one sequence take."""
    return -(-tokens // spec.page_tokens)


def pages_for(spec: ModelSpec, tokens: int) -> int:
    """Return the number of pages that `tokens` tokens of one sequence take, over all layers."""
    return groups_for(spec, tokens) * spec.kv_layers


class PageBook:
    """Allocate, share and free the pages of one device. Each operation is complete or changes nothing.

    Operations: `open`, `share`, `share_layers`, `recut`, `extend`, `fill`, `rewind`, `send_away`, `bring_back`, `lend`,
    `cut_lent`, `release`;    `set_limit`.
    """

    def __init__(self, capacity: int) -> None:
        """Create a book of `capacity` pages, numbered from 0. Raises ValueError unless positive."""
        if capacity < 1:
            raise ValueError(f"a device needs at least one page, not {capacity}")
        self.capacity = self.limit = capacity
        # Last in, first out: a page just freed is the most likely to be in a CPU cache. Then those that were given back
        # to the system, then those that were never used, from page 0 on.
        self._free: list[int] = []
        self._returned: list[int] = []
        self._fresh = 0
        self._state = bytearray(capacity)
        self._refs = [0] * capacity
        self._in_state = [capacity] + [0] * (len(PageState) - 1)
        self._tables: dict[str, PageTable] = {}

    @property
    def used(self) -> int:
        """Pages that tables hold."""
        return self._fresh - len(self._free) - len(self._returned)

    @property
    def free(self) -> int:
        """Pages that can be taken now."""
        return self.limit - self.used

    def set_limit(self, limit: int) -> list[int] | None:
        """Let at most `limit` pages be in use; return the free pages to give back to the system, possibly none.

        Returns None, and changes nothing, if more pages than that are in use. Raises ValueError beyond the capacity.
        """
        if not 0 <= limit <= self.capacity:
            raise ValueError(f"a device with {self.capacity} pages cannot use {limit}")
        if self.used > limit:
            return None
        self.limit = limit
        excess = max(self.used + len(self._free) - limit, 0)
        gone, self._free = self._free[:excess], self._free[excess:]
        self._returned += gone
        return gone

    def holds(self, seq: str) -> int:
        """Return the number of page sets in the table of `seq`; 0 without a table."""
        table = self._tables.get(seq)
        return 0 if table is None else len(table.groups)

    def pages_of(self, seq: str) -> int:
        """Return the number of pages in the table of `seq`, over all layers; 0 without a table."""
        table = self._tables.get(seq)
        return 0 if table is None else len(table.groups) * table.spec.kv_layers - sum(table.away.values())

    def groups_of(self, seq: str, lo: int = 0, hi: int | None = None) -> tuple[Group, ...]:
        """Return page sets [lo, hi) of the table of `seq`. Raises KeyError without a table."""
        return tuple(self._tables[seq].groups[lo:hi])

    def tokens_of(self, seq: str) -> int:
        """Return the number of tokens written for `seq`; 0 without a table."""
        table = self._tables.get(seq)
        return 0 if table is None else table.tokens

    def open(self, seq: str, spec: ModelSpec) -> None:
        """Create an empty table. Raises ValueError if the sequence has one."""
        if seq in self._tables:
            raise ValueError(f"sequence {seq} has a table already")
        self._tables[seq] = PageTable(spec)

    def share(self, seq: str, other: str, tokens: int, *, away: bool = False, layers: slice = ALL) -> tuple[Group, ...]:
        """Start the empty table of `seq` with the page sets of the first tokens of `other`, and return them (BL-32).

        `layers`: those of `other` that are all of the layers of `seq`. Raises ValueError if `tokens` are not whole page
        sets, if `other` has not written that many, if some of its page sets are away and `away` does not allow it, or
        if `seq` already has page sets or another number of layers; KeyError without a table.
        """
        mine, theirs = self._tables[seq], self._tables[other]
        width = theirs.spec.page_tokens
        same = (mine.spec.page_tokens, mine.spec.kv_layers) == (width, len(range(theirs.spec.kv_layers)[layers]))
        bad = theirs.lent or (theirs.away and not away) or not same
        if mine.groups or tokens % width or tokens > theirs.tokens or bad:
            raise ValueError(f"{seq} cannot share {tokens} tokens of {other}")
        groups = [group[layers] for group in theirs.groups[: tokens // width]]
        for page in (page for group in groups for page in group if page != AWAY):
            self._refs[page] += 1
        mine.groups, mine.tokens = [*groups], tokens
        mine.away = {at: gone for at, gone in theirs.away.items() if at < len(groups)}
        return tuple(groups)

    def share_layers(self, seq: str, other: str, tokens: int, layers: int) -> None:
        """Start the empty table of `seq` with the pages that `other` has of these first tokens and layers (UN-15).

        The other layers get pages of their own. They count as written only with `fill`, the shared ones at once.

        Raises ValueError, and changes nothing, if `tokens` are not whole page sets, if `other` has not written that
        many, if `seq` already has page sets or has no further layers; OutOfPages; KeyError without a table.
        """
        mine, theirs = self._tables[seq], self._tables[other]
        width, own = theirs.spec.page_tokens, mine.spec.kv_layers - layers
        bad = theirs.away or theirs.lent or mine.spec.page_tokens != width
        if mine.groups or tokens % width or tokens > theirs.tokens or bad:
            raise ValueError(f"{seq} cannot share {tokens} tokens of {other}")
        if not 0 < layers <= theirs.spec.kv_layers or own < 1:
            raise ValueError(f"{seq} cannot share {layers} layers of {other}")
        groups = theirs.groups[: tokens // width]
        if len(groups) * own > self.free:
            raise OutOfPages(f"{len(groups) * own} pages needed, {self.free} free")
        for group in groups:
            shared = group[:layers]
            for page in shared:
                self._refs[page] += 1
            mine.groups.append((*shared, *self._allocate_group(own)))
        mine.full = len(groups), layers

    def recut(
        self, new: Mapping[str, tuple[ModelSpec, Sequence[tuple[str, int, int]]]], old: Sequence[str], tokens: int
    ) -> None:
        """Replace tables of one sequence by tables with the layers regrouped. No page moves.

        Args:
            new: For each new table its spec, and the (old table, first, last) layer ranges that it consists of, in
                order.
            old: Tables that are removed; their pages that no new table takes are freed.
            tokens: Tokens written in the new tables; further tokens of an old table are forgotten.

        Raises ValueError, and changes nothing, if a name is taken, the layers do not add up, or an old table has fewer
        tokens; KeyError without a table.
        """
        tables = {name: self._tables[name] for name in old}
        self._check_recut(new, tables, tokens)
        made: dict[str, PageTable] = {}
        taken: set[tuple[str, int]] = set()
        for name, (spec, sources) in new.items():
            count = groups_for(spec, tokens)
            parts = [[group[first:last] for group in tables[source].groups[:count]] for source, first, last in sources]
            groups: list[Group] = (
                [tuple(page for part in row for page in part) for row in zip(*parts, strict=True)]
                if parts
                else [()] * count
            )
            made[name] = PageTable(spec, groups, tokens)
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
                )  # one by one: the old tables may have different numbers of tokens written

    def _check_recut(
        self,
        new: Mapping[str, tuple[ModelSpec, Sequence[tuple[str, int, int]]]],
        old: Mapping[str, PageTable],
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
        if any(
            table.tokens < max(tokens, table.full[0] * table.spec.page_tokens) or table.away or table.lent
            for table in old.values()
        ):
            raise ValueError(f"only tables with {tokens} tokens can be made into others")

    def extend(self, seq: str, tokens: int) -> tuple[Group, ...]:
        """Allocate page sets for `tokens` more tokens than are written, and return those added, possibly none.

        Raises OutOfPages, and changes nothing, unless enough pages are free; KeyError without a table.
        """
        table = self._tables[seq]
        if table.tokens + tokens <= len(table.groups) * table.spec.page_tokens:
            return ()
        count = groups_for(table.spec, table.tokens + tokens) - len(table.groups)
        layers = table.spec.kv_layers
        if count * layers > self.free:
            raise OutOfPages(f"{count * layers} pages needed, {self.free} free")
        added = tuple(self._allocate_group(layers) for _ in range(count))
        table.groups.extend(added)
        return added

    def fill(self, seq: str, tokens: int) -> None:
        """Record that K and V of `tokens` more tokens are written. Raises ValueError if there is no room for them."""
        table = self._tables[seq]
        width, after = table.spec.page_tokens, table.tokens + tokens
        within = table.tokens % width
        if within and 0 <= tokens < width - within:  # within a page set that stays in state filling
            table.tokens = after
            return
        if tokens < 0 or after > table.room:
            raise ValueError(f"sequence {seq}: {after} tokens do not fit {table.room}")
        for index in range(table.tokens // width, groups_for(table.spec, after)):
            full = (index + 1) * width <= after
            self._move(table.unwritten(index), PageState.RESIDENT if full else PageState.FILLING)
        table.tokens = after

    def rewind(self, seq: str, tokens: int) -> None:
        """Forget all tokens after the first `tokens`; they will be written again.

        The page sets stay (roll-back of UN-13).

        Raises ValueError, and changes nothing, if fewer tokens are written, or if another table shares the affected
        pages.
        """
        table = self._tables[seq]
        width = table.spec.page_tokens
        groups = table.groups[tokens // width : groups_for(table.spec, table.tokens)]
        shared = table.full[0] * width
        if (
            table.lent
            or tokens < (max(table.away, default=-1) + 1) * width
            or not min(shared, table.tokens) <= tokens <= table.tokens
            or any(self._refs[page] != 1 for group in groups for page in group)
        ):
            raise ValueError(f"sequence {seq}: what lies behind {tokens} of {table.tokens} tokens cannot be forgotten")
        if tokens == table.tokens:
            return
        for at, group in enumerate(groups):
            self._move(group, PageState.RESERVED if at or not tokens % width else PageState.FILLING)
        table.tokens = tokens

    def send_away(self, seq: str, lo: int, hi: int, layers: Layers | None = None) -> int:
        """Free the pages of tokens [lo, hi) of a table, which another device has now; return their number.

        `layers`: those of these layers [first, last) only, counted from the table's first one.

        Raises ValueError, and changes nothing, unless they are whole page sets here, all written, followed by a further
        one, and no other table has them; KeyError without a table.
        """
        table = self._tables[seq]
        span, (first, last) = table.span(lo, hi), table.layers(layers)
        gone = [group[first:last] for group in table.groups[span.start : span.stop]]
        bad = any(page == AWAY or self._refs[page] != 1 for pages in gone for page in pages)
        if span.stop >= len(table.groups) or bad or table.lent:
            raise ValueError(f"sequence {seq}: tokens {lo} to {hi} of {table.tokens} cannot be sent away")
        before, nowhere = self.used, (AWAY,) * (last - first)
        for at, pages in zip(span, gone, strict=True):
            self._give_back(pages)
            table.put(at, first, nowhere)
        return before - self.used

    def bring_back(
        self, seq: str, other: str, lo: int, skipped: int = 0, layers: Layers | None = None,
        taken: Sequence[Layers] | None = None,
    ) -> None:  # fmt: skip
        """Give a table pages of another one in place of those that are away, from token `lo` on.

        The other table, of which all tokens are written, is gone. Its first `skipped` tokens, of whole page sets, are
        those that it shares (`share`). Raises ValueError, and changes nothing, unless they are whole page sets,
        and those are away; KeyError without a table.

        Args:
            layers: The layers [first, last) of the table that the other one has; None: all.
            taken: Those of them that the table gets, in order; the other pages are freed. None: all.
        """
        table, theirs = self._tables[seq], self._tables[other]
        span, skip = table.span(lo, lo + theirs.tokens - skipped), skipped // table.spec.page_tokens
        first, last = table.layers(layers)
        runs = [(first, last)] if taken is None else [table.layers(each) for each in taken]
        bad = theirs.tokens != theirs.room or max(theirs.away, default=-1) >= skip or theirs.lent
        got = {layer for run in runs for layer in range(*run)}
        once = len(got) == sum(len(range(*run)) for run in runs) and got <= set(range(first, last))
        here = any(table.groups[at][layer] != AWAY for at in span for layer in got)
        if bad or here or not once or theirs.spec.kv_layers != last - first:
            raise ValueError(f"sequence {seq}: {theirs.tokens - skipped} tokens from {lo} on cannot come back")
        for group in theirs.groups[:skip]:
            self._give_back(group)
        for at, pages in zip(span, theirs.groups[skip:], strict=True):
            for begin, end in runs:
                table.put(at, begin, pages[begin - first : end - first])
            self._give_back(tuple(page for layer, page in enumerate(pages, first) if layer not in got))
        del self._tables[other]

    def cut_lent(self, seq: str, tokens: int) -> int:
        """Free the pages of a table that are held for another device behind its first `tokens`; return their number.

        Raises ValueError, and changes nothing, unless they are whole page sets, and not all; KeyError without a table.
        """
        table, width = self._tables[seq], self._tables[seq].spec.page_tokens
        if not table.lent or tokens % width or not 0 < tokens < table.tokens:
            raise ValueError(f"sequence {seq}: {tokens} of {table.tokens} tokens cannot be what is lent of it")
        before = self.used
        for group in table.groups[tokens // width :]:
            self._give_back(group)
        del table.groups[tokens // width :]
        table.tokens = tokens
        return before - self.used

    def lend(self, seq: str) -> None:
        """Record that all pages of a table are written, and held for another device.

        Raises ValueError, and changes nothing, if a token is written already or its last page set would not be full;
        KeyError without a table.
        """
        table = self._tables[seq]
        if table.tokens or table.lent:
            raise ValueError(f"sequence {seq}: its pages are not those of a loan")
        for group in table.groups:
            self._move(group, PageState.LENT)
        table.tokens, table.lent = table.room, True

    def release(self, seq: str) -> int:
        """Remove a sequence's table, free the pages that no other table holds, and return their number.

        Does nothing without a table: an abort may come at any time.
        """
        table = self._tables.pop(seq, None)
        if table is None:
            return 0
        before = self.used
        for group in reversed(table.groups):
            self._give_back(group)
        return before - self.used

    def counts(self) -> PageCounts:
        """Return the number of pages in each state."""
        fields: Counter[str] = Counter()
        for state, name in COUNTED_AS.items():
            fields[name] += self._in_state[state]
        beyond = self.capacity - self.limit
        return PageCounts(self.limit, fields["free"] - beyond, fields["local"], fields["lent"], fields["reserved"])

    def check(self) -> None:
        """Verify every invariant from scratch, in O(capacity). Raises PageBookDamaged for the first one violated."""
        refs, states = [0] * self.capacity, self._state
        for seq, table in self._tables.items():
            check_table(seq, table, states)
            for page in chain.from_iterable(table.groups):
                if page != AWAY:
                    refs[page] += 1
        if refs != self._refs:
            raise PageBookDamaged("reference counts differ from the tables")
        check_free(refs, states, [*self._free, *self._returned], self._fresh)
        if self.used + len(self._free) > self.limit:
            raise PageBookDamaged(f"{self.used} pages are in use, {len(self._free)} touched, of {self.limit}")
        if [states.count(state) for state in PageState] != self._in_state:
            raise PageBookDamaged("the counts by state differ from the pages")
        counts = self.counts()
        if counts.free + counts.local + counts.lent + counts.reserved + counts.in_flight != counts.capacity:
            raise PageBookDamaged(f"pages are missing: {counts}")

    def _allocate_group(self, layers: int) -> Group:
        group = tuple(self._next_page() for _ in range(layers))
        for page in group:
            self._refs[page] = 1
        self._move(group, PageState.RESERVED)
        return group

    def _next_page(self) -> int:
        for pages in (self._free, self._returned):
            if pages:
                return pages.pop()
        self._fresh += 1
        return self._fresh - 1

    def _give_back(self, group: Group) -> None:
        for page in reversed(group):
            if page == AWAY:
                continue
            self._refs[page] -= 1
            if self._refs[page] == 0:
                self._move((page,), PageState.FREE)
                self._free.append(page)

    def _move(self, group: Group, to: PageState) -> None:
        """Change the state of pages that all have the same state.

        Raises PageBookDamaged for a transition that `NEXT` does not allow.
        """
        if not group:  # a stage without attention layers
            return
        now = self._state[group[0]]
        if now == to:
            return
        if to not in NEXT[now]:
            raise PageBookDamaged(f"page {group[0]} cannot go from {PageState(now).name.lower()} to {to.name.lower()}")
        self._in_state[now] -= len(group)
        self._in_state[to] += len(group)
        for page in group:
            self._state[page] = to
