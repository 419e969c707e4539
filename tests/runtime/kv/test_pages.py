"""`PageBook`: pages are conserved under all operations on sequences."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from runtime.kv.pages import OutOfPages, PageBook, PageBookDamaged, groups_for, pages_for
from runtime.types import ModelSpec
from tests.runtime.virtual import spec

NARROW = spec("narrow", kv_layers=1, page_tokens=8)
WIDE = spec("wide", kv_layers=3, page_tokens=2)


def test_arithmetic_of_groups_and_pages() -> None:
    assert [groups_for(NARROW, tokens) for tokens in (0, 1, 8, 9)] == [0, 1, 1, 2]
    assert [pages_for(WIDE, tokens) for tokens in (0, 1, 2, 3)] == [0, 3, 3, 6]


def test_extend_gives_whole_groups_and_only_when_needed() -> None:
    book = PageBook(10)
    book.open("a", WIDE)
    assert book.extend("a", 3) == ((0, 1, 2), (3, 4, 5))
    book.fill("a", 3)
    assert book.extend("a", 1) == ()
    book.fill("a", 1)
    assert book.extend("a", 1) == ((6, 7, 8),)
    assert book.holds("a") == 3
    assert book.pages_of("a") == 9
    book.check()


@pytest.mark.parametrize("tokens", range(8))
def test_what_was_tentative_is_forgotten_and_written_again(tokens: int) -> None:
    book = PageBook(30)
    book.open("a", WIDE)
    groups = book.extend("a", 7)
    book.fill("a", 7)
    book.rewind("a", tokens)
    book.check()
    assert book.tokens_of("a") == tokens and book.groups_of("a") == groups
    assert book.extend("a", 7 - tokens) == ()
    book.fill("a", 7 - tokens)
    book.check()


def test_tables_of_which_one_has_more_become_one() -> None:
    """One table has a token more than the other: after `recut` the last group is as full as the shorter one's.

    A row has run on one hop and not on the next one.
    """
    book, narrow = PageBook(30), spec("part", kv_layers=1, page_tokens=4)
    for name, tokens in (("a", 9), ("b", 12)):
        book.open(name, narrow)
        book.extend(name, 12)
        book.fill(name, tokens)
    book.recut({"ab": (spec("both", kv_layers=2, page_tokens=4), [("a", 0, 1), ("b", 0, 1)])}, ["a", "b"], 9)
    book.check()


def test_what_others_hold_too_is_never_written_again() -> None:
    book = PageBook(30)
    for name in ("a", "b"):
        book.open(name, WIDE)
    book.extend("a", 6)
    book.fill("a", 6)
    book.share("b", "a", 4)
    with pytest.raises(ValueError, match="cannot be forgotten"):
        book.rewind("a", 3)
    book.rewind("a", 4)
    book.check()
    with pytest.raises(ValueError, match="cannot be forgotten"):
        book.rewind("a", 5)


def test_layers_are_shared_by_tables_of_several_models() -> None:
    """The shared pages are full at once; the others are written with the second table's tokens, and its own to free."""
    deep = spec("deep", kv_layers=4, page_tokens=2)
    book = PageBook(30)
    book.open("a", WIDE)
    book.extend("a", 5)
    book.fill("a", 5)
    book.open("b", deep)
    book.share_layers("b", "a", 4, 2)
    assert [group[:2] for group in book.groups_of("b")] == [group[:2] for group in book.groups_of("a", 0, 2)]
    assert (book.free, book.tokens_of("b")) == (30 - 9 - 4, 0)
    book.check()
    book.release("a")
    assert book.free == 30 - 4 - 4, "the shared pages stay"
    with pytest.raises(ValueError, match="made into others"):
        book.recut({"c": (deep, [("b", 0, 4)])}, ["b"], 0)
    for written in (1, 3, 1):
        book.extend("b", written)
        book.fill("b", written)
        book.check()
    book.rewind("b", 4)
    with pytest.raises(ValueError, match="cannot be forgotten"):
        book.rewind("b", 3)
    book.check()
    assert book.release("b") == 12
    book.check()


@pytest.mark.parametrize("tokens, layers", [(3, 2), (6, 2), (4, 0), (4, 3), (4, 4)])
def test_only_whole_written_page_sets_and_some_layers_are_shared(tokens: int, layers: int) -> None:
    book = PageBook(30)
    for name in "ab":
        book.open(name, WIDE)
    book.extend("a", 5)
    book.fill("a", 5)
    with pytest.raises(ValueError, match="cannot share"):
        book.share_layers("b", "a", tokens, layers)
    assert book.free == 21 and not book.holds("b")
    with pytest.raises(OutOfPages):
        book.extend("a", 14)  # leaves no pages for the other layers
        book.share_layers("b", "a", 4, 2)
    book.check()


