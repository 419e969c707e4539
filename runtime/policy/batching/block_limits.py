"""Derive the batch limit of a block from its profile (BL-14).

A block's throughput grows with its batch as long as a step reads weights for longer than it computes. Behind that more
rows only make each step longer. The limit is the batch behind which the next doubling raises throughput by less than a
given share, capped by what a step takes and by the rows whose K and V the device's memory holds. Pure functions.
"""

from __future__ import annotations

from runtime.policy.profiles import Grid

#: Context of the rows that a limit is derived for, in tokens: in the middle of what blocks are profiled at.
CONTEXT = 256


def block_limit(decode: Grid, gain: float, most: int, context: int = CONTEXT) -> int:
    """Return the batch behind which each doubling raises a block's throughput by less than `gain` on average.

    All larger batches count, not only the next one: a single time that was measured too long would otherwise end the
    search at a small batch.

    Args:
        decode: Seconds of a step by batch and context.
        gain: The share of growth per doubling, above 0 and below 1.
        most: Largest limit.
    """
    sizes = [1 << at for at in range(most.bit_length())]
    rates = [size / decode.at(size, context) for size in sizes]
    for at, rate in enumerate(rates):
        if all(later < rate * (1 + gain) ** more for more, later in enumerate(rates[at + 1 :], 1)):
            return most if sizes[at] == sizes[-1] else sizes[at]
    return most


def rows_in_memory(pages: int, layers: int, page_tokens: int, context: int = CONTEXT) -> int:
    """Return how many rows of `context` tokens a device's pages hold, with K and V of so many layers; at least 1.

    Blocks without attention have no such limit: with 0 layers it is as many as there are pages.
    """
    return max(1, pages // max(1, layers * -(-context // page_tokens)))
