"""Find cached prefixes on devices that decode, behind which so little of a prompt is left that it runs there.

    found prefixes -> on a path that decodes, short remainder, no busier than other such paths -> no hand-off

Contract: nothing is found unless roles are apart and `local_prefill` is above 0. It decides and counts; whether there
is room on the path is checked elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from runtime.policy.roles.remainder import runs_locally
from runtime.scheduler.kv.prefix_index import PrefixMatch
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Returns whether a cached prefix justifies its route, beside the cheapest one.
Worth = Callable[[ScheduledSequence, PrefixMatch, Route, Route], bool]
#: Places a sequence on the path of a cached prefix, but for devices that are full; returns whether there was room.
Join = Callable[[ScheduledSequence, PrefixMatch, set[str], int], bool]


class LocalPrefill:
    """The rule of one scheduler."""

    def __init__(self, state: ClusterState, worth: Worth, join: Join) -> None:
        self._state, self._worth, self._join = state, worth, join
        self._limit = state.config.decode.local_prefill

    def places(self, sequence: ScheduledSequence, found: Sequence[PrefixMatch], full: set[str], now: int) -> bool:
        """Place a sequence where it will decode, if a prefix there leaves little of its prompt and there is room.

        `found`: its prefixes, on any path.
        """
        for match in self._matches(sequence, found):
            if self._join(sequence, match, full, now):
                self._record(sequence, now)
                return True
        return False

    # -- internals -----------------------------------------------------------------------------------------------------

    def _matches(self, sequence: ScheduledSequence, found: Sequence[PrefixMatch]) -> Iterator[PrefixMatch]:
        """Iterate over the prefixes from which a sequence runs on devices that only decode."""
        state, chain = self._state, sequence.chain
        if not self._limit or not found or not state.devices.roles.apart:
            return
        within = state.router.within(chain, "decodes")
        best = state.router.least_loaded(chain, state.devices.loads, sequence.longest, within)
        if within is None or best is None:
            return
        for match in found:
            cached = match.groups * chain.spec.page_tokens
            if (
                match.boundary is None
                and within.issuperset(hop.device for hop in match.path)
                and not state.router.admits(chain, match.path, "prompts")
                and runs_locally(sequence.tokens, cached, self._limit)
                and self._worth(sequence, match, state.router.along(chain, match.path), best)
            ):
                yield match

    def _record(self, sequence: ScheduledSequence, now: int) -> None:
        """Count a sequence that runs the rest of its prompt where it decodes."""
        state = self._state
        state.counters.local_prefills += 1
        state.counters.local_prefill_tokens += sequence.tokens - sequence.computed
        state.tell.control(
            now, "prefill.local", "UN-18", sequence.path[0].device, seq=sequence.seq,
            left=sequence.tokens - sequence.computed,
        )  # fmt: skip