def test_states_follow_what_is_written() -> None:
    book = PageBook(10)
    book.open("a", WIDE)
    book.extend("a", 3)
    assert (book.counts().free, book.counts().reserved, book.counts().local) == (4, 6, 0)
    book.fill("a", 1)
    assert (book.counts().reserved, book.counts().local) == (3, 3)
    book.fill("a", 2)
    assert (book.counts().reserved, book.counts().local) == (0, 6)
    book.check()


def test_extend_is_all_or_nothing() -> None:
    book = PageBook(5)
    book.open("a", WIDE)
    with pytest.raises(OutOfPages):
        book.extend("a", 4)
    assert book.free == 5
    assert book.holds("a") == 0
    assert len(book.extend("a", 2)) == 1


def test_release_returns_the_pages_and_the_latest_go_out_first() -> None:
    book = PageBook(9)
    for seq in "ab":
        book.open(seq, WIDE)
    book.extend("a", 2)
    (group,) = book.extend("b", 2)
    assert book.release("b") == 3
    assert book.release("b") == 0
    assert book.extend("a", 4)[0] == group
    book.check()


def test_misuse_is_refused() -> None:
    book = PageBook(9)
    book.open("a", WIDE)
    with pytest.raises(ValueError, match="already"):
        book.open("a", WIDE)
    with pytest.raises(ValueError, match="do not fit"):
        book.fill("a", 1)
    with pytest.raises(KeyError):
        book.extend("b", 1)
    with pytest.raises(ValueError, match="at least one page"):
        PageBook(0)


@pytest.mark.parametrize(
    "damage",
    [
        lambda book: book._free.append(book._free[-1]),
        lambda book: book._free.pop(),
        lambda book: book._returned.append(3),
        lambda book: setattr(book, "limit", 5),
        lambda book: book._refs.__setitem__(0, 2),
        lambda book: book._state.__setitem__(0, 0),
        lambda book: book._in_state.__setitem__(0, 1),
        lambda book: book._tables["a"].groups.append((0, 1, 2)),
        lambda book: setattr(book._tables["a"], "tokens", 99),
        lambda book: book._tables.pop("a"),
    ],
)
def test_check_finds_damage(damage) -> None:
    book = PageBook(9)
    for seq in "ab":
        book.open(seq, WIDE)
        book.extend(seq, 2)
    book.fill("a", 1)
    book.release("b")
    book.check()
    damage(book)
    with pytest.raises(PageBookDamaged):
        book.check()


def _rectangle(first: int, last: int, layers: tuple[int, int]) -> set[tuple[int, int]]:
    return {(at, layer) for at in range(first, last) for layer in range(*layers)}


def _some_layers(layers: int) -> st.SearchStrategy[tuple[int, int] | None]:
    """Layers of a table, or None for all of them."""
    runs = [(lo, hi) for lo in range(layers) for hi in range(lo + 1, layers + 1)]
    return st.sampled_from([None, *runs])


