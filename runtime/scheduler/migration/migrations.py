"""Migrate blocks of running sequences to other devices: K and V first, then the path (BL-16, stages as in Llumnix).

    start --StartMigration--> destination … MigrationReady -> more computed since? --StartMigration--> … MigrationReady
        -> few page sets left: hold the sequence -> its row returns -> StartMigration (the rest) -> MigrationReady
        -> commit: FinishMigration, OpenSequences (keep) on the new path, CloseSequences on devices it leaves

Contract:
- The source serves the sequence until it is held, and keeps its pages until the migration is committed.
- The destination's pages are taken in the page accounts before they are requested: those that it lacks. The first page
  sets may be there already (`scheduler.migration.places`); they are neither taken nor brought, and stay meanwhile.
- Any failure (no room, pages that do not verify, a dead destination) leaves the sequence where it was.
- If the source dies, recomputing continues to the end where it has what it starts from: token ids at the start of a
  chain; elsewhere hidden states that the source kept, if all have arrived.
- Every part of a migration ends in exactly one FinishMigration, MigrationFailed or the death of its destination.
- In a hand-off (TI-15) all K and V are copied. It may have several parts, each from one device to one other; it is
  committed when all of them have arrived. The sequence rests from the start, or computes its context meanwhile: then
  full pages of each chunk go as soon as it is computed (chunk grain), and the sequence rests for the last of them.
  With layer grain the last ones are requested when the context's last row is sent: sources send the pages of each layer
  once it is written, or all behind the row. So the answer may come before the row's result.
  One that decodes meanwhile (`until_handoff`) rests when few page sets are left, as in a migration, or after as many
  rounds as a migration has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

from runtime.chains import Chain, Hop, Path, devices_of
from runtime.control.trace_events import MoveDetails
from runtime.kv.pages import groups_for
from runtime.messages import FinishMigration, MigrationFailed, MigrationReady
from runtime.policy.migration.cost import MigrationStage as Phase
from runtime.policy.migration.cost import next_stage
from runtime.policy.migration.recompute_source import Front, RecomputeRun, front_of
from runtime.policy.roles.role import PathPhase
from runtime.scheduler.migration.estimate import move_seconds, record_move
from runtime.scheduler.migration.migration import (
    Migration,
    MigrationCounts,
    MovePart,
    Moves,
    crossings,
    part_of,
    sendable,
)
from runtime.scheduler.migration.places import MovePlaces
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class Migrations:
    """Start, continue, commit and abort migrations. `moves`: those under way."""

    def __init__(self, state: ClusterState, seating: SequenceLifecycle, moves: Moves) -> None:
        self._state = state
        self._seating = seating
        self.moves = moves
        self.places = MovePlaces(state, seating.prefix_cache)
        #: Called with each migration that was committed (True) or aborted, before its sequence goes on.
        self.on_end: Callable[[Migration, bool, int], None] = lambda move, committed, now: None

    def __len__(self) -> int:
        return len(self.moves)

    def __iter__(self) -> Iterator[Migration]:
        """Iterate over the migrations under way."""
        return iter(self.moves)

    def counts(self) -> MigrationCounts:
        """Return the totals."""
        return self.moves.totals()

    # -- starting ------------------------------------------------------------------------------------------------------

    def start(
        self,
        sequence: ScheduledSequence,
        blocks: range,
        target: str,
        now: int,
        *,
        copy: bool = True,
        recompute: bool = True,
        hold: bool = False,
    ) -> str | None:
        """Start a migration of blocks of a running sequence; return None, or why it cannot start now.

        Blocks that do not begin the chain can be recomputed only from inputs that their device kept
        (`policy.migration.recompute_source`). Stages that the new path lacks are requested.

        Args:
            sequence: The sequence.
            blocks: Numbers of the blocks in the chain, all on one device now.
            target: The destination.
            now: Time in ns.
            copy: Copy pages from the back.
            recompute: Recompute pages from the front.
            hold: Issue no rows meanwhile (a baseline).
        """
        chain = sequence.chain
        if (why := self._stays(sequence, (target,))) is not None:
            return why
        if not blocks or blocks.stop > len(chain.uses):
            return "the sequence does not run, or is about to go elsewhere"
        before = devices_of(chain, sequence.path)
        if not self._state.devices.alive(target) or {before[at] for at in blocks} != {before[blocks.start]} - {target}:
            return f"{target} is not another living device, or the blocks are not on one"
        hop = part_of(chain, blocks, before[blocks.start])
        front = (
            front_of(self._run(sequence, blocks.start, hop), copy)
            if recompute
            else Front("none", "only copies were asked for")
        )
        if not copy and front.origin == "none":
            return f"it can only be copied where it goes: {front.reason}"
        path = self._state.router.hops(chain, tuple(target if at in blocks else name for at, name in enumerate(before)))
        phase: PathPhase = "decodes" if sequence.phase == "decode" else "prompts"
        if self._state.router.admits(chain, sequence.path, phase) and not self._state.router.admits(chain, path, phase):
            return f"{target} does not run what it does"
        if self._seating.shortens(sequence, path):
            return "its answer would have to end sooner there"
        if (lacking := self._lacking(chain, path, hop if front.origin != "none" else None, target)) is not None:
            return lacking
        parts = self._parts(((hop, target),), front)
        move = Migration(parts[0].number, sequence, chain, parts, path, copy)
        if not self.places.reserve(move, sequence.computed, now):
            return f"no room for its pages on {target}"
        uses = [chain.uses[at] for at in blocks]
        move.estimate = move_seconds(
            self._state, sequence, uses, hop.device, target, copy, move.recompute, move.present
        )
        self._begin(move, now, hold)
        return None

    def hand_off(self, sequence: ScheduledSequence, path: Path, now: int, early: bool = False) -> str | None:
        """Start the hand-off of a sequence to another path; return None, or why it cannot start now (TI-19).

        All stages of the path must be loaded. As many pages are taken as the sequence has and the path lacks. It goes
        on meanwhile unless it waits for its hand-off. `early`: its context is not computed yet; `add_chunk` and
        `end_chunks` follow.
        """
        chain, moved = sequence.chain, crossings(sequence.chain, sequence.path, path)
        targets = {device for _, device in moved}
        if (why := self._stays(sequence, targets)) is not None:
            return why
        if not moved or not all(map(self._state.devices.alive, targets)):
            return "its path does not change, or a device of it is dead"
        if early and not self._sendable(sequence):
            return "no page of it is full"
        parts = self._parts(moved, Front("none", "a hand-off copies"))
        move = Migration(parts[0].number, sequence, chain, parts, path, copy=True, purpose="handoff")
        if not self.places.reserve(move, sequence.tokens if early else sequence.computed, now):
            return "no room for its pages"
        if len(parts) == 1:
            uses = [use for use in chain.uses if parts[0].hop.lo <= use.lo and use.hi <= parts[0].hop.hi]
            move.estimate = move_seconds(
                self._state, sequence, uses, move.source, move.target, True, False, move.present
            )
        self._begin(move, now, hold=sequence.waits.handoff)
        return None

    def add_chunk(self, sequence: ScheduledSequence) -> None:
        """Send what a sequence has computed since, if its hand-off is under way and all before has arrived."""
        move = self.moves.get_move(sequence)
        if move is not None and move.purpose == "handoff" and not move.awaits_answer:
            self._send_chunks(move)

    def end_chunks(self, sequence: ScheduledSequence, now: int) -> bool:
        """Send the rest of a computed context, so that its hand-off is committed; rest if the sequence waits for that.

        Returns False if no hand-off of it is under way.
        """
        move = self.moves.get_move(sequence)
        if move is None or move.purpose != "handoff":
            return False
        if sequence.waits.handoff:
            sequence.hold(True)
        elif not move.awaits_answer and sequence.computed > move.upto:
            self._ask_more(move, now)
        elif not move.awaits_answer:  # all has arrived: it is committed when the sequence goes on
            sequence.hold(True)
        return True

    # -- answers -------------------------------------------------------------------------------------------------------

    def moved(self, event: MigrationReady, now: int) -> None:
        """Process an answer: all that was requested has arrived.

        Requests what was computed since, holds the sequence for the rest, or commits.
        """
        move = self.moves.get(event.move)
        if move is None:
            return
        part = next(each for each in move.parts if each.number == event.move)
        part.asked, part.last = False, event
        record_move(self._state, move, part, event, now)
        if move.awaits_answer:
            return
        sequence = move.sequence
        if sequence.waits.held and not sequence.flying:
            self._finish(move, now)
            return
        if move.early and not sequence.waits.held:
            self._send_chunks(move)
            return
        config, width = self._state.config, sequence.spec.page_tokens
        grown = sequence.computed - move.upto
        remaining = 0 if grown == 0 else groups_for(sequence.spec, sequence.computed) - move.upto // width
        match next_stage(remaining, move.stages, config.migration_final_sets, config.migration_max_stages):
            case Phase.CONTINUE:
                self._ask_more(move, now)
            case Phase.GIVE_UP if move.purpose == "move":
                self._abort(move, now, "it grows faster than it moves")
            case _:
                sequence.hold(True)
                if not sequence.flying:
                    self._state.starved.pop(sequence.seq, None)
                    self._finish(move, now)

    def stuck(self, event: MigrationFailed, now: int) -> None:
        """Abort a migration that the destination has given up; nothing of it is left there."""
        move = self.moves.get(event.move)
        if move is not None:
            # The donor may be what is missing there.
            self._seating.prefix_cache.remove_prefix(move.donor)
            self._abort(move, now, event.reason, {event.move})

    def at_rest(self, sequence: ScheduledSequence, now: int) -> None:
        """Finish a held migration with no request open, if no row of its sequence is in flight.

        Called when a row returns, and when the sequence resumes after a pause, where its row may still be in flight.
        """
        move = self.moves.get_move(sequence)
        if move is not None and sequence.waits.held and not move.awaits_answer and not sequence.flying:
            self._finish(move, now)

    # -- ending --------------------------------------------------------------------------------------------------------

    def give_up(self, sequence: ScheduledSequence, now: int, why: str) -> None:
        """Abort the migration of a sequence, if it is in one; the sequence continues where it is."""
        move = self.moves.get_move(sequence)
        if move is not None:
            self._abort(move, now, why)

    def survives(self, sequence: ScheduledSequence, device: str) -> bool:
        """Return whether a sequence's migration can complete after the death of this device, its source."""
        move = self.moves.get_move(sequence)
        if move is None or not move.recompute or move.source != device:
            return False
        return all(hop.device != device for hop in move.path) and self._state.devices.alive(move.target)

    def remove_device(self, device: str, now: int) -> None:
        """Handle a device's death: abort migrations to it, and continue those from it by recomputing where possible.

        Their sequences are held until the end of the migration.
        """
        for move in self.moves:
            if over := {part.number for part in move.parts if part.target == device}:
                self._abort(move, now, f"{device} is gone", over)
            elif self.survives(move.sequence, device):
                move.orphan = True
                move.sequence.hold(True)
                move.sequence.flying = False
                self._seating.hide(move.sequence)
                self._state.page_accounting.bereft(move.sequence.pages.holding, device)
                move.sequence.bereft(device)
                self._state.starved.pop(move.sequence.seq, None)
                if not move.awaits_answer:  # the latest request is answered: there may be no further one
                    self._finish(move, now)

    # -- internals -----------------------------------------------------------------------------------------------------

    def _stays(self, sequence: ScheduledSequence, targets: Collection[str]) -> str | None:
        """Return why a sequence cannot leave its devices for these now, or None."""
        devices = self._state.devices
        if any(devices[name].copies for name in (*sequence.place.devices, *targets) if devices.alive(name)):
            return "K and V of the dense executor stay on their device"
        if (
            not sequence.path
            or sequence.waits.move
            or sequence.waits.doomed
            or sequence.swapped is not None
            or sequence.offered.hops
        ):
            return "the sequence does not run, or is about to go elsewhere"
        if sequence.scattered:
            return "other devices hold K and V of it"
        return None

    def _parts(self, moved: Sequence[tuple[Hop, str]], front: Front) -> tuple[MovePart, ...]:
        return tuple(MovePart(self.moves.new_number(), hop, target, front) for hop, target in moved)

    def _begin(self, move: Migration, now: int, hold: bool) -> None:
        """Request the K and V of a migration that has its pages."""
        move.began = now
        self.moves.begin(move)
        for part in move.parts:
            self._trace_move(now, "kv.move.start", move, part)
        upto = self._sendable(move.sequence) if move.early else move.sequence.computed
        self._request_upto(move, max(upto, move.present))
        if hold:
            move.sequence.hold(True)
            self._state.starved.pop(move.sequence.seq, None)

    def _run(self, sequence: ScheduledSequence, first: int, part: Hop) -> RecomputeRun:
        """Describe the blocks from number `first` on for `policy.migration.recompute_source`."""
        chain, device = sequence.chain, self._state.devices[part.device]
        use, layers = chain.uses[first], part.layers[1] - part.layers[0]
        hop = next(hop.lo for hop in sequence.path if hop.device == part.device and hop.lo <= part.lo < hop.hi)
        kv_bytes = layers * device.pages.page_bytes / chain.spec.page_tokens
        return RecomputeRun(
            part.lo,
            hop,
            sequence.computed,
            sequence.spec.virtual_tokens > 0,
            device.facts.inputs,
            use.input_bytes,
            kv_bytes,
        )

    def _lacking(self, chain: Chain, path: Path, recomputed: Hop | None, target: str) -> str | None:
        """Request the stages that a path, and recomputing at the target, lack; return an error for one, or None."""
        needed = self._state.router.missing(chain, path)
        if recomputed is not None and not self._state.devices[target].stages.has(
            stage := chain.stage(recomputed.lo, recomputed.hi)
        ):
            needed.append((target, stage))
        for name, stage in needed:
            self._state.ask_for(chain, name, stage)
        return f"{needed[0][1].id} is not loaded on {needed[0][0]} yet" if needed else None

    def _request_upto(self, move: Migration, upto: int) -> None:
        """Request K and V of the sequence's first `upto` tokens from the destinations."""
        move.upto, move.stages = upto, move.stages + 1
        move.as_written = upto > max(move.sequence.computed, move.present)
        for part in move.parts:
            part.asked = True
            self._state.out.add_message(part.target, move.request(part))

    def _sendable(self, sequence: ScheduledSequence) -> int:
        return sendable(sequence, self._state.config.decode.grain == "layer")

    def _send_chunks(self, move: Migration) -> None:
        if (upto := self._sendable(move.sequence)) > move.upto:
            self._request_upto(move, upto)

    def _ask_more(self, move: Migration, now: int) -> None:
        if self.places.allocate(move, move.sequence.computed):
            self._request_upto(move, move.sequence.computed)
        else:
            move.crowded = True
            self._abort(move, now, f"no room for what has grown on {move.target}")

    def _finish(self, move: Migration, now: int) -> None:
        """Request the rest for a sequence with no row in flight, or commit if nothing is left and there is room."""
        if move.sequence.computed > move.upto:
            self._ask_more(move, now)
        elif self.places.allocate(move, move.upto):  # a row lost with its device may have taken one page set more
            self._commit(move, now)
        else:
            self._abort(move, now, f"no room for what it holds on {move.target}")

    def _commit(self, move: Migration, now: int) -> None:
        """Move the sequence to the new path. The pages are there before those it leaves are freed."""
        sequence, counts = move.sequence, self.moves.counts
        self.moves.end_move(move, committed=True)
        for part in move.parts:
            end = FinishMigration(part.number, sequence.seq, sequence.epoch + 1, True)
            self._state.out.add_message(part.target, end)
        self.on_end(move, True, now)
        self._seating.reseat(sequence, move.path, move.there)
        counts.committed += 1
        for last in (part.last for part in move.parts if part.last is not None):
            counts.copied += sum(hi - lo for lo, hi in last.copied)
            counts.recomputed += sum(hi - lo for lo, hi in last.recomputed)
            counts.nbytes += last.nbytes
            counts.inputs += last.activation_bytes
        for part in move.parts:
            self._trace_move(now, "kv.meet", move, part)
        self._state.ready.append(sequence)

    def _abort(self, move: Migration, now: int, why: str, over: Collection[int] = ()) -> None:
        """Abort a migration: the sequence stays where it is, or runs again if the source is dead.

        `over`: the parts of which nothing is left, so that their destinations need not be informed.
        """
        sequence = move.sequence
        self.moves.end_move(move)
        self.moves.counts.aborted += 1
        for part in move.parts:
            self._trace_move(now, "kv.move.abort", move, part, why=why)
            if part.number not in over:
                end = FinishMigration(part.number, sequence.seq, sequence.epoch, False)
                self._state.out.add_message(part.target, end)
        self.on_end(move, False, now)
        if move.orphan:
            self._seating.preempt(sequence, now)
        elif not sequence.flying:
            self._state.ready.append(sequence)

    def _trace_move(self, now: int, event: str, move: Migration, part: MovePart, why: str | None = None) -> None:
        last = part.last if event == "kv.meet" else None
        told = MoveDetails(
            part.number, part.source, part.target, part.front.origin, part.front.reason, part.front.upstream
        )
        cause = "BL-16" if move.purpose == "move" else "TI-15"
        self._state.tell.move(now, event, move.sequence.request, told, last, why, cause)
