"""Prices and amounts of money: exact from and to text, and what is no amount is refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zoo.errors import InputError
from zoo.money import MOST_COST, ModelPrice, amount_of, cost_text, price_of, price_text


@pytest.mark.parametrize(
    ("text", "price", "shown"),
    [("0", 0, "0.00"), ("0.15", 1500, "0.15"), ("0.0375", 375, "0.0375"), ("999999.9999", 9_999_999_999, None)],
)
def test_prices_are_exact(text: str, price: int, shown: str | None) -> None:
    assert price_of(text) == price and price_text(price) == (shown or text)


@pytest.mark.parametrize(
    "text", ["", "-1", "+1", ".5", "1.", "1e3", "0.00001", "1000000", "1,5", " 1", "1\n", "٣", "nan"]
)
def test_what_is_no_price_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="no amount of money"):
        price_of(text)


def test_a_cost_is_tokens_times_price() -> None:
    price = ModelPrice("m", price_of("0.0375"), price_of("0.6"))
    assert cost_text(price.cost_of(1, 0)) == "0.0000000375"
    assert cost_text(price.cost_of(1_000_000, 0)) == "0.0375"
    assert price.cost_of(3, 5) == 3 * price.cost_of(1, 0) + 5 * price.cost_of(0, 1)
    assert cost_text(price.cost_of(123_456, 654_321)) == "0.3972222"


@given(st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
def test_tokens_that_a_cache_had_cost_what_is_said_of_them(
    prompt: int, cached: int, generated: int, of_them: int
) -> None:
    plain, apart = ModelPrice("m", 7, 11), ModelPrice("m", 7, 11, of_them)
    used = (prompt + cached, generated, cached)
    assert plain.cost_of(*used) == plain.cost_of(prompt + cached, generated)
    assert apart.cost_of(*used) == plain.cost_of(prompt, generated) + cached * of_them


@given(st.integers(0, MOST_COST))
def test_an_amount_is_what_its_text_says(cost: int) -> None:
    text = cost_text(cost)
    if cost < 10**18:
        assert amount_of(text) == cost
    else:
        with pytest.raises(InputError):
            amount_of(text)
