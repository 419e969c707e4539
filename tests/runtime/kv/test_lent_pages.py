"""Page sets that are held for another device (IL-04)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.kv.pages import PageBook
from runtime.types import AWAY
from tests.runtime.kv.test_pages import WIDE


def test_pages_of_a_loan_are_lent_until_they_are_free() -> None:
    book = PageBook(12)
    book.open("a", WIDE)
    book.extend("a", 2 * WIDE.page_tokens)
    book.lend("a")
    book.check()
    assert (book.counts().lent, book.counts().local) == (2 * WIDE.kv_layers, 0)
    assert book.tokens_of("a") == 2 * WIDE.page_tokens
    book.open("b", WIDE)
    with pytest.raises(ValueError, match="cannot share"):
        book.share("b", "a", WIDE.page_tokens)
    for wrong in (
        lambda: book.lend("a"),
        lambda: book.send_away("a", 0, WIDE.page_tokens),
        lambda: book.rewind("a", 0),
    ):
        with pytest.raises(ValueError):
            wrong()
    for tokens in (0, WIDE.page_tokens // 2, 2 * WIDE.page_tokens):
        with pytest.raises(ValueError, match="what is lent"):
            book.cut_lent("a", tokens)
    assert book.cut_lent("a", WIDE.page_tokens) == WIDE.kv_layers == book.counts().lent
    book.check()
    assert book.release("a") == WIDE.kv_layers and book.counts().lent == 0
    book.check()


def test_pages_of_some_layers_go_once_and_come_back_once() -> None:
    book, width = PageBook(40), WIDE.page_tokens
    book.open("a", WIDE)
    book.extend("a", 4 * width)
    book.fill("a", 4 * width)
    whole = book.groups_of("a")
    assert book.send_away("a", 0, 2 * width, (0, 2)) == 4
    assert [group[:2] for group in book.groups_of("a", 0, 2)] == [(AWAY, AWAY)] * 2
    assert [group[2] for group in book.groups_of("a", 0, 2)] == [group[2] for group in whole[:2]], "the third is here"
    book.check()
    for layers in ((0, 1), (1, 3), (0, 4), (2, 2)):  # away already, or no layers of it
        with pytest.raises(ValueError):
            book.send_away("a", 0, width, layers)
    assert book.send_away("a", 0, 3 * width, (2, 3)) == 3 and book.pages_of("a") == 12 - 7
    for layers, lo in (((0, 1), 0), ((0, 3), 0), ((0, 2), 2 * width), ((1, 3), 2 * width)):  # too few, or here
        book.open("b", replace(WIDE, kv_layers=2))
        book.extend("b", width)
        book.fill("b", width)
        with pytest.raises(ValueError):
            book.bring_back("a", "b", lo, layers=layers)
        book.check()
        book.release("b")
    book.open("b", replace(WIDE, kv_layers=2))
    (pages,) = book.extend("b", width)
    book.fill("b", width)
    book.bring_back("a", "b", width, layers=(0, 2))
    assert book.groups_of("a", 1, 2) == ((*pages, AWAY),) and not book.holds("b")
    book.check()
    assert book.release("a") == 12 - 7 + 2


def test_lost_layers_are_put_back_and_the_pages_of_all_others_are_free() -> None:
    book, width = PageBook(40), WIDE.page_tokens
    book.open("a", WIDE)
    book.extend("a", 4 * width)
    book.fill("a", 4 * width)
    book.send_away("a", width, 3 * width, (0, 1))
    book.send_away("a", width, 3 * width, (2, 3))
    before = book.groups_of("a")
    book.open("b", WIDE)
    book.share("b", "a", width, away=True)
    book.extend("b", width)
    book.fill("b", width)
    free, (new,) = book.free, book.groups_of("b", 1)
    for wrong in (((1, 2),), ((0, 1), (0, 1)), ((0, 4),), ((0, 1), (1, 3))):  # here, twice, not there, one of them here
        with pytest.raises(ValueError):
            book.bring_back("a", "b", width, width, taken=wrong)
        book.check()
    book.bring_back("a", "b", width, width, taken=((0, 1), (2, 3)))
    assert book.groups_of("a") == (before[0], (new[0], before[1][1], new[2]), *before[2:])
    assert book.free == free + 1 and not book.holds("b"), "the page of the middle layer"
    book.check()
