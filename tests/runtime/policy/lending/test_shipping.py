"""What travels between debtor and creditor: queries or pages (IL-27, IL-28)."""

from __future__ import annotations

import random
from itertools import product

import pytest

from runtime.policy.lending.shipping import MOST_PULLED, LoanAsk, ShippingCosts, page_bytes, query_bytes

HEADS, KV_HEADS, WIDTH, BYTES = 32, 8, 64, 2


def ask(tokens: int, lent: int, here: int = 1000) -> LoanAsk:
    work = tokens * HEADS * WIDTH
    return LoanAsk(
        "d1",
        query_bytes(tokens, HEADS, WIDTH, BYTES, 8),
        page_bytes(lent, KV_HEADS, WIDTH, BYTES),
        work * lent,
        work * here,
    )


@pytest.mark.parametrize(("heads", "kv_heads", "tokens"), [(40, 40, 2), (64, 8, 13)])
def test_break_evens_of_both_models_of_the_paper(heads: int, kv_heads: int, tokens: int) -> None:
    """LLaMA2 with 13B and with 70B, heads of 128 values of two bytes, four back: from so many on queries are fewer."""
    queries = query_bytes(1, heads, 128, 2, 4)
    assert page_bytes(tokens - 1, kv_heads, 128, 2) < queries <= page_bytes(tokens, kv_heads, 128, 2)


class Link:
    """A link and two devices with constant speeds, in seconds for a trip, a byte and a product.

    `put`: how much longer attention to pages that have come takes than to one's own.
    """

    def __init__(self, trip: float, byte: float, here: float, there: float, put: float = 1.0) -> None:
        self.trip, self.byte, self.here, self.there, self.put = trip, byte, here, there, put

    def answer(self, one: LoanAsk, pulled: bool) -> float:
        return self.trip + (one.pages if pulled else one.queries) * self.byte + (not pulled) * one.products * self.there

    def whole(self, one: LoanAsk, pulled: bool) -> float:
        return max(one.here * self.here, self.answer(one, pulled)) + pulled * one.products * self.here * self.put


GRID = [ask(tokens, lent) for tokens, lent in product((1, 16, 256, 1024), (64, 512, 4096))]
#: Alike; a slow link; a creditor that is busy; a debtor that is slow; a fast link with long trips; pages that take long
#: to put where they are attended to.
LINKS = [
    Link(2e-4, 1e-9, 2e-10, 2e-10), Link(2e-4, 2e-7, 2e-10, 2e-10), Link(2e-4, 1e-9, 2e-10, 4e-9),
    Link(2e-4, 1e-8, 4e-9, 2e-10), Link(5e-3, 1e-10, 2e-10, 3e-10), Link(2e-4, 1e-10, 2e-10, 3e-10, put=4.0),
]  # fmt: skip


def learned(link: Link, rng: random.Random) -> ShippingCosts:
    """Return costs after eighty answers, every fourth one to a request for pages, each 2 % off."""
    costs = ShippingCosts()
    for _ in range(8):
        costs.choose("cheapest", ask(256, 64))
    for number in range(80):
        one = rng.choice(GRID)
        costs.add_attention(one.here, one.here * link.here * rng.uniform(0.98, 1.02))
        pulled = number % 4 == 0
        if pulled:
            took = one.products * link.here * link.put
            costs.add_pulled_attention(one.products, took * rng.uniform(0.98, 1.02))
        costs.add_answer(one, pulled, link.answer(one, pulled) * rng.uniform(0.98, 1.02), waited=True)
    return costs


@pytest.mark.parametrize("link", LINKS)
def test_the_cheapest_is_close_to_the_best(link: Link) -> None:
    """On a grid of twelve, with times that are 2 % off; pages must be 5 % faster, so that much may be lost."""
    costs = learned(link, random.Random(1))
    for one in GRID:
        pulled, _ = costs.choose("cheapest", one)
        both = [link.whole(one, each) for each in (False, True)]
        if one.pages < one.queries:
            assert both[pulled] <= 1.08 * min(both), (one, both)
        else:
            assert not pulled


def test_what_is_chosen_depends_on_both_devices_and_on_the_link() -> None:
    chosen = [[learned(link, random.Random(2)).choose("cheapest", one).pages for one in GRID] for link in LINKS]
    assert any(chosen[1]) and not any(chosen[3]) and sum(chosen[2]) > sum(chosen[3])


def test_both_are_tried_at_first_and_the_other_one_now_and_then() -> None:
    costs, one = learned(LINKS[3], random.Random(4)), ask(256, 64)
    first = ShippingCosts()
    assert [first.choose("cheapest", one) for _ in range(8)] == [(False, True), (True, True)] * 4
    later = [costs.choose("cheapest", one) for _ in range(200)]
    assert [at for at, each in enumerate(later, 9) if each.pages] == [64, 128, 192], "queries are cheaper here"
    assert all(each.learns for each in later if each.pages)


def test_later_only_every_eighth_answer_is_learned_from() -> None:
    costs, one = learned(LINKS[3], random.Random(4)), ask(256, 64)
    learns = [costs.choose("cheapest", one).learns for _ in range(400)]
    assert all(learns[:24]) and [at for at, each in enumerate(learns, 9) if each and at > 32] == [*range(40, 409, 8)]
    assert not any(costs.choose(how, one).learns for how in ("query", "pages") for _ in range(9))
    assert not costs.choose("cheapest", ask(1, 64)).learns, "queries are fewer bytes: there is nothing to choose"


def test_forced_and_limited() -> None:
    costs, large = ShippingCosts(), ask(1, 64)
    assert not costs.choose("query", large).pages and costs.choose("pages", large).pages
    too_large = LoanAsk("d1", 1 << 40, MOST_PULLED + 1, 1, 1)
    assert not costs.choose("pages", too_large).pages and not costs.choose("cheapest", too_large).pages


def test_an_answer_that_was_not_awaited_is_only_an_upper_limit() -> None:
    costs, one = ShippingCosts(), ask(256, 64)
    before = costs.seconds(one, pulled=False)
    costs.add_answer(one, pulled=False, seconds=10.0, waited=False)
    assert costs.seconds(one, pulled=False) == before
    costs.add_answer(one, pulled=False, seconds=10.0, waited=True)
    assert costs.seconds(one, pulled=False) > before
