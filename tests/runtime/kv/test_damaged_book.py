"""`PageBook.check` finds each kind of damage: what the tests of sequences and schedules rely on."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.kv.page_table import PageState
from runtime.kv.pages import PageBook, PageBookDamaged
from tests.runtime.kv.test_pages import WIDE


def book() -> PageBook:
    """Return a book with pages in use (0 to 5), free ones that were in use (6 to 8), and fresh ones."""
    made = PageBook(12)
    for name, tokens in (("a", 3), ("b", 2)):
        made.open(name, WIDE)
        made.extend(name, tokens)
        made.fill(name, tokens)
    made.release("b")
    made.check()
    return made


def _twice_free(made: PageBook) -> None:
    made._free[0] = made._free[1]


def _free_while_held(made: PageBook) -> None:
    made._free[0] = 0


def _free_and_fresh(made: PageBook) -> None:
    made._free[0] = 11


def _leaked(made: PageBook) -> None:
    made._free.pop()


def _never_used_but_skipped(made: PageBook) -> None:
    made._fresh += 1


def _counted_twice(made: PageBook) -> None:
    made._refs[0] += 1


def _held_though_fresh(made: PageBook) -> None:
    made._tables["a"].groups[0] = (11, 1, 2)
    made._refs[0], made._refs[11] = 0, 1
    made._state[0], made._state[11] = PageState.FREE, PageState.RESIDENT


def _free_in_another_state(made: PageBook) -> None:
    made._state[made._free[0]] = PageState.RESIDENT


def _fresh_in_another_state(made: PageBook) -> None:
    made._state[11] = PageState.LENT


def _exchanged_states(made: PageBook) -> None:
    made._state[made._free[0]], made._state[11] = PageState.RESIDENT, PageState.RESIDENT


def _held_as_free(made: PageBook) -> None:
    made._state[0] = PageState.FREE


def _miscounted(made: PageBook) -> None:
    made._in_state[PageState.FREE] -= 1


def _more_than_the_limit(made: PageBook) -> None:
    made.limit = 4


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (_twice_free, "free pages"),
        (_free_while_held, "free pages"),
        (_free_and_fresh, "free pages"),
        (_leaked, "free pages"),
        (_never_used_but_skipped, "free pages"),
        (_counted_twice, "reference counts"),
        (_held_though_fresh, "free pages"),
        (_free_in_another_state, "state contradicts"),
        (_fresh_in_another_state, "state contradicts"),
        (_exchanged_states, "state contradicts"),
        (_held_as_free, "should be"),
        (_miscounted, "counts by state"),
        (_more_than_the_limit, "in use"),
    ],
)
def test_damage_is_found(damage: Callable[[PageBook], None], why: str) -> None:
    made = book()
    damage(made)
    with pytest.raises(PageBookDamaged, match=why):
        made.check()
