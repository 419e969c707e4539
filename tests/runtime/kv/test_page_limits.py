"""A limit of the pages in use below the capacity: which pages are given back to the system."""

from __future__ import annotations

import pytest

from runtime.kv.pages import OutOfPages, PageBook
from tests.runtime.kv.test_pages import WIDE


def test_a_lower_limit_names_the_touched_pages_to_give_back() -> None:
    book = PageBook(12)
    for seq in "abc":
        book.open(seq, WIDE)
        book.extend(seq, 2)
    assert book.set_limit(8) is None and book.limit == 12, "nine pages are in use"
    book.release("b")
    assert book.set_limit(8) == [5], "two of the three free pages may keep their memory"
    assert (book.free, book.counts().capacity, book.counts().free) == (2, 8, 2)
    with pytest.raises(OutOfPages):
        book.extend("a", 4)
    assert book.set_limit(6) == [4, 3]
    book.check()
    assert book.set_limit(12) == [] and book.free == 6
    assert set(book.extend("a", 4)[0]) == {3, 4, 5}, "pages that were used before come before those that never were"
    with pytest.raises(ValueError, match="cannot use 13"):
        book.set_limit(13)
    book.check()
