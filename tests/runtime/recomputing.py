"""What computing a sequence again costs where nothing is copied: the bound that moves from both ends are held to."""

from __future__ import annotations

import math

from runtime.policy.migration import Costs


def recompute_time(tokens: int, costs: Costs) -> float:
    """All of it, chunk by chunk, in seconds."""
    width = costs.chunk_groups * costs.page_tokens
    return math.fsum(costs.chunk(lo, min(width, tokens - lo)) for lo in range(0, tokens, width))
