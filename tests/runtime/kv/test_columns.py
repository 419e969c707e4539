"""`Columns` against a model: right-aligned rows of cells, with dictionaries in place of the physical store."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.kv.columns import Columns, NoRoom

CAPACITY = 24


class Picture:
    """A model of `Columns`: rows as lists of cells, and a store that has each cell at its physical column.

    A cell is a token's number, or None for padding.
    """

    def __init__(self) -> None:
        self.columns = Columns(CAPACITY)
        self.rows: list[list[int | None]] = []
        self.store: list[dict[int, int | None]] = []
        self.tokens = 0

    def enter(self, span: int) -> None:
        at = self.columns.enter(span)
        assert at == len(self.rows)
        self.rows.append([self.new() for _ in range(span)])
        self.store.append(dict(zip(self.columns.physical(span), self.rows[-1], strict=True)))

    def leave(self, row: int) -> None:
        last = self.columns.remove_row(row)
        for held in (self.rows, self.store):
            held[row] = held[last]
            del held[last]

    def advance(self, counts: list[int]) -> None:
        width = self.columns.advance(counts)
        for row, (cells, count) in enumerate(zip(self.rows, counts, strict=True)):
            real = [self.new() for _ in range(count)]
            padding = [None] * (width - count)
            if cells:
                added = [*real, *padding]
                cells += added
            else:
                added = [*padding, *real]
                cells += real
            self.store[row].update(zip(self.columns.physical(width), added, strict=True))

    def new(self) -> int:
        self.tokens += 1
        return self.tokens

    def check(self) -> None:
        assert self.columns.rows == len(self.rows)
        assert (
            self.columns.needed
            == max((len(cells) for cells in self.rows), default=0)
            <= self.columns.length
            <= CAPACITY
        )
        for row, cells in enumerate(self.rows):
            assert self.columns.span(row) == len(cells)
            assert [self.store[row][at] for at in self.columns.physical(len(cells))] == cells


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_every_row_finds_its_cells_whatever_comes_and_goes(data: st.DataObject) -> None:
    snapshot = Picture()
    for _ in range(data.draw(st.integers(1, 50))):
        what = data.draw(st.sampled_from(["enter", "leave", "advance", "release"]))
        before = snapshot.columns.length
        try:
            if what == "enter" and len(snapshot.rows) < 4:
                snapshot.enter(data.draw(st.integers(0, 12)))
            elif what == "leave" and snapshot.rows:
                snapshot.leave(data.draw(st.integers(0, len(snapshot.rows) - 1)))
            elif what == "advance" and snapshot.rows:
                snapshot.advance([data.draw(st.integers(0, 5)) for _ in snapshot.rows])
            elif what == "release":
                cut = snapshot.columns.release()
                assert snapshot.columns.length == before - cut == snapshot.columns.needed
        except NoRoom:
            assert snapshot.columns.length == before, "what does not fit changes nothing"
        snapshot.check()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(1, 8), min_size=20, max_size=80), st.integers(1, 4))
def test_an_endless_stream_keeps_the_cache_as_short_as_its_longest_row(lengths: list[int], slots: int) -> None:
    """With release, the cache is never longer than the longest running row (BA-06).

    A row of one prompt token comes whenever one ends.
    """
    columns, left = Columns(8), []
    waiting = list(lengths)
    while waiting or left:
        while waiting and len(left) < slots:
            columns.enter(0)
            left.append(waiting.pop())
        columns.release()
        columns.advance([1] * len(left))
        assert columns.length == columns.needed <= 8
        left = [each - 1 for each in left]
        while 0 in left:
            at = left.index(0)
            last = columns.remove_row(at)
            left[at] = left[last]
            del left[last]


def test_a_longer_row_extends_to_the_left_and_a_window_to_the_right() -> None:
    columns = Columns(10)
    columns.enter(3)
    first = columns.physical(3)
    columns.enter(5)  # BA-10
    assert columns.length == 5 and columns.span(0) == 3 and columns.physical(3) == first
    assert columns.advance([1, 4]) == 4 and columns.length == 9 and [columns.span(0), columns.span(1)] == [7, 9]
    with pytest.raises(NoRoom):
        columns.advance([2, 1])
    columns.remove_row(1)
    assert columns.release() == 2 and columns.length == 7
    columns.move(7)
    assert columns.physical(7) == list(range(7))
    with pytest.raises(NoRoom):
        columns.move(6)


def test_empty_rows_hold_nothing_back() -> None:
    """A finished row without a successor does not block the release for ever (BA-06)."""
    columns = Columns(4)
    columns.enter(4)
    columns.remove_row(0)
    assert columns.release() == 4 and columns.length == 0
    columns.enter(0)
    assert columns.advance([0]) == 0 and columns.span(0) == 0
