"""Costs and checks for migrations that copy some page groups and recompute the rest.

Compares a simulated move with the cost formula and with recomputing everything where nothing is copied.
"""

from __future__ import annotations

import math

from runtime.policy.migration.cost import Costs
from tests.runtime.virtual import ListTrace

#: Tokens of a page group, and of a recompute chunk.
_GROUP = 4


def costs(recompute_ms: float, copy_ms: float, inputs: float = 0.0) -> Costs:
    """Return costs for which a page group takes these milliseconds to recompute, or to copy over the link.

    `inputs` is the time to copy the inputs that a group is recomputed from, as a fraction of `copy_ms`.
    """
    copy = copy_ms / 1e3
    return Costs(
        _GROUP, _GROUP, lambda context, tokens: recompute_ms / 1e3 * tokens / _GROUP, copy, inputs_group=copy * inputs
    )


def seconds(trace: ListTrace) -> float:
    """Return the seconds from the start of the first move until both ends met."""
    begin, end = (trace.named(name)[0].t for name in ("kv.move.start", "kv.meet"))
    return (end - begin) / 1e9


def recompute_time(tokens: int, costs: Costs) -> float:
    """Return the seconds to recompute all of it, chunk by chunk."""
    width = costs.chunk_groups * costs.page_tokens
    return math.fsum(costs.chunk(lo, min(width, tokens - lo)) for lo in range(0, tokens, width))
