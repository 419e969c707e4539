"""Choose the path on which a sequence decodes: the least loaded one, or by interference (TI-14).

Of equally loaded paths the one is taken that has more of the sequence's K and V, as less is sent then.

Contract: cells are paths that have no device in common, the least loaded one first. The choice is a function of the
scheduler's events: random numbers are digests of sequences' names. It sends nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

from runtime.policy.roles.decode_choice import DecodeCell, choose_cell
from runtime.scheduler.handoff.load_reports import DecodeLoad, LoadReports
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: How much less a path counts as loaded that has all of a sequence's K and V: not as much as one sequence.
_LESS_THAN_ONE = 0.4


class DecodePaths:
    """Choices of one scheduler."""

    def __init__(self, state: ClusterState, reports: LoadReports) -> None:
        self._state, self._reports = state, reports
        self._rule, self._aged = state.config.decode.choice, state.config.decode.load_reports_ms > 0

    def choose(
        self,
        sequence: ScheduledSequence,
        able: frozenset[str],
        loads: Mapping[str, float],
        lasts: Callable[[Route], bool],
        now: int,
    ) -> tuple[Route | None, set[str]]:
        """Return the path for a sequence, and the devices without room for it that were left out.

        Args:
            able: Devices that it may pass.
            loads: Sequences by device, with those that are on their way.
            lasts: Returns whether there is room on a path.
        """
        if self._rule == "load":
            nearer = self._prefer_present(sequence, able, loads)
            return self._state.router.least_loaded(sequence.chain, nearer, sequence.longest, able), set()
        routes = self._cells(sequence, able, loads)
        reports, age = self._reports.read(now)
        cells = []
        for route in routes:
            there = [reports[name] for name in route.devices if name in reports]
            worst = max(there, key=lambda load: load.heavy + load.light, default=None)
            free = min((load.free / load.capacity for load in there if load.capacity), default=0.0)
            room = self._room_reported(sequence, route, reports) if self._aged else lasts(route)
            cells.append(DecodeCell(worst.heavy if worst else 0, worst.light if worst else 0, free, room))
        heavy = self._reports.is_heavy(sequence)
        found = choose_cell(cells, heavy, self._rule, _number(sequence))
        short = {name for at in found.beta for name in routes[at].devices}
        if found.chosen is None:
            return None, short
        if self._state.tell.on:
            self._state.tell.control(
                now, "dispatch.candidates", "TI-14", sequence.path[0].device, seq=sequence.seq, heavy=heavy, age=age,
                cells=[list(route.devices) for route in routes], alpha=found.alpha, beta=found.beta, drawn=found.drawn,
                ratios=found.ratios, chosen=found.chosen,
            )  # fmt: skip
        return routes[found.chosen], short

    def _prefer_present(
        self, sequence: ScheduledSequence, able: frozenset[str], loads: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return loads by which, of paths with as many sequences, the one that has more of the sequence is taken."""
        if self._state.config.prefix_caching == "off":
            return loads
        marks = sequence.mark()
        nearer = dict(loads)
        for match in self._state.prefixes.matches(sequence.realm, marks, len(marks)):
            if able.issuperset(there := {hop.device for hop in match.path}):
                for name in there:
                    nearer[name] -= _LESS_THAN_ONE * match.groups / len(marks)
        return nearer

    def _cells(self, sequence: ScheduledSequence, able: frozenset[str], loads: Mapping[str, float]) -> list[Route]:
        routes: list[Route] = []
        router = self._state.router
        while able and (route := router.least_loaded(sequence.chain, loads, sequence.longest, able)) is not None:
            routes.append(route)
            able -= set(route.devices)
        return routes

    def _room_reported(self, sequence: ScheduledSequence, route: Route, reports: Mapping[str, DecodeLoad]) -> bool:
        """Return whether the reports have room for all that a sequence is expected to need."""
        lengths, width = self._state.lengths, sequence.chain.spec.page_tokens
        left = 1 if lengths is None else lengths.most(sequence)
        groups = -(-(sequence.tokens + left) // width)
        return all(name in reports and groups * pages <= reports[name].free for name, pages in route.weights)


def _number(sequence: ScheduledSequence) -> int:
    """Return a random number of 64 bits that a sequence's name and placement determine."""
    digest = hashlib.blake2b(f"{sequence.seq} {sequence.epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
