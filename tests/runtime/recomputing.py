"""What a move takes, and what it is held to: the formula's costs, and those of computing all of it again where nothing
is copied.
"""

from __future__ import annotations

import math

from runtime.policy.migration.cost import Costs
from tests.runtime.virtual import ListTrace

#: Tokens of a page group, and of a chunk.
_GROUP = 4


def costs(recompute_ms: float, copy_ms: float, inputs: float = 0.0) -> Costs:
    """A group takes these milliseconds to recompute, or over the link; `inputs`: what it is recomputed from, as a part
    of that.
    """
    copy = copy_ms / 1e3
    return Costs(
        _GROUP, _GROUP, lambda context, tokens: recompute_ms / 1e3 * tokens / _GROUP, copy, inputs_group=copy * inputs
    )


def seconds(trace: ListTrace) -> float:
    """From the beginning of the first move to where both ends met."""
    begin, end = (trace.named(name)[0].t for name in ("kv.move.start", "kv.meet"))
    return (end - begin) / 1e9


def recompute_time(tokens: int, costs: Costs) -> float:
    """All of it, chunk by chunk, in seconds."""
    width = costs.chunk_groups * costs.page_tokens
    return math.fsum(costs.chunk(lo, min(width, tokens - lo)) for lo in range(0, tokens, width))
