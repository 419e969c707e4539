"""Choose the size of prompt chunks from measured rates: the least one that saturates the device (TI-09).

    knee_of({64: 900.0, 128: 1500.0, 256: 1950.0, 512: 2000.0}).tokens      -> 256

Beyond the knee a chunk delays what runs beside it without a gain in tokens per second; below it the device idles. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

#: Largest loss of rate, as a share of the best one.
WITHIN = 0.05
#: Sizes without which a curve has no shape.
LEAST_SIZES = 3


@dataclass(frozen=True, slots=True)
class Knee:
    """The knee of measured rates.

    Fields:
        tokens: The least measured size with nearly the best rate.
        saturated: Whether a larger size was measured, too. Otherwise the rate may still grow, and the device's knee lie
            beyond what was measured.
    """

    tokens: int
    saturated: bool


def knee_of(rates: Mapping[int, float], within: float = WITHIN) -> Knee:
    """Return the knee of a prompt's rates, in tokens per second by tokens of the chunk.

    Args:
        within: Share of the best rate that may be lost.

    Raises ValueError for fewer than three sizes, a size below 1, a rate that is not above 0, or a share that is none.
    """
    if len(rates) < LEAST_SIZES:
        raise ValueError(f"a knee needs the rates of at least {LEAST_SIZES} chunk sizes, not of {len(rates)}")
    if not 0 <= within < 1:
        raise ValueError(f"the share of the best rate that may be lost is from 0 to 1, not {within}")
    for size, rate in rates.items():
        if size < 1 or not 0 < rate < math.inf:
            raise ValueError(f"a chunk of {size} tokens with {rate} tokens per second is no measurement")
    best = max(rates.values())
    tokens = min(size for size, rate in rates.items() if rate >= (1 - within) * best)
    return Knee(tokens, tokens < max(rates))
