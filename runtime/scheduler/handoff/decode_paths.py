"""Choose the path on which a sequence decodes: the least loaded one, or by interference (TI-14).

Of nearly equally good paths the one is taken that has more of the sequence's K and V (`present_margin`): less is sent
then, and pages that other sequences use there are not needed again.

Contract: cells are paths that have no device in common, the least loaded one first. The choice is a function of the
scheduler's events: random numbers are digests of sequences' names. It sends nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from runtime.policy.roles.decode_choice import DecodeCell, choose_cell
from runtime.scheduler.handoff.decode_room import NOTHING_PRESENT, DecodeRoom, PresentPages
from runtime.scheduler.handoff.load_reports import DecodeLoad, LoadReports
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState

#: Sequences by which a path with few of them counts as less loaded if it has all K and V of one: less than one.
_LESS_THAN_ONE = 0.4


class DecodePaths:
    """Choices of one scheduler."""

    def __init__(self, state: ClusterState, reports: LoadReports, room: DecodeRoom) -> None:
        self._state, self._reports, self._room = state, reports, room
        config = state.config.decode
        self._rule, self._aged, self._margin = config.choice, config.load_reports_ms > 0, config.present_margin

    def choose(
        self, sequence: ScheduledSequence, able: frozenset[str], loads: Mapping[str, float], tokens: int, now: int
    ) -> tuple[Route | None, set[str]]:
        """Return the path for a sequence, and the devices without room for it that were left out.

        Args:
            able: Devices that it may pass.
            loads: Sequences by device, with those that are on their way.
            tokens: For which room is needed at once, the next one included.
        """
        if self._rule == "load":
            nearer = self._prefer_present(sequence, able, loads)
            return self._state.router.least_loaded(sequence.chain, nearer, sequence.longest, able), set()
        routes = self._cells(sequence, able, loads)
        reports, age = self._reports.read(now)
        present = [self._present(sequence, route, tokens) for route in routes]
        cells = []
        for route, own in zip(routes, present, strict=True):
            there = {name: reports[name] for name in route.devices if name in reports}
            worst = max(there.values(), key=lambda load: load.heavy + load.light, default=None)
            free = min(
                (
                    (load.free + own.spared.get(name, 0)) / load.capacity
                    for name, load in there.items()
                    if load.capacity
                ),
                default=0.0,
            )
            room = (
                self._room_reported(sequence, route, reports, own)
                if self._aged
                else not self._room.short(sequence, route, tokens)
            )
            share = own.tokens / max(tokens - 1, 1)
            cells.append(DecodeCell(worst.heavy if worst else 0, worst.light if worst else 0, free, room, share))
        heavy = self._reports.is_heavy(sequence)
        found = choose_cell(cells, heavy, self._rule, _number(sequence), self._margin)
        short = {name for at in found.beta for name in routes[at].devices}
        if found.chosen is None:
            return None, short
        if self._state.tell.on:
            self._state.tell.control(
                now, "dispatch.candidates", "TI-14", sequence.path[0].device, seq=sequence.seq, heavy=heavy, age=age,
                cells=[list(route.devices) for route in routes], alpha=found.alpha, beta=found.beta, drawn=found.drawn,
                ratios=found.ratios, free=[cell.free for cell in cells], present=[own.tokens for own in present],
                spared=[sum(own.spared.values()) for own in present], chosen=found.chosen,
            )  # fmt: skip
        return routes[found.chosen], short

    def _present(self, sequence: ScheduledSequence, route: Route, tokens: int) -> PresentPages:
        """Return what a path has of a sequence, if that counts."""
        return self._room.present(sequence, route, tokens) if self._margin else NOTHING_PRESENT

    def _prefer_present(
        self, sequence: ScheduledSequence, able: frozenset[str], loads: Mapping[str, float]
    ) -> Mapping[str, float]:
        """Return loads by which, of paths with nearly as many sequences, the one is taken that has more of this one."""
        if self._state.config.prefix_caching == "off" or not self._margin:
            return loads
        marks = sequence.mark()
        nearer = dict(loads)
        for match in self._state.prefixes.matches(sequence.realm, marks, len(marks)):
            if able.issuperset(there := {hop.device for hop in match.path}):
                for name in there:
                    less = max(_LESS_THAN_ONE, self._margin * loads[name]) * match.groups / len(marks)
                    nearer[name] = min(nearer[name], loads[name] - less)
        return nearer

    def _cells(self, sequence: ScheduledSequence, able: frozenset[str], loads: Mapping[str, float]) -> list[Route]:
        routes: list[Route] = []
        router = self._state.router
        while able and (route := router.least_loaded(sequence.chain, loads, sequence.longest, able)) is not None:
            routes.append(route)
            able -= set(route.devices)
        return routes

    def _room_reported(
        self, sequence: ScheduledSequence, route: Route, reports: Mapping[str, DecodeLoad], own: PresentPages
    ) -> bool:
        """Return whether the reports have room for all that a sequence is expected to need, but for what is there."""
        lengths, width = self._state.lengths, sequence.chain.spec.page_tokens
        left = 1 if lengths is None else lengths.most(sequence)
        groups = -(-(sequence.tokens + left) // width)
        return all(
            name in reports and groups * pages - own.spared.get(name, 0) <= reports[name].free
            for name, pages in route.weights
        )


def _number(sequence: ScheduledSequence) -> int:
    """Return a random number of 64 bits that a sequence's name and placement determine."""
    digest = hashlib.blake2b(f"{sequence.seq} {sequence.epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")
