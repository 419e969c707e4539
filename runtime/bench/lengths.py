"""How long prompts and answers are, where no trace says: fixed, uniform, or lognormal. Tokens; pure.

Written as `32`, `uniform:16-64`, `lognormal:128,0.8` (the median, and the sigma of the logarithm), with `<=512` behind
it as a bound.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zoo.errors import InputError

#: No length is above this: a prompt is made in memory, and no model here reads more.
MOST_TOKENS = 1 << 20
_NUMBER = r"(\d{1,7})"
_FORM = re.compile(
    rf"(?:{_NUMBER}|uniform:{_NUMBER}-{_NUMBER}|lognormal:{_NUMBER},(\d{{1,2}}(?:\.\d{{1,6}})?))(?:<={_NUMBER})?",
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """`low` to `high` for uniform, both possible; for lognormal `low` is the median and `sigma` that of the logarithm.

    Nothing drawn is below 1 or above `most`. Raises InputError.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: int
    high: int = 0
    sigma: float = 0.0
    most: int = MOST_TOKENS

    def __post_init__(self) -> None:
        if not 1 <= self.low <= MOST_TOKENS or (self.kind == "uniform" and not self.low <= self.high <= MOST_TOKENS):
            raise InputError(f"lengths go from 1 to {MOST_TOKENS:,} tokens, the smaller one first")
        if not 1 <= self.most <= MOST_TOKENS:
            raise InputError(f"lengths are bounded by 1 to {MOST_TOKENS:,} tokens")


def parse_lengths(text: str) -> Lengths:
    """The written form. Raises InputError."""
    match = _FORM.fullmatch(text.replace(" ", ""))
    if match is None:
        raise InputError(
            f"{text!r} is no length; write 32, uniform:16-64 or lognormal:128,0.8, with <=512 behind it as a bound"
        )
    fixed, low, high, median, sigma, most = match.groups()
    bound = int(most) if most else MOST_TOKENS
    if fixed:
        return Lengths("fixed", int(fixed), most=bound)
    if low:
        return Lengths("uniform", int(low), int(high), most=bound)
    return Lengths("lognormal", int(median), sigma=float(sigma), most=bound)


def draw(lengths: Lengths, count: int, rng: np.random.Generator) -> list[int]:
    """`count` lengths."""
    if lengths.kind == "fixed":
        drawn = np.full(count, lengths.low)
    elif lengths.kind == "uniform":
        drawn = rng.integers(lengths.low, lengths.high + 1, size=count)
    else:
        drawn = np.rint(np.minimum(rng.lognormal(np.log(lengths.low), lengths.sigma, size=count), MOST_TOKENS))
    return [int(length) for length in np.clip(drawn, 1, lengths.most)]
