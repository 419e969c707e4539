"""`PageBook.share` with some layers of another table, as for a sequence that is brought to a device."""

from __future__ import annotations

import pytest

from runtime.kv.pages import PageBook
from tests.runtime.virtual import spec


def test_a_table_begins_with_some_layers_of_another_one() -> None:
    """The pages are counted once, and stay with the one that begins so when the other one goes."""
    book, narrow = PageBook(30), spec("part", kv_layers=2, page_tokens=4)
    for name, one in (("a", spec("all", kv_layers=3, page_tokens=4)), ("b", narrow), ("c", narrow)):
        book.open(name, one)
    groups = book.extend("a", 12)
    book.fill("a", 9)
    assert book.share("b", "a", 8, layers=slice(1, 3)) == tuple(group[1:] for group in groups[:2])
    book.check()
    assert (book.used, book.tokens_of("b")) == (9, 8)
    with pytest.raises(ValueError, match="cannot share"):
        book.share("c", "a", 8, layers=slice(0, 3))
    with pytest.raises(ValueError, match="cannot share"):
        book.share("c", "a", 12, layers=slice(0, 2))
    book.release("a")
    book.check()
    assert book.used == 4
