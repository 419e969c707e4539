"""Costs of recomputation for tests: the cost formula's inputs, and the time to recompute everything without copies."""

from __future__ import annotations

import math

from runtime.policy.migration.cost import Costs
from tests.runtime.virtual import ListTrace

#: Tokens of a page group, and of a chunk.
_GROUP = 4


def costs(recompute_ms: float, copy_ms: float, inputs: float = 0.0) -> Costs:
    """Return costs with these times per page group for recomputation and for the link.

    `inputs`: Time to copy a group's inputs to recompute from, as a fraction of `copy_ms`.
    """
    copy = copy_ms / 1e3
    return Costs(
        _GROUP, _GROUP, lambda context, tokens: recompute_ms / 1e3 * tokens / _GROUP, copy, inputs_group=copy * inputs
    )


def seconds(trace: ListTrace) -> float:
    """Return the seconds from the start of the first move to the point where both ends met."""
    begin, end = (trace.named(name)[0].t for name in ("kv.move.start", "kv.meet"))
    return (end - begin) / 1e9


def recompute_time(tokens: int, costs: Costs) -> float:
    """Return the seconds to recompute all tokens, chunk by chunk."""
    width = costs.chunk_groups * costs.page_tokens
    return math.fsum(costs.chunk(lo, min(width, tokens - lo)) for lo in range(0, tokens, width))
