"""Say whether a path that decodes has room for a sequence: places in steps, pages now and later (TI-19 to TI-22).

Contract: page sets that the path has of the sequence already are not needed again, but must stay then. Where they are
in the way, there is room for the whole sequence or none. Only `crowded` changes anything: it evicts cached prefixes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from runtime.scheduler.admission.page_reserve import PageReserve
from runtime.scheduler.kv.prefix_cache import PrefixCache
from runtime.scheduler.kv.prefix_index import PrefixMatch
from runtime.scheduler.migration.migration import crossings
from runtime.scheduler.migration.migrations import Migrations
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class PresentPages(NamedTuple):
    """What a route has of a sequence already.

    Fields:
        tokens: Tokens of which K and V are there.
        spared: Pages that are in use there anyway, by device: the sequence does not take them.
        stay: Those of them that more than one sequence uses, so that they stay when one ends.
    """

    tokens: int
    spared: Mapping[str, int]
    stay: Mapping[str, int]


NOTHING_PRESENT = PresentPages(0, {}, {})


class DecodeRoom:
    """Room on the devices of one scheduler."""

    def __init__(self, state: ClusterState, migrations: Migrations, prefix_cache: PrefixCache) -> None:
        self._state, self._migrations, self._prefix_cache = state, migrations, prefix_cache
        self._reserve = PageReserve(state, migrations.moves)

    def crowded(self, sequence: ScheduledSequence, route: Route, tokens: int) -> set[str]:
        """Return the devices of a route without room for a sequence; where there are none, its pages are free.

        `tokens`: for which room is needed at once, the next one included.
        """
        crowded = self.short(sequence, route, tokens)
        if crowded:
            return crowded
        for match in self._matches(sequence, route, tokens):
            needs = self._needs(sequence, route, tokens, match)
            slack = {name: self.slack(name) for name in needs}
            if self._prefix_cache.make_room(needs, None if match is None else match.prefix, slack):
                return set()
        return set(self._needs(sequence, route, tokens, None))

    def short(self, sequence: ScheduledSequence, route: Route, tokens: int) -> set[str]:
        """Return the devices of a route that lack pages for a sequence, now or later, or a place in their steps."""
        state, bound = self._state, self.bound()
        short = set[str]()
        if self._reserve.reserves:
            short = self._reserve.lacking(sequence, route.weights, self.present(sequence, route, tokens).stay)
        for name in self._needs(sequence, route, tokens, None):
            comes = name not in sequence.place.devices
            if comes and state.devices[name].passing.expected + bound[name] >= state.config.max_num_seqs:
                short.add(name)
        found = [self._full(sequence, route, tokens, match) for match in self._matches(sequence, route, tokens)]
        return short if not all(found) else short | found[-1]

    def present(self, sequence: ScheduledSequence, route: Route, tokens: int) -> PresentPages:
        """Return what a route has of a sequence; `tokens`: for which room is needed, the next one included."""
        match = self._migrations.places.find(sequence, route.path, tokens - 1)
        if match is None:
            return NOTHING_PRESENT
        holding, there = match.prefix.holding, {name: self._state.devices[name] for name, _ in route.weights}
        shared = self._state.page_accounting.shared_pages
        spared, stay = (
            {name: shared(holding, device, match.groups, users) for name, device in there.items()} for users in (1, 2)
        )
        return PresentPages(match.groups * sequence.chain.spec.page_tokens, spared, stay)

    def slack(self, name: str) -> int:
        """Return the pages that stay free on a device where sequences run."""
        device = self._state.devices[name]
        return int(device.pages.capacity * self._state.config.watermark) if device.passing.count else 0

    def bound(self) -> Counter[str]:
        """Return how many sequences come to each device by hand-offs under way."""
        return Counter(name for move in self._migrations for name in {part.target for part in move.parts})

    # -- internals -----------------------------------------------------------------------------------------------------

    def _matches(self, sequence: ScheduledSequence, route: Route, tokens: int) -> list[PrefixMatch | None]:
        """Return the prefix that a route has of a sequence, if any, and none, in the order in which they are tried."""
        match = self._migrations.places.find(sequence, route.path, tokens - 1)
        return [None] if match is None else [match, None]

    def _needs(self, sequence: ScheduledSequence, route: Route, tokens: int, match: PrefixMatch | None) -> Counter[str]:
        """Return the pages that a sequence takes at once, by device."""
        groups = -(-tokens // sequence.chain.spec.page_tokens) - (0 if match is None else match.groups)
        needs = Counter[str]()
        for hop, target in crossings(sequence.chain, sequence.path, route.path):
            needs[target] += (hop.layers[1] - hop.layers[0]) * groups
        return needs

    def _full(self, sequence: ScheduledSequence, route: Route, tokens: int, match: PrefixMatch | None) -> set[str]:
        """Return the devices of a route without free pages for a sequence, or those that prefixes give back."""
        kept = {} if match is None else match.prefix.holding.idle()
        full = set[str]()
        for name, pages in self._needs(sequence, route, tokens, match).items():
            there = self._state.devices[name].pages
            if there.free + there.idle - kept.get(name, 0) < pages + self.slack(name):
                full.add(name)
        return full
