"""Run the decode loop: results become tokens, and each sequence's next row goes out with pages on all of its path.

Contract: at most one row of a sequence is under way, predicted ones aside (`scheduler.speculation.in_flight`). When
pages are short, cached prefixes go first, then the sequence of the lowest rank is preempted, or as soon as its row is
back. The first in rank always continues. Sequences that find no pages are `starved` until some are given back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from runtime.kv.pages import groups_for
from runtime.messages import RowsDone, RowsLost, SpeculationResult
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.parts import FREE, NO_FAILURES
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.in_flight import InFlightRow, InFlightRows, Result
from runtime.scheduler.speculation.speculation import Speculation
from runtime.scheduler.state import ClusterState
from runtime.types import FinishReason, PromptLogprobs, Sampled, TokenEvent


class DecodeLoop:
    """`on_rest`: called with a sequence that is moving, before its next row."""

    def __init__(
        self,
        state: ClusterState,
        seating: SequenceLifecycle,
        speculation: Speculation,
        on_rest: Callable[[ScheduledSequence, int], None],
    ) -> None:
        self._state = state
        self._seating = seating
        self._speculation = speculation
        self._on_rest = on_rest

    # -- what comes back -----------------------------------------------------------------------------------------------

    def rows_done(self, done: RowsDone, now: int) -> None:
        """Rows that are through: tokens for whoever asked. Those that go on are `ready`."""
        scores: dict[str, tuple[PromptLogprobs, ...]] = {}
        for part in done.prompts:
            scores[part.seq] = (*scores.get(part.seq, ()), part)
        running, ready, made = self._state.running, self._state.ready, 0
        for at, (seq, epoch, count, sampled) in enumerate(
            zip(done.seqs, done.epochs, done.counts, done.sampled, strict=True)
        ):
            member = running.get(seq)
            if member is None or member.epoch != epoch or not member.flying:
                continue
            if member.predicted is not None:
                member.predicted.tries.back(
                    done.attempts[at] if done.attempts else 0, Result(sampled, scores.get(seq, ()))
                )
                self._advance_predicted(member, now)
                continue
            earlier = done.earlier[at] if done.earlier else ()
            if (count != member.issued or earlier) and not (
                sampled is not None and len(earlier) + 1 == count <= member.issued
            ):
                self._state.tally.failed_steps += 1
                why = f"{done.device} says that it has run {count} tokens, of {member.issued}"
                self._seating.end(member, "error", now, why)
                continue
            member.flying = False
            if (
                sampled is not None and count == 1 and member.phase == "decode"
            ):  # `_advance` for nearly all: one token behind the last
                member.computed += 1
                member.output.append(sampled.token)
                made += 1
                self._emit(member, sampled, (), now)
            else:
                self._advance(member, count, sampled, scores.get(seq, ()), now, earlier)
            if member.path:
                ready.append(member)
        self._state.tally.generated_tokens += made

    def judged(self, verdict: SpeculationResult, now: int) -> None:
        """Predictions have been compared with what they were to be."""
        for at, (seq, epoch, turn) in enumerate(zip(verdict.seqs, verdict.epochs, verdict.attempts, strict=True)):
            member = self._state.running.get(seq)
            if member is None or member.epoch != epoch or member.predicted is None:
                continue
            one = member.predicted.tries.judged(turn, verdict.stands[at])
            if one is not None:
                self._speculation.verified(now, member, one, verdict.cosines[at])
                self._advance_predicted(member, now)

    def rows_lost(self, lost: RowsLost, now: int) -> None:
        """Rows that did not come through: sequences run again, or end with the error of their step."""
        for seq, epoch in zip(lost.seqs, lost.epochs, strict=True):
            member = self._state.running.get(seq)
            if member is None or member.epoch != epoch:
                self._seating.donors.remove_prefix(seq)
                continue
            if lost.retry:
                member.shared.alone = True
                self._seating.preempt(member, now)
            else:
                self._state.tally.failed_steps += 1
                self._seating.end(member, "error", now, lost.reason)

    def _advance_predicted(self, member: ScheduledSequence, now: int) -> None:
        """Take what counts by now of a sequence that is predicted, and send the row behind it from the guess, if there
        is one.
        """
        if member.predicted is None:
            return
        tries = member.predicted.tries
        while tries and (result := tries.first.result) is not None:
            one = tries.pop()
            self._speculation.decided(now, member, one)
            member.flying = len(tries) > 0
            self._advance(member, one.count, result.sampled, result.scores, now)
            if member.seq not in self._state.running:
                return
            if not member.flying:
                self._state.ready.append(member)
                return
            if member.waits.doomed:
                self._seating.preempt(member, now)
                return
            if tries.first.guess != member.output[-1]:
                # At once, whatever holds it: what began from the wrong token is superseded by this, wherever it is (its
                # pages are taken).
                tries.clear()
                self._speculation.redone()
                self._issue(member, now)
        self._guess(member, tries, now)

    def _guess(self, member: ScheduledSequence, tries: InFlightRows, now: int) -> None:
        """Send the row behind the one under way, from the token that was predicted; pages for it must be free."""
        if len(tries) != 1 or member.waits is not FREE:
            return
        tentative = tries.first.tentative
        if tentative is None or tentative.sampled is None or member.would_end(tentative.sampled.token):
            return
        devices, more = self._state.devices, max(0, groups_for(member.spec, member.tokens + 1) - member.pages.groups)
        if any(devices[name].pages.free < pages * more for name, pages in member.place.weights):
            return
        if more:
            self._seating.grow(member, more)
        member.place.passes.tokens += 1
        self._send_predicted(member, tries, (tentative.sampled.token,), True, tentative.sampled.token, now)

    def _advance(
        self,
        member: ScheduledSequence,
        count: int,
        sampled: Sampled | None,
        scores: tuple[PromptLogprobs, ...],
        now: int,
        earlier: Sequence[Sampled] = (),
    ) -> None:
        """K and V of a row are written; its token, if one was sampled, joins the output."""
        tally = self._state.tally
        member.computed += count
        self._seating.show(member)
        if member.phase == "resume":
            tally.resumed_tokens += count
        if scores and not member.output:
            member.prompt_logprobs.extend(scores)
        if sampled is None:
            if member.computed >= member.tokens:
                tally.prompt_tokens += len(member.request.prompt)
                self._seating.end(member, "length", now)
            return
        if not member.output:
            tally.prompt_tokens += len(member.request.prompt)
        fresh = member.computed + 1 - member.tokens  # more than one only behind a decode credit
        member.phase = "decode"
        tally.generated_tokens += fresh
        for one in earlier:
            member.output.append(one.token)
            self._emit(member, one, (), now)
            if member.seq not in self._state.running:
                return  # what a device tells beyond an end is nobody's
        member.output.extend([sampled.token] * (fresh - len(earlier)))
        told = tuple(member.prompt_logprobs)
        if told:
            member.prompt_logprobs.clear()
        self._emit(member, sampled, told, now)

    def _emit(self, member: ScheduledSequence, sampled: Sampled, scores: tuple[PromptLogprobs, ...], now: int) -> None:
        """Tell its latest token, and its end if that is one (as LiveSequence.finish judges)."""
        state, request, token, made = self._state, member.request, sampled.token, len(member.output)
        if member.failures is not NO_FAILURES:
            member.failures, state.changed = NO_FAILURES, True
        reason: FinishReason | None = None
        place = member.place
        if token in place.ends and made >= request.sampling.min_tokens:
            reason = "stop"
        elif made >= place.most:
            reason = "length"
        if state.tell.on:
            state.tell.token(now, request, made - 1, token)
        served = None if member.variant is None else member.variant.name
        state.out.events.append(
            TokenEvent(
                request.seq,
                request.request,
                made - 1,
                token,
                sampled.logprob,
                sampled.top,
                scores,
                reason,
                None,
                served,
            )
        )
        if reason is not None:
            self._seating.end_sequence(member, reason, now)

    # -- what goes out -------------------------------------------------------------------------------------------------

    def go_on_all(self, members: Iterable[ScheduledSequence], now: int) -> None:
        """`go_on` for each that is ready; written out for nearly all of them, which decode and have pages."""
        state, strides = self._state, self._state.config.stride > 1
        starved, tell = state.starved, state.tell
        device: str | None = None
        for member in members:
            if (
                member.phase != "decode" or member.computed >= member.pages.room or member.predicted is not None
                or member.waits is not FREE or member.flying or not member.path or strides
            ):  # fmt: skip
                if member.waits.move:
                    self._on_rest(member, now)
                self.go_on(member, now)
                device = None  # it may have been told something else
                continue
            if member.path[0].device != device:
                device = member.path[0].device
                put = state.out.rows(device).append
            request, output = member.request, member.output
            member.flying, member.issued = True, 1
            member.place.passes.tokens += 1
            if tell.on:
                tell.hops(now, request, member.computed, 1, member.path, member.offered.hops)
            put((request.seq, member.epoch, member.computed, (output[-1],), True, len(output), 1, 0, False))
            if starved:
                starved.pop(request.seq, None)

    def go_on(self, member: ScheduledSequence, now: int) -> None:
        """The next row of a sequence that is at rest, if it runs and nothing holds it."""
        if not member.path or member.flying or member.waits.held:
            return
        starved = self._state.starved
        if member.waits.doomed:
            self._seating.preempt(member, now)
        elif member.waits.paused is not None:
            return
        elif not self._issue(member, now):
            starved[member.seq] = member
        elif starved:
            starved.pop(member.seq, None)

    def feed(self, now: int) -> None:
        """Sequences that wait for pages, in rank order; if nothing else moves, the last one that is paused gives way,
        or of them.
        """
        starved = self._state.starved
        for member in sorted(starved.values(), key=lambda m: m.rank):
            if member.seq in starved:
                self.go_on(member, now)
        if starved and not any(m.flying or m.waits.held for m in self._state.running.values()):
            paused = [m for m in self._state.running.values() if m.waits.paused is not None and m.pages.groups]
            self._seating.preempt(max(paused or starved.values(), key=lambda m: m.rank), now)
            for member in sorted(starved.values(), key=lambda m: m.rank):
                if member.seq in starved:
                    self.go_on(member, now)

    def _issue(self, member: ScheduledSequence, now: int) -> bool:
        """Send its next row; false if there are no pages for it now."""
        state = self._state
        if member.phase == "decode":
            count, steps = 1, self._stride(member)
        else:
            count, steps = min(state.config.prefill_chunk, member.tokens - member.computed), 1
        after = member.computed + count + steps - 1
        if after > member.pages.room:
            more = groups_for(member.spec, after) - member.pages.groups
            if not self._room(member, more, now):
                return False
            self._seating.grow(member, more)
        member.flying, member.issued = True, count + steps - 1
        member.place.passes.tokens += member.issued
        if state.tell.on:
            state.tell.hops(now, member.request, member.computed, count, member.path, member.offered.hops)
        tokens: tuple[int, ...]
        if member.phase == "decode":
            tokens, sample = (member.output[-1],), True
        else:
            tokens, sample = member.span(count), member.computed + count == member.tokens and member.samples
        if member.predicted is None:
            state.out.run_row(member, tokens, steps, sample)
        else:
            self._send_predicted(member, member.predicted.tries, tokens, sample, None, now)
        return True

    def _send_predicted(
        self,
        member: ScheduledSequence,
        tries: InFlightRows,
        tokens: tuple[int, ...],
        sample: bool,
        guess: int | None,
        now: int,
    ) -> None:
        member.turn += 2
        # Where it has to be exact only a token is worth a guess; and what moves is not predicted (UN-13).
        wanted = member.waits.move == 0 and self._speculation.goes_on(member)
        started = wanted and (sample or (member.ahead is not None and member.ahead.threshold is not None))
        one = InFlightRow(member.turn, len(tokens), started, guess)
        tries.add(one)
        self._speculation.started(now, member, one)
        self._state.out.run_row(member, tokens, 1, sample, one)

    def _stride(self, member: ScheduledSequence) -> int:
        stride = self._state.config.stride
        if stride == 1 or len(member.path) > 1:
            return 1
        return max(1, min(stride, member.place.most - len(member.output)))

    def _room(self, member: ScheduledSequence, groups: int, now: int) -> bool:
        """Whether its devices have these pages, perhaps because whoever is last in rank gives way."""
        for name, pages in member.place.weights:
            device = self._state.devices[name]
            while device.pages.free < pages * groups:
                if self._seating.donors.give_way(name):
                    continue
                victim = self._victim(member, name)
                if victim is None:
                    return False
                if victim.flying:
                    victim.doom()
                    return False
                self._seating.preempt(victim, now)
        return True

    def _victim(self, member: ScheduledSequence, device: str) -> ScheduledSequence | None:
        """The last in rank behind `member` with pages on a device; none if one is about to go already."""
        last, rank = None, member.rank
        for other in self._state.devices[device].passing.here.values():
            if other.pages.groups and other.rank > rank and device in dict(other.place.weights):
                if other.waits.doomed:
                    return None
                if last is None or other.rank > last.rank:
                    last = other
        return last