class Pages(RuleBasedStateMachine):
    """Random sequences of two page shapes that grow, stall, go away in part and end, under a limit that changes.

    A model has the pages that each must hold, and which pages have memory.
    """

    def __init__(self) -> None:
        super().__init__()
        self.book = PageBook(40)
        self.specs: dict[str, ModelSpec] = {}
        self.tokens: dict[str, int] = {}
        self.promised: dict[str, int] = {}
        self.away: dict[str, set[tuple[int, int]]] = {}
        self.touched: set[int] = set()
        self.limit = 40
        self.count = 0

    @rule(limit=st.integers(0, 40))
    def set_limit(self, limit: int) -> None:
        used = self.book.used
        gone = self.book.set_limit(limit)
        assert (gone is None) == (used > limit)
        if gone is not None:
            assert self.touched.issuperset(gone)
            self.touched.difference_update(gone)
            self.limit = limit

    @rule(which=st.sampled_from([NARROW, WIDE]))
    def open(self, which: ModelSpec) -> None:
        seq = f"s{self.count}"
        self.count += 1
        self.book.open(seq, which)
        self.specs[seq], self.tokens[seq], self.promised[seq], self.away[seq] = which, 0, 0, set()

    @precondition(lambda self: self.specs)
    @rule(data=st.data(), tokens=st.integers(1, 20))
    def extend(self, data: st.DataObject, tokens: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.specs)))
        wanted = pages_for(self.specs[seq], self.tokens[seq] + tokens) - self._gone(seq) - self.book.pages_of(seq)
        free = self.book.free
        if wanted > free:
            with pytest.raises(OutOfPages):
                self.book.extend(seq, tokens)
            assert self.book.free == free
            return
        added = self.book.extend(seq, tokens)
        assert sum(len(group) for group in added) == max(wanted, 0)
        self.touched.update(page for group in added for page in group)
        self.promised[seq] = max(self.promised[seq], self.tokens[seq] + tokens)

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def fill(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.specs)))
        count = data.draw(st.integers(0, max(self.promised[seq] - self.tokens[seq], 0)))
        self.book.fill(seq, count)
        self.tokens[seq] += count

    @precondition(lambda self: self.specs)
    @rule(data=st.data(), first=st.integers(0, 4), groups=st.integers(0, 3))
    def send_away(self, data: st.DataObject, first: int, groups: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.specs)))
        layers = data.draw(_some_layers(self.specs[seq].kv_layers))
        width, before, last = self.specs[seq].page_tokens, self._gone(seq), first + groups
        pages = _rectangle(first, last, layers or (0, self.specs[seq].kv_layers))
        if not pages or pages & self.away[seq] or last >= self.book.holds(seq) or last * width > self.tokens[seq]:
            with pytest.raises(ValueError, match=r"cannot be sent away|are not whole page sets"):
                self.book.send_away(seq, first * width, last * width, layers)
            return
        gone = self.book.send_away(seq, first * width, last * width, layers)
        self.away[seq] |= pages
        assert gone == self._gone(seq) - before == len(pages)
        with pytest.raises(ValueError, match="cannot be forgotten"):
            self.book.rewind(seq, last * width - 1)

    @precondition(lambda self: any(self.away.values()))
    @rule(data=st.data(), first=st.integers(0, 4), groups=st.integers(1, 3))
    def bring_back(self, data: st.DataObject, first: int, groups: int) -> None:
        seq = data.draw(st.sampled_from(sorted(seq for seq, away in self.away.items() if away)))
        which, width = self.specs[seq], self.specs[seq].page_tokens
        layers = data.draw(_some_layers(which.kv_layers))
        lo, hi = layers or (0, which.kv_layers)
        if self.book.free < groups * (hi - lo):
            return
        self.book.open("back", replace(which, kv_layers=hi - lo))
        came = self.book.extend("back", groups * width)
        self.touched.update(page for group in came for page in group)
        self.book.fill("back", groups * width)
        pages = _rectangle(first, first + groups, (lo, hi))
        if not pages <= self.away[seq]:
            with pytest.raises(ValueError, match=r"cannot come back|are not whole page sets"):
                self.book.bring_back(seq, "back", first * width, layers=layers)
            self.book.release("back")
            return
        self.book.bring_back(seq, "back", first * width, layers=layers)
        self.away[seq] -= pages
        now = self.book.groups_of(seq, first, first + groups)
        assert tuple(group[lo:hi] for group in now) == came and not self.book.holds("back")

    def _gone(self, seq: str) -> int:
        return len(self.away[seq])

    @precondition(lambda self: self.specs)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        seq = data.draw(st.sampled_from(sorted(self.specs)))
        held = self.book.pages_of(seq)
        assert self.book.release(seq) == held
        del self.specs[seq], self.tokens[seq], self.promised[seq], self.away[seq]

    @invariant()
    def conserved(self) -> None:
        self.book.check()
        held = sum(pages_for(which, self.promised[seq]) - self._gone(seq) for seq, which in self.specs.items())
        for seq, away in self.away.items():
            groups = self.book.groups_of(seq)
            assert {
                (at, layer) for at, group in enumerate(groups) for layer, page in enumerate(group) if page < 0
            } == away
        assert self.book.free == self.limit - held
        assert self.book.counts().capacity == self.limit >= len(self.touched), "the memory is within the limit"

    def teardown(self) -> None:
        for seq in self.specs:
            self.book.release(seq)
        assert self.book.free == self.limit
        self.book.check()


Pages.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestPages = Pages.TestCase


def test_parts_without_attention_have_tables_without_pages() -> None:
    book = PageBook(1)
    none = spec("none", kv_layers=0, page_tokens=4, max_model_len=64)
    book.open("a", none)
    assert book.extend("a", 9) == ((), (), ())
    book.fill("a", 9)
    book.check()
    assert (book.holds("a"), book.pages_of("a"), book.free) == (3, 0, 1)
    assert book.groups_of("a") == ((), (), ())
    assert pages_for(none, 9) == 0
    assert book.release("a") == 0
    book.check()
