"""Prices and amounts of money as integers, from and to decimal texts, in whichever currency is meant.

A price is for a million tokens, in 1/10,000; a cost is in 1/10,000,000,000. So tokens times a price are exactly a cost.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from zoo.errors import InputError

#: Decimals of a price, and of a cost.
PRICE_DECIMALS = 4
COST_DECIMALS = PRICE_DECIMALS + 6
#: The largest cost that is recorded: 64 bits. What is above it counts as this.
MOST_COST = (1 << 63) - 1
#: Digits before the point, so that what a text says fits.
_PRICE_DIGITS, _AMOUNT_DIGITS = 6, 8


@dataclass(frozen=True, slots=True)
class ModelPrice:
    """What a million tokens of a model cost.

    Fields:
        model: Its full name; "": all models without a price of their own.
        prompt, generated: In 1/10,000.
        cached: Of prompt tokens that were not computed; None: as the rest of the prompt.
    """

    model: str
    prompt: int
    generated: int
    cached: int | None = None

    def cost_of(self, prompt_tokens: int, generated_tokens: int, cached_tokens: int = 0) -> int:
        """Return the cost of tokens, in 1/10,000,000,000; `cached_tokens` of the prompt were not computed."""
        cached = self.prompt if self.cached is None else self.cached
        computed = prompt_tokens - cached_tokens
        return computed * self.prompt + cached_tokens * cached + generated_tokens * self.generated


def price_of(text: str) -> int:
    """Return a price as an integer. Raises InputError for what is no decimal number, or too large or too fine."""
    return _units(text, _PRICE_DIGITS, PRICE_DECIMALS)


def amount_of(text: str) -> int:
    """Return an amount of money as a cost. Raises as `price_of`."""
    return _units(text, _AMOUNT_DIGITS, COST_DECIMALS)


def price_text(price: int) -> str:
    """Return a price as an exact decimal number, with two decimals at least."""
    return _text(price, PRICE_DECIMALS)


def cost_text(cost: int) -> str:
    """Return a cost as an exact decimal number, with two decimals at least."""
    return _text(cost, COST_DECIMALS)


def _units(text: str, digits: int, decimals: int) -> int:
    found = re.fullmatch(rf"([0-9]{{1,{digits}}})(?:\.([0-9]{{1,{decimals}}}))?", text)
    if found is None:
        raise InputError(
            f"{text[:40]!r} is no amount of money: digits, at most {digits}, and maybe a point and {decimals} more"
        )
    return int(found[1] + (found[2] or "").ljust(decimals, "0"))


def _text(units: int, decimals: int) -> str:
    whole, part = divmod(units, 10**decimals)
    return f"{whole}.{f'{part:0{decimals}}'.rstrip('0').ljust(2, '0')}"
