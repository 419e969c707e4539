"""Say which devices lack pages for what a sequence, and those that run there, will still produce (TI-20 to TI-22).

Contract:
- Pages that the sequence takes at once are checked elsewhere, and in any case: this comes on top.
- Pages of hand-offs under way, of cached prefixes that sequences share, and of migrations are not free. Idle cached
  prefixes are (UN-07).
- Pages that sequences of the device share count as taken for good: they stay when one of these ends. Of the sequence
  that is let in, those among them do not count; the rest count as its own.
- A device where nothing runs lacks none, so that a sequence that is expected to need more than it has runs in the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from runtime.policy.roles.reservation import Growth, lasts
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.migration.migration import Moves
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Returns the tokens that a sequence will still produce.
Left = Callable[[ScheduledSequence], int]


class PageReserve:
    """The reservation rule of one scheduler."""

    def __init__(self, state: ClusterState, moves: Moves) -> None:
        self._state, self._moves = state, moves
        self._rule = state.config.decode.admission

    @property
    def reserves(self) -> bool:
        """Whether pages are kept for tokens that sequences will still produce."""
        return self._rule != "greedy" and self._state.lengths is not None

    def lacking_where_it_decodes(self, sequence: ScheduledSequence, route: Route) -> set[str]:
        """Return what `lacking` does, for a route on which a sequence runs its prompt and decodes; else none."""
        if self._rule == "greedy" or not self._state.router.admits(sequence.chain, route.path, "decodes"):
            return set()
        return self.lacking(sequence, route.weights)

    def lacking(
        self, sequence: ScheduledSequence, needs: Iterable[tuple[str, int]], stay: Mapping[str, int] | None = None
    ) -> set[str]:
        """Return the devices of a path on which pages do not last.

        Args:
            needs: Pages per page set, by device.
            stay: Pages with K and V of the sequence that other sequences share there, by device.
        """
        lengths = self._state.lengths
        if lengths is None or self._rule == "greedy":
            return set()
        left = lengths.most if self._rule == "peak" else lengths.least
        found = [(self._state.devices[name], pages) for name, pages in needs if pages]
        return {
            device.name
            for device, pages in found
            if not self._lasts(sequence, device, pages, left, (stay or {}).get(device.name, 0))
        }

    def _lasts(self, sequence: ScheduledSequence, device: Device, pages: int, left: Left, stay: int) -> bool:
        there, taken = [], 0
        for other in device.passing.here.values():
            weight = sum(each for name, each in other.place.weights if name == device.name)
            if weight and other is not sequence:
                shared = self._state.page_accounting.shared_pages(other.pages.holding, device)
                there.append(_growth(other, weight, left, shared))
                taken += weight * other.pages.groups - shared
        for move in self._moves:
            weight = move.pages_on(1).get(device.name, 0)
            if weight and move.sequence is not sequence:
                shared = weight * move.there.groups
                there.append(_growth(move.sequence, weight, left, shared))
                taken += weight * move.groups - shared
        if not there:
            return True
        slack = int(device.pages.capacity * self._state.config.watermark)
        capacity = device.pages.free + device.pages.idle + taken - slack
        return lasts(self._rule, capacity, there, _growth(sequence, pages, left, stay))


def _growth(sequence: ScheduledSequence, pages: int, left: Left, shared: int = 0) -> Growth:
    """Return what a sequence takes, with pages that are begun counted as if they were full to the last token.

    `shared`: pages that it shares, which do not count.
    """
    width = sequence.chain.spec.page_tokens
    return Growth(pages * (sequence.tokens + width - 1) / width - shared, left(sequence), pages / width)
