"""Page sets that are held for another device (IL-04)."""

from __future__ import annotations

import pytest

from runtime.kv.pages import PageBook
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
