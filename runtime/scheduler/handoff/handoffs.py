"""Hand sequences off from devices that compute contexts to devices that decode (TI-15, TI-19).

    chunk computed -> send_ahead, with the grain `chunk` or `layer`: full pages go while the next chunk is computed
    last chunk sent -> send_ahead, with the grain `layer`: pages of its first layers go while later ones are computed
    first token emitted -> begin: the sequence rests, with its pages -> look: a path that decodes, room there
        -> Migrations.hand_off: pages taken there, K and V copied -> committed: it decodes on that path
        -> no room: it waits, first come first served, or by deadline (`--plan edf|qlm`); what comes later in that order
           does not pass it on the way to the same devices

Contract:
- What lacks room is in `ClusterState.awaited`, so that sequences that begin there do not take what becomes free.
- A sequence that waits has its K and V and pages on the path of its context; each path by which it leaves that one
  (end, abort, preemption, death) removes it here (`remove_sequence`).
- Its first token was emitted before: the time to it does not count the transfer (TI-18).
- With `until_handoff = "decode"` a sequence decodes on the path of its context until then, and is handed off at
  whichever token it has. It takes free pages for that; once there are none, it rests like any other.
- The decode path is chosen here, when the context is computed or its first chunk is, and not on arrival (TI-02): the
  least loaded one, with the hand-offs under way counted.
- A sequence decodes where its context was computed, rather than be lost or shortened: if no decode path that may come
  back can hold it, if a stage of the path cannot be loaded, or after as many failed hand-offs as devices may die.

How K and V travel is decided by `scheduler.migration`.
"""

from __future__ import annotations

from collections import Counter

