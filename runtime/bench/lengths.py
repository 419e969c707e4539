"""Draw lengths of prompts and answers in tokens where no trace gives them: fixed, uniform or lognormal. Pure.

Written as `32`, `uniform:16-64` or `lognormal:128,0.8` (median, and sigma of the logarithm), optionally followed by a
bound such as `<=512`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import numpy as np

from zoo.errors import InputError

#: Maximum length: a prompt is built in memory, and no supported model reads more.
MOST_TOKENS = 1 << 20
_NUMBER = r"(\d{1,7})"
_FORM = re.compile(
    rf"(?:{_NUMBER}|uniform:{_NUMBER}-{_NUMBER}|lognormal:{_NUMBER},(\d{{1,2}}(?:\.\d{{1,6}})?))(?:<={_NUMBER})?",
)


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths. Samples are clipped to 1 … `most`.

    Fields:
        low: The length if fixed, the least one if uniform, the median if lognormal.
        high: The greatest length, inclusive, if uniform.
        sigma: Standard deviation of the logarithm if lognormal.

    Raises InputError.
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
    """Parse the written form. Raises InputError."""
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
    """Draw `count` lengths."""
    if lengths.kind == "fixed":
        drawn = np.full(count, lengths.low)
    elif lengths.kind == "uniform":
        drawn = rng.integers(lengths.low, lengths.high + 1, size=count)
    else:
        drawn = np.rint(np.minimum(rng.lognormal(np.log(lengths.low), lengths.sigma, size=count), MOST_TOKENS))
    return [int(length) for length in np.clip(drawn, 1, lengths.most)]
