"""Migrate blocks of running sequences to other devices: K and V first, then the path (BL-16, stages as in Llumnix).

    start --StartMigration--> destination … MigrationReady -> more computed since? --StartMigration--> … MigrationReady
        -> few page sets left: hold the sequence -> its row returns -> StartMigration (the rest) -> MigrationReady
        -> commit: FinishMigration, OpenSequences (keep) on the new path, CloseSequences on devices it leaves

Contract:
- The source serves the sequence until it is held, and keeps its pages until the migration is committed.
- The destination's pages are taken in the page accounts before they are requested.
- Any failure (no room, pages that do not verify, a dead destination) leaves the sequence where it was.
- If the source dies, recomputing continues to the end where it has what it starts from: token ids at the start of a
  chain; elsewhere hidden states that the source kept, if all have arrived.
- Every migration ends in exactly one FinishMigration, MigrationFailed or the death of its destination.
"""

from __future__ import annotations

from collections.abc import Iterator

from runtime.chains import Chain, Hop, Path, devices_of
from runtime.control.trace_events import MoveDetails
from runtime.kv.pages import groups_for
from runtime.messages import FinishMigration, MigrationFailed, MigrationReady, StartMigration
from runtime.policy.migration.cost import MigrationStage as Phase
from runtime.policy.migration.cost import next_stage
from runtime.policy.migration.recompute_source import Front, RecomputeRun, front_of
from runtime.scheduler.migration.estimate import move_seconds, record_move
from runtime.scheduler.migration.migration import Migration, MigrationCounts, Moves, part_of
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


