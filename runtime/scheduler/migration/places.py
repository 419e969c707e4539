"""Take pages where sequences are brought, but for the page sets that other sequences have there (BL-16, TI-15).

    find: the longest computed prefix on the new path -> pinned until the migration ends; pages are taken for the rest
        committed: the sequence shares these page sets          aborted: they are what they were before

The destinations share the pages with the first request, so that they have them whatever ends meanwhile.

Contract: what may be shared is for the prefix index to say: the same version of the chain, tenant and path; nothing is
by sequences that will need loans. Pinned page sets are counted once, and idle no more.
"""

from __future__ import annotations

from runtime.chains import Path, devices_of
from runtime.kv.pages import groups_for
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.kv.prefix_index import CachedPrefix, PrefixMatch
from runtime.scheduler.migration.migration import Migration
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class MovePlaces:
    """Pages of migrations at their destinations."""

    def __init__(self, state: ClusterState, prefix_cache: PrefixCache) -> None:
        self._state, self._prefix_cache = state, prefix_cache

    def find(self, sequence: ScheduledSequence, path: Path, tokens: int) -> PrefixMatch | None:
        """Return the longest prefix of a sequence that a path has; None if there is none, or it may not share.

        `tokens`: those that the sequence has computed before it runs on the path.
        """
        if self._state.config.prefix_caching == "off" or sequence.spec.virtual_tokens or sequence.shared.tentative:
            return None
        marks = sequence.mark()[: tokens // sequence.chain.spec.page_tokens]
        match = self._state.prefixes.match_on(sequence.realm, path, marks)
        if match is None or match.prefix.holding.bounds:
            return None
        donor = self._state.running.get(match.prefix.name)
        return None if any(self._may_borrow(each, path) for each in (sequence, donor) if each is not None) else match

    def reserve(self, move: Migration, tokens: int, now: int) -> bool:
        """Take pages at the destinations for what a sequence has and they lack; return False if there is no room.

        `tokens`: those that it has computed before it runs there.
        """
        match = self.find(move.sequence, move.path, tokens)
        if match is not None:
            self._pin(move, match)
            if self.allocate(move, move.sequence.computed, match.prefix):
                self._prefix_cache.used(match.prefix, now)
                return True
            self._state.page_accounting.free(move.there)  # it may be in the way
            move.groups, move.donor = 0, ""
        return self.allocate(move, move.sequence.computed)

    def allocate(self, move: Migration, upto: int, spared: CachedPrefix | None = None) -> bool:
        """Take pages at the destinations for `upto` tokens; return False if there is no room.

        `spared`: a prefix that must stay.
        """
        # As many as the sequence holds, so that it can go on from its next row.
        groups = max(groups_for(move.sequence.spec, upto), move.sequence.pages.groups)
        more, devices = move.pages_on(groups - move.groups), self._state.devices
        short = {target: pages for target, pages in more.items() if pages > devices[target].pages.free}
        if short and not self._prefix_cache.make_room(short, spared):
            return False
        for target, pages in more.items():
            devices[target].pages.used += max(pages, 0)
        move.groups = max(groups, move.groups)
        return True

    def _may_borrow(self, sequence: ScheduledSequence, path: Path) -> bool:
        """Return whether a sequence gets longer than what a path holds: shared pages are not lent (IL-04)."""
        limits, route = self._state.limits, self._state.router.along(sequence.chain, path)
        return limits.on and sequence.longest > limits.local(route.weights)

    def _pin(self, move: Migration, match: PrefixMatch) -> None:
        """Keep a prefix where a migration brings its sequence."""
        before, after = devices_of(move.chain, move.sequence.path), devices_of(move.chain, move.path)
        blocks = {at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old != new}
        move.there = self._state.page_accounting.pin(match.prefix.holding, match.groups, blocks)
        move.groups, move.donor = match.groups, match.prefix.name
