"""Check that the parts of the scheduler agree. For tests, after every event."""

from __future__ import annotations

from collections import Counter

from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.lending.lending import Lending
from runtime.scheduler.migration.migration import Moves
from runtime.scheduler.state import ClusterState


def check(state: ClusterState, cache: PrefixCache, moves: Moves, lending: Lending) -> None:
    """Raise RuntimeError unless sequences, queues, loans and pages agree."""
    state.check()
    holdings = [
        *(sequence.pages.holding for sequence in state.running.values()),
        *(cached_prefix.holding for cached_prefix in cache),
        *moves.pinned(),
    ]
    state.page_accounting.check(holdings, sum(map(Counter, (moves.held(), lending.on_their_way())), Counter[str]()))
    lending.check()
    prefixes = [m.shared.prefix for m in state.running.values() if m.shared.prefix is not None]
    state.prefixes.check([*prefixes, *cache])
    state.prompts.check([*prefixes, *cache])
    if any(sequence.pages.holding.ends or sequence.shared.prefix is not None for sequence in state.waiting):
        raise RuntimeError("a sequence that waits holds pages")
