"""Take the pages of a sequence that gets a path; pages that it may share are those of another one.

    no match            all pages are its own
    own chain's match   its first page sets are shared, and computed (BL-32)
    other chain's match its first page sets are shared up to the boundary, and its rows enter there (UN-15)

Contract: the caller has found the match and the room. The holding is cut by layers on paths where chains may share.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.chains import Boundary
from runtime.messages import PromptEntry
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.kv.prefix_index import PrefixMatch
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.speculation import Planned
from runtime.scheduler.state import ClusterState


@dataclass(frozen=True, slots=True)
class Start:
    """How a sequence starts on its devices.

    Fields:
        shared: Name of a sequence or cached prefix of its own chain, and how many tokens of it are shared.
        entry: How it starts with the first layers of another chain.
    """

    shared: tuple[str, int] | None = None
    entry: PromptEntry | None = None


class PageTaking:
    """Take pages for new sequences."""

    def __init__(self, state: ClusterState, prefix_cache: PrefixCache) -> None:
        self._state = state
        self._prefix_cache = prefix_cache

    def take_pages(
        self, sequence: ScheduledSequence, match: PrefixMatch | None, planned: Planned | None, now: int
    ) -> Start:
        """Take pages for all of a sequence's context; with a match, its first page sets are shared."""
        if match is None:
            self._take_own(sequence, planned)
            return Start()
        self._prefix_cache.used(match.prefix, now)
        if match.boundary is not None:
            return Start(entry=self._enter(sequence, match, match.boundary, now))
        return Start((match.prefix.name, self._share(sequence, match, now)))

    def _take_own(self, sequence: ScheduledSequence, planned: Planned | None) -> None:
        pages, accounting = sequence.pages, self._state.page_accounting
        bounds = self._bounds(sequence)
        if bounds:
            pages.holding = accounting.allocate_cut(sequence.path[0].device, bounds, pages.groups)
            return
        stand_in = sequence.spare if planned is None else ((planned.device, planned.pages),)
        pages.holding = accounting.allocate((*sequence.place.path_usage.places, *stand_in), pages.groups)

    def _share(self, sequence: ScheduledSequence, match: PrefixMatch, now: int) -> int:
        """Share all layers of a match; return how many tokens are computed therefore."""
        state, place, pages = self._state, sequence.place, sequence.pages
        like, tokens = match.prefix.holding, match.groups * sequence.spec.page_tokens
        if like.bounds:
            pages.holding = state.page_accounting.allocate_cut(
                sequence.path[0].device, like.bounds, pages.groups, like, match.groups, sequence.spec.kv_layers
            )
        elif any(state.devices[name].copies for name in place.devices):
            pages.holding = state.page_accounting.allocate(place.path_usage.places, pages.groups)
        else:
            pages.holding = state.page_accounting.allocate(place.path_usage.places, pages.groups, like, match.groups)
        sequence.computed = tokens
        state.counters.shared += 1
        state.counters.shared_tokens += tokens
        taken = match.groups * sum(each for _, each in place.weights)
        state.tell.shared(now, sequence.request, match.prefix.name, tokens, taken)
        return tokens

    def _enter(self, sequence: ScheduledSequence, match: PrefixMatch, boundary: Boundary, now: int) -> PromptEntry:
        """Share the layers before a boundary, cut as they are there; return how the sequence starts."""
        state, like = self._state, match.prefix.holding
        below = [bound for bound in like.bounds if bound <= boundary.layers]
        above = [bound for bound in self._bounds(sequence) if bound > boundary.layers]
        sequence.pages.holding = state.page_accounting.allocate_cut(
            sequence.path[0].device, (*below, *above), sequence.pages.groups, like, match.groups, boundary.layers
        )
        entry = state.prompts.enter(sequence, match, boundary)
        sequence.shared.entered = entry.tokens
        pages = match.pages(sequence.spec.kv_layers)
        state.tell.entered(now, sequence.request, match.prefix.name, entry.tokens, boundary.layers, pages)
        return entry

    def _bounds(self, sequence: ScheduledSequence) -> tuple[int, ...]:
        """Return the layers at which a sequence's pages are cut, from 0 to all; none where it shares with no chain."""
        boundaries = self._state.prompts.boundaries(sequence.chain, sequence.path)
        cuts = sorted({each.layers for each in boundaries})
        return (0, *cuts, sequence.spec.kv_layers) if cuts else ()
