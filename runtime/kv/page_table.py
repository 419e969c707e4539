"""One sequence's page table, the states of pages, and what must hold between them (`kv.pages`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from runtime.types import AWAY, ModelSpec

Group = tuple[int, ...]
#: Layers [first, last) of a table, counted from its first one.
Layers = tuple[int, int]
#: All layers of a table.
ALL = slice(None)


class PageBookDamaged(Exception):
    """Raised when the book contradicts itself: a defect of the program, never of its input."""


class PageState(IntEnum):
    FREE = 0
    RESERVED = 1
    FILLING = 2
    RESIDENT = 3
    LENT = 4


#: The states that each one may change to.
NEXT: Mapping[int, frozenset[PageState]] = {
    PageState.FREE: frozenset({PageState.RESERVED}),
    PageState.RESERVED: frozenset({PageState.FILLING, PageState.RESIDENT, PageState.LENT, PageState.FREE}),
    PageState.FILLING: frozenset({PageState.RESIDENT, PageState.RESERVED, PageState.FREE}),
    # Back to filling or reserved: the last tokens were written by a row that failed, and are forgotten.
    PageState.RESIDENT: frozenset({PageState.FILLING, PageState.RESERVED, PageState.FREE}),
    PageState.LENT: frozenset({PageState.FREE}),
}

#: The field of `PageCounts` that counts each state.
COUNTED_AS: Mapping[PageState, str] = {
    PageState.FREE: "free",
    PageState.RESERVED: "reserved",
    PageState.FILLING: "local",
    PageState.RESIDENT: "local",
    PageState.LENT: "lent",
}


@dataclass(slots=True)
class PageTable:
    """Hold one sequence's page sets in token order.

    Fields:
        tokens: Tokens written.
        full: (page sets, layers): in the first page sets, the pages of the first layers are another table's, and full
            before this table's other layers are written (`PageBook.share_layers`).
        away: By number of the page set, how many of its layers' pages lie on other devices (`AWAY`).
        lent: Whether the pages are held for another device.
    """

    spec: ModelSpec
    groups: list[Group] = field(default_factory=list)
    tokens: int = 0
    full: tuple[int, int] = (0, 0)
    away: dict[int, int] = field(default_factory=dict)
    lent: bool = False

    def unwritten(self, index: int) -> Group:
        """Return the pages of a page set that are written with this table's tokens."""
        return self.groups[index][self.full[1] :] if index < self.full[0] else self.groups[index]

    def span(self, lo: int, hi: int) -> range:
        """Return the numbers of the page sets of tokens [lo, hi). Raises ValueError unless they are full."""
        width = self.spec.page_tokens
        if lo % width or hi % width or not 0 <= lo < hi <= self.tokens:
            raise ValueError(f"tokens {lo} to {hi} of {self.tokens} are not whole page sets")
        return range(lo // width, hi // width)

    def layers(self, some: Layers | None) -> Layers:
        """Return these layers of it, all if there are none given. Raises ValueError unless it has them."""
        first, last = some or (0, self.spec.kv_layers)
        if not 0 <= first < last <= self.spec.kv_layers:
            raise ValueError(f"it has no layers {first} to {last}")
        return first, last

    def put(self, index: int, first: int, pages: Group) -> None:
        """Replace the pages of a page set from layer `first` on."""
        group = self.groups[index]
        self.groups[index] = whole = (*group[:first], *pages, *group[first + len(pages) :])
        self.away.pop(index, None)
        if gone := whole.count(AWAY):
            self.away[index] = gone

    @property
    def room(self) -> int:
        return len(self.groups) * self.spec.page_tokens


def check_table(seq: str, table: PageTable, states: Sequence[int]) -> None:
    """Raise PageBookDamaged unless the states of a table's pages are those that its tokens require."""
    width = table.spec.page_tokens
    gone = {at: group.count(AWAY) for at, group in enumerate(table.groups) if AWAY in group}
    if gone != table.away or any((at + 1) * width > table.tokens for at in gone):
        raise PageBookDamaged(f"sequence {seq}: pages that are away are here, or were never written")
    if not 0 <= table.tokens <= table.room or any(len(group) != table.spec.kv_layers for group in table.groups):
        raise PageBookDamaged(f"sequence {seq}: its table has the wrong shape")
    for index, group in enumerate(table.groups):
        written = min(max(table.tokens - index * width, 0), width)
        if written == 0:
            expected = PageState.RESERVED
        else:
            expected = PageState.RESIDENT if written == width else PageState.FILLING
        if table.lent:
            expected = PageState.LENT
        pages = table.unwritten(index) if written < width else [page for page in group if page != AWAY]
        # A shared page set is full in every table that has it.
        shared = group[: len(group) - len(pages)] if written < width else ()
        if any(states[page] != expected for page in pages) or any(
            states[page] != PageState.RESIDENT for page in shared
        ):
            raise PageBookDamaged(f"sequence {seq}: group {index} should be {expected.name.lower()}")


def check_free(refs: list[int], states: bytearray, touched: Sequence[int], fresh: int) -> None:
    """Raise PageBookDamaged unless the pages without references are exactly the free ones, and have that state.

    Tests check after each event, so what concerns all pages is a single call of a list's method.

    Args:
        refs: References, by page.
        states: States, by page.
        touched: Free pages that were in use before.
        fresh: The first page that never was in use; all behind it are free, too.
    """
    unused, free = len(refs) - fresh, len(refs) - fresh + len(touched)
    if (
        len(set(touched)) != len(touched)
        or any(refs[page] or page >= fresh for page in touched)
        or refs.count(0) != free
        or refs[fresh:].count(0) != unused
    ):
        raise PageBookDamaged("the free pages are not those without references")
    if states.count(PageState.FREE) != free:  # that no page in use is in this state is checked with its table
        raise PageBookDamaged("a page's state contradicts its references")