from runtime.kv.pages import groups_for
from runtime.scheduler.admission.bounding import Bounding
from runtime.scheduler.handoff.decode_paths import DecodePaths
from runtime.scheduler.handoff.decode_room import DecodeRoom
from runtime.scheduler.handoff.load_reports import LoadReports
from runtime.scheduler.migration.migration import Migration
from runtime.scheduler.migration.migrations import Migrations
from runtime.scheduler.routing.route_cache import Route
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class Handoffs:
    """Sequences with a computed context, in the order in which they came, until they decode.

    `order`: is told what finds no room.

    Attributes:
        waiting: Those that wait or are on their way, by name.
    """

    def __init__(
        self, state: ClusterState, seating: SequenceLifecycle, migrations: Migrations, order: Bounding | None = None
    ) -> None:
        self._state, self._order = state, order
        self._seating = seating
        self._migrations = migrations
        self._reports = LoadReports(state, migrations.moves)
        self._room = DecodeRoom(state, migrations, seating.prefix_cache)
        self._paths = DecodePaths(state, self._reports, self._room)
        self.waiting: dict[str, ScheduledSequence] = {}
        self._failures: Counter[str] = Counter()
        self._fresh = False
        migrations.on_end = self._record_end

    def __len__(self) -> int:
        return len(self.waiting)

    @property
    def due(self) -> bool:
        """Whether a sequence waits that could not be handed off before this event."""
        return bool(self.waiting) and (self._fresh or self._state.changed)

    def begin(self, sequence: ScheduledSequence, now: int) -> None:
        """Let a sequence with a computed context wait for its hand-off, unless its path decodes."""
        if self._state.router.admits(sequence.chain, sequence.path, "decodes"):
            self._migrations.give_up(sequence, now, "its devices decode")
            self._decode_here(sequence, now)
            return
        if self._state.config.decode.until_handoff == "rest":
            sequence.awaits_handoff(True)
        self.waiting[sequence.seq] = sequence
        self._fresh = True
        targets = self._migrations.moves.targets(sequence)
        if targets and self._migrations.end_chunks(sequence, now):
            self._state.tell.phase(now, sequence.request, "transfer", targets)

    def send_ahead(self, sequence: ScheduledSequence, now: int) -> None:
        """Send K and V of a computed chunk, or of the last one that is under way, to where the sequence will decode.

        That is chosen with the first of them (TI-14).

        Where there is no room for the whole context now, or a hand-off of it has failed, it goes when all is computed.
        """
        if sequence.waits.move:
            self._migrations.add_chunk(sequence)
        elif not self._failures[sequence.seq]:
            found = self._find(sequence, set(self._state.awaited), sequence.tokens + 1, now)
            if isinstance(found, Route):
                self._start(sequence, found, now, early=True)

    def rests(self, sequence: ScheduledSequence) -> bool:
        """Let a sequence rest until its hand-off, if it has used all free pages where it decodes meanwhile.

        Its next row takes no pages of what computes its context there. Returns whether it rests now.
        """
        if sequence.seq not in self.waiting:
            return False
        if sequence.computed >= sequence.pages.room:
            devices = self._state.devices
            if any(devices[name].pages.free < pages + self._room.slack(name) for name, pages in sequence.place.weights):
                sequence.awaits_handoff(True)
        return sequence.waits.handoff

    def remove_sequence(self, sequence: ScheduledSequence) -> None:
        """Forget a sequence that leaves its devices."""
        self.waiting.pop(sequence.seq, None)
        self._failures.pop(sequence.seq, None)
        if not self.waiting:
            self._state.awaited = frozenset()

    def look(self, now: int) -> None:
        """Hand off all that can go now: in the order in which they came, or by deadline where that orders."""
        self._fresh = False
        full, ones = set[str](), list(self.waiting.values())
        if self._state.order is not None:
            ones.sort(key=self._state.waiting.rank)
        for sequence in ones:
            if not sequence.waits.move:
                self._send(sequence, full, now)
        self._state.awaited = frozenset(full)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _send(self, sequence: ScheduledSequence, full: set[str], now: int) -> None:
        """Start the hand-off of a sequence, let it stay, or let it wait.

        `full`: devices without room for an earlier one.
        """
        found = self._find(sequence, full, sequence.computed + 1, now)
        if isinstance(found, str):
            self._stay(sequence, found, now)
        elif found is not None:
            self._start(sequence, found, now)
        elif self._order is not None:
            chain, router = sequence.chain, self._state.router
            route = router.least_loaded(chain, self._loads(), sequence.longest, router.within(chain, "decodes"))
            if route is not None and not router.lacking(route):
                self._order.block_handoff(sequence, route)

    def _find(self, sequence: ScheduledSequence, full: set[str], tokens: int, now: int) -> Route | str | None:
        """Return where a sequence is to decode; None if there is no room now; in words, why it is to stay where it is.

        Adds the devices without room to `full`. `tokens`: for which room is needed at once.
        """
        state, chain = self._state, sequence.chain
        router, within = state.router, state.router.within(chain, "decodes")
        if within is None or within.issuperset(sequence.place.devices):
            return "its devices decode"
        if sequence.scattered:  # its devices decoded when it came
            return "other devices hold K and V of it"
        if within <= full:
            return None
        loads = self._loads()
        route = router.least_loaded(chain, loads, sequence.longest, within)
        if route is None:
            return None  # those that died come back
        best = router.roomier(chain, route, sequence.longest, within)
        least = min(self._seating.limit_on(sequence, best.path), self._seating.limit_on(sequence, sequence.path))
        if router.holds(best) < groups_for(chain.spec, tokens) or least < self._seating.limit_on(
            sequence, sequence.path
        ):
            return "it has more room here"
        able = within - full
        while able:
            route, short = self._paths.choose(sequence, able, loads, tokens, now)
            full |= short
            able -= short
            if route is None:
                return None
            if (lacking := self._load(sequence, route)) is None:
                return "its stages cannot be loaded there"
            if not lacking and self._seating.limit_on(sequence, route.path) < least:
                lacking = set(route.devices)
            elif not lacking and (lacking := self._room.crowded(sequence, route, tokens)):
                full |= lacking
            if not lacking:
                return route
            able -= lacking
        return None

    def _start(self, sequence: ScheduledSequence, route: Route, now: int, early: bool = False) -> None:
        why, source = self._migrations.hand_off(sequence, route.path, now, early), sequence.path[0].device
        if why is None:
            state, move = self._state, self._migrations.moves.get_move(sequence)
            state.tell.control(
                now, "dispatch.choose", "TI-02", source, seq=sequence.seq, to=route.devices,
                present=0 if move is None else move.present,
            )  # fmt: skip
            if not early:
                state.tell.phase(now, sequence.request, "transfer", route.devices)
            if move is not None:
                self._reports.assign(sequence, route.devices, move.taken_pages)

    def _load(self, sequence: ScheduledSequence, route: Route) -> set[str] | None:
        """Request the stages that a route lacks; return its devices that load, None if one cannot."""
        state, loading = self._state, set[str]()
        for name, stage in state.router.lacking(route):
            if stage in state.devices[name].stages.refused:
                return None
            state.ask_for(sequence.chain, name, stage)
            loading.add(name)
        return loading

    def _loads(self) -> dict[str, float]:
        """Return the sequences of each device, with those that come."""
        loads = dict(self._state.devices.loads)
        for name, count in self._room.bound().items():
            loads[name] += count
        return loads

    def _stay(self, sequence: ScheduledSequence, why: str, now: int) -> None:
        """Let a sequence decode where its context was computed."""
        state = self._state
        self.remove_sequence(sequence)
        sequence.awaits_handoff(False)
        state.tell.control(now, "handoff.none", "TI-19", sequence.path[0].device, seq=sequence.seq, error=why)
        if self._decode_here(sequence, now):
            state.ready.append(sequence)

    def _decode_here(self, sequence: ScheduledSequence, now: int) -> bool:
        """Give a sequence the limit of its path; return False if it has ended by that."""
        sequence.place.most = self._seating.limit_on(sequence, sequence.path)
        self._state.tell.phase(now, sequence.request, "decode", sequence.place.devices)
        if len(sequence.output) < sequence.place.most:
            return True
        self._seating.end(sequence, "length", now)
        return False

    def _record_end(self, move: Migration, committed: bool, now: int) -> None:
        """Record the end of a hand-off: its sequence decodes now, or is to be handed off again."""
        if move.purpose != "handoff":
            return
        sequence, counters = move.sequence, self._state.counters
        if not committed:
            counters.handoffs_aborted += 1
            self._failures[sequence.seq] += not move.crowded
            self._fresh = True
            if sequence.seq in self.waiting and self._failures[sequence.seq] >= self._state.config.max_crashes:
                self._stay(sequence, "too many hand-offs of it have failed", now)
            return
        self.remove_sequence(sequence)
        sequence.awaits_handoff(False)
        counters.handoffs += 1
        counters.handoff_transfers += move.stages
        counters.handoff_bytes += sum(part.last.nbytes for part in move.parts if part.last is not None)
        counters.handoff_present_tokens += move.present
        counters.handoff_ns += now - move.began
        self._state.tell.phase(now, sequence.request, "decode", {hop.device for hop in move.path})
        # Its prompt stays where later prompts can start from it.
        self._seating.show(sequence)
        self._seating.prefix_cache.add_sequence(sequence, now)