class Migrations:
    """Start, continue, commit and abort migrations. `moves`: those under way."""

    def __init__(self, state: ClusterState, seating: SequenceLifecycle, moves: Moves) -> None:
        self._state = state
        self._seating = seating
        self._number = 0
        self.moves = moves

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
        if any(
            self._state.devices[name].copies
            for name in (*sequence.place.devices, target)
            if self._state.devices.alive(name)
        ):
            return "K and V of the dense executor stay on their device"
        if (
            not sequence.path
            or sequence.waits.move
            or sequence.waits.doomed
            or sequence.swapped is not None
            or sequence.offered.hops
            or not blocks
            or blocks.stop > len(chain.uses)
        ):
            return "the sequence does not run, or is about to go elsewhere"
        before = devices_of(chain, sequence.path)
        if not self._state.devices.alive(target) or {before[at] for at in blocks} != {before[blocks.start]} - {target}:
            return f"{target} is not another living device, or the blocks are not on one"
        part = part_of(chain, blocks, before[blocks.start])
        front = (
            front_of(self._run(sequence, blocks.start, part), copy)
            if recompute
            else Front("none", "only copies were asked for")
        )
        if not copy and front.origin == "none":
            return f"it can only be copied where it goes: {front.reason}"
        path = self._state.router.hops(chain, tuple(target if at in blocks else name for at, name in enumerate(before)))
        if self._seating.shortens(sequence, path):
            return "its answer would have to end sooner there"
        if (lacking := self._lacking(chain, path, part if front.origin != "none" else None, target)) is not None:
            return lacking
        self._number += 1
        move = Migration(self._number, sequence, chain, part, target, path, copy, front)
        if not self._allocate_pages(move, sequence.computed):
            return f"no room for its pages on {target}"
        move.began = now
        move.estimate = move_seconds(
            self._state, sequence, [chain.uses[at] for at in blocks], part.device, target, copy, move.recompute
        )
        self.moves.begin(move)
        self._trace_move(now, "kv.move.start", move)
        self._request_upto(move, sequence.computed)
        if hold:
            sequence.hold(True)
            self._state.starved.pop(sequence.seq, None)
        return None

    # -- answers -------------------------------------------------------------------------------------------------------

    def moved(self, event: MigrationReady, now: int) -> None:
        """Process an answer: all that was requested has arrived.

        Requests what was computed since, holds the sequence for the rest, or commits.
        """
        move = self.moves.get(event.move)
        if move is None:
            return
        move.asked, move.last = False, event
        record_move(self._state, move, event, now)
        sequence = move.sequence
        if sequence.waits.held and not sequence.flying:
            self._finish(move, now)
            return
        config, width = self._state.config, sequence.spec.page_tokens
        grown = sequence.computed - move.upto
        remaining = 0 if grown == 0 else groups_for(sequence.spec, sequence.computed) - move.upto // width
        match next_stage(remaining, move.stages, config.migration_final_sets, config.migration_max_stages):
            case Phase.CONTINUE:
                self._ask_more(move, now)
            case Phase.GIVE_UP:
                self._abort(move, now, "it grows faster than it moves")
            case Phase.FINAL:
                sequence.hold(True)
                if not sequence.flying:
                    self._state.starved.pop(sequence.seq, None)
                    self._finish(move, now)

    def stuck(self, event: MigrationFailed, now: int) -> None:
        """Abort a migration that the destination has given up; nothing of it is left there."""
        move = self.moves.get(event.move)
        if move is not None:
            self._abort(move, now, event.reason, settle=False)

    def at_rest(self, sequence: ScheduledSequence, now: int) -> None:
        """Finish a held migration with no request open, if no row of its sequence is in flight.

        Called when a row returns, and when the sequence resumes after a pause, where its row may still be in flight.
        """
        move = self.moves.get_move(sequence)
        if move is not None and sequence.waits.held and not move.asked and not sequence.flying:
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
            if move.target == device:
                self._abort(move, now, f"{device} is gone", settle=False)
            elif self.survives(move.sequence, device):
                move.orphan = True
                move.sequence.hold(True)
                move.sequence.flying = False
                self._seating.hide(move.sequence)
                self._state.page_accounting.bereft(move.sequence.pages.holding, device)
                move.sequence.bereft(device)
                self._state.starved.pop(move.sequence.seq, None)
                if not move.asked:  # the latest request is answered: there may be no further one
                    self._finish(move, now)

    # -- internals -----------------------------------------------------------------------------------------------------

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
        """Request K and V of the sequence's first `upto` tokens from the destination."""
        sequence = move.sequence
        tokens = sequence.first(upto) if move.front.origin == "tokens" else ()
        move.upto, move.asked, move.stages = upto, True, move.stages + 1
        self._state.out.add_message(
            move.target,
            StartMigration(
                move.number,
                sequence.seq,
                sequence.epoch,
                move.chain.stage(move.part.lo, move.part.hi),
                move.part.layers,
                sequence.spec.page_tokens,
                move.source,
                upto,
                tokens,
                move.copy,
                sequence.device_request,
                move.front.origin == "inputs",
            ),
        )

    def _ask_more(self, move: Migration, now: int) -> None:
        if self._allocate_pages(move, move.sequence.computed):
            self._request_upto(move, move.sequence.computed)
        else:
            self._abort(move, now, f"no room for what has grown on {move.target}")

    def _finish(self, move: Migration, now: int) -> None:
        """Request the rest for a sequence with no row in flight, or commit if nothing is left and there is room."""
        if move.sequence.computed > move.upto:
            self._ask_more(move, now)
        elif self._allocate_pages(move, move.upto):  # a row lost with its device may have taken one page set more
            self._commit(move, now)
        else:
            self._abort(move, now, f"no room for what it holds on {move.target}")

    def _commit(self, move: Migration, now: int) -> None:
        """Move the sequence to the new path. The pages are there before those it leaves are freed."""
        sequence, last = move.sequence, move.last
        self.moves.end_move(move)
        self._state.out.add_message(move.target, FinishMigration(move.number, sequence.seq, sequence.epoch + 1, True))
        self._seating.reseat(sequence, move.path)
        self.moves.counts.committed += 1
        if last is not None:
            self.moves.counts.copied += sum(hi - lo for lo, hi in last.copied)
            self.moves.counts.recomputed += sum(hi - lo for lo, hi in last.recomputed)
            self.moves.counts.nbytes += last.nbytes
            self.moves.counts.inputs += last.activation_bytes
        self._trace_move(now, "kv.meet", move)
        self._state.ready.append(sequence)

    def _abort(self, move: Migration, now: int, why: str, settle: bool = True) -> None:
        """Abort a migration: the sequence stays where it is, or runs again if the source is dead.

        `settle`: whether the destination must be informed.
        """
        sequence = move.sequence
        self.moves.end_move(move)
        self.moves.counts.aborted += 1
        self._trace_move(now, "kv.move.abort", move, why=why)
        if settle:
            self._state.out.add_message(move.target, FinishMigration(move.number, sequence.seq, sequence.epoch, False))
        if move.orphan:
            self._seating.preempt(sequence, now)
        elif not sequence.flying:
            self._state.ready.append(sequence)

    def _trace_move(self, now: int, event: str, move: Migration, why: str | None = None) -> None:
        last = move.last if event == "kv.meet" else None
        told = MoveDetails(
            move.number, move.source, move.target, move.front.origin, move.front.reason, move.front.upstream
        )
        self._state.tell.move(now, event, move.sequence.request, told, last, why)

    def _allocate_pages(self, move: Migration, upto: int) -> bool:
        """Take pages at the destination for `upto` tokens; return False if there is no room."""
        device = self._state.devices[move.target]
        # As many as the sequence holds, so that it can go on from its next row.
        groups = max(groups_for(move.sequence.spec, upto), move.sequence.pages.groups)
        more = (groups - move.groups) * move.pages
        if more > device.pages.free and not self._seating.prefix_cache.make_room({move.target: more}):
            return False
        device.pages.used += max(more, 0)
        move.groups = max(groups, move.groups)
        return True
