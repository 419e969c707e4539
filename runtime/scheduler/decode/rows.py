"""Run the decode loop: turn results into tokens, and send each sequence's next row with pages on all of its path.

Contract:
- At most one row of a sequence is in flight, except predicted ones (`scheduler.speculation.in_flight`).
- When pages are short, `scheduler.decode.page_room` makes room. The first sequence in rank order always continues.
- Sequences that find no pages are `starved` until pages are freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from runtime.kv.pages import groups_for
from runtime.messages import RowsDone, RowsLost, SpeculationResult
from runtime.scheduler.decode.page_room import PageRoom
from runtime.scheduler.lending.lending import Lending
from runtime.scheduler.prefill.prompt_queues import PromptQueues
from runtime.scheduler.residency.residency import Residency
from runtime.scheduler.sequences.lifecycle import SequenceLifecycle
from runtime.scheduler.sequences.parts import FREE, NO_FAILURES
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.in_flight import InFlightRow, InFlightRows, Result
from runtime.scheduler.speculation.speculation import Speculation
from runtime.scheduler.state import ClusterState
from runtime.types import FinishReason, PromptLogprobs, Sampled, TokenEvent


class DecodeLoop:
    """Process results of rows and issue the next ones.

    Args:
        on_rest: Called with a sequence that is in a migration, before its next row is issued.
        on_context: Called with a sequence with a computed context, behind its first token, where roles are apart.
        on_chunk: Called there with one of which another chunk of the context is computed, but not the last; or of which
            the last is on its way, where pages go by layer.
    """

    def __init__(
        self,
        state: ClusterState,
        seating: SequenceLifecycle,
        speculation: Speculation,
        residency: Residency,
        lending: Lending,
        on_rest: Callable[[ScheduledSequence, int], None],
        on_context: Callable[[ScheduledSequence, int], None],
        on_chunk: Callable[[ScheduledSequence, int], None],
        rests: Callable[[ScheduledSequence], bool],
    ) -> None:
        self._state = state
        self._seating = seating
        self._pages, self._recalls = PageRoom(state, seating, residency, lending), lending.recalls
        self._mending = lending.mending
        self._speculation = speculation
        self._on_rest = on_rest
        config = state.config
        self.prompts = (
            None if config.prefill_order == "off"
            else PromptQueues(state, config.prefill_order, config.prefill_window, self._issue_part)
        )  # fmt: skip
        self._on_context, self._on_chunk, self._rests = on_context, on_chunk, rests
        self._early, self._by_layer = config.decode.grain in ("chunk", "layer"), config.decode.grain == "layer"

    # -- results -------------------------------------------------------------------------------------------------------

    def rows_done(self, done: RowsDone, now: int) -> None:
        """Process rows that have passed their last hop: emit tokens, and add sequences that continue to `ready`."""
        scores: dict[str, tuple[PromptLogprobs, ...]] = {}
        for part in done.prompts:
            scores[part.seq] = (*scores.get(part.seq, ()), part)
        running, ready, made = self._state.running, self._state.ready, 0
        for at, (seq, epoch, count, sampled) in enumerate(
            zip(done.seqs, done.epochs, done.counts, done.sampled, strict=True)
        ):
            sequence = running.get(seq)
            if sequence is None or sequence.epoch != epoch or not sequence.flying:
                continue
            if sequence.predicted is not None:
                sequence.predicted.in_flight.back(
                    done.attempts[at] if done.attempts else 0, Result(sampled, scores.get(seq, ()))
                )
                self._advance_predicted(sequence, now)
                continue
            earlier = done.earlier[at] if done.earlier else ()
            if (count != sequence.issued or earlier) and not (
                sampled is not None and len(earlier) + 1 == count <= sequence.issued
            ):
                self._state.counters.failed_steps += 1
                why = f"{done.device} says that it has run {count} tokens, of {sequence.issued}"
                self._seating.end(sequence, "error", now, why)
                continue
            sequence.flying = False
            if (
                sampled is not None and count == 1 and sequence.phase == "decode"
            ):  # the usual case of `_advance`: one decoded token
                sequence.computed += 1
                sequence.output.append(sampled.token)
                made += 1
                self._emit(sequence, sampled, (), now)
            else:
                self._advance(sequence, count, sampled, scores.get(seq, ()), now, earlier)
            if sequence.path:
                ready.append(sequence)
        self._state.counters.generated_tokens += made

    def judged(self, outcome: SpeculationResult, now: int) -> None:
        """Process the outcomes of comparing predictions with the hop's own output."""
        for at, (seq, epoch, attempt) in enumerate(zip(outcome.seqs, outcome.epochs, outcome.attempts, strict=True)):
            sequence = self._state.running.get(seq)
            if sequence is None or sequence.epoch != epoch or sequence.predicted is None:
                continue
            one = sequence.predicted.in_flight.judged(attempt, outcome.stands[at])
            if one is not None:
                self._speculation.verified(now, sequence, one, outcome.cosines[at])
                self._advance_predicted(sequence, now)

    def rows_lost(self, lost: RowsLost, now: int) -> None:
        """Process lost rows: their sequences run again, or end with the error of the step."""
        rows = [each for seq in lost.seqs if (each := self._state.running.get(seq)) is not None]
        known = any(each.lost or each.waits.doomed for each in rows)
        for seq, epoch in zip(lost.seqs, lost.epochs, strict=True):
            sequence = self._state.running.get(seq)
            if sequence is None or sequence.epoch != epoch:
                self._seating.prefix_cache.remove_prefix(seq)
                continue
            if lost.intact and sequence.flying and self._mending.runs_again(sequence, known, now):
                sequence.flying = False
            elif lost.retry:
                sequence.shared.alone = True
                self._seating.preempt(sequence, now, intact=False)
            else:
                self._state.counters.failed_steps += 1
                self._seating.end(sequence, "error", now, lost.reason)

    def _advance_predicted(self, sequence: ScheduledSequence, now: int) -> None:
        """Apply the final results of a predicted sequence, then send the next row from a guess if there is one."""
        if sequence.predicted is None:
            return
        in_flight = sequence.predicted.in_flight
        while in_flight and (result := in_flight.first.result) is not None:
            one = in_flight.pop()
            self._speculation.decided(now, sequence, one)
            sequence.flying = len(in_flight) > 0
            self._advance(sequence, one.count, result.sampled, result.scores, now)
            if sequence.seq not in self._state.running:
                return
            if not sequence.flying:
                self._state.ready.append(sequence)
                return
            if sequence.waits.doomed:
                self._seating.preempt(sequence, now)
                return
            if in_flight.first.guess != sequence.output[-1]:
                # Sent even if the sequence is held: it supersedes the row that began from the wrong token, on every
                # device. Its pages are taken already.
                in_flight.clear()
                self._speculation.redone()
                self._issue(sequence, now)
        self._guess(sequence, in_flight, now)

    def _guess(self, sequence: ScheduledSequence, in_flight: InFlightRows, now: int) -> None:
        """Send the row after the one in flight, from the predicted token, if pages for it are free."""
        if len(in_flight) != 1 or sequence.waits is not FREE:
            return
        tentative = in_flight.first.tentative
        if tentative is None or tentative.sampled is None or sequence.would_end(tentative.sampled.token):
            return
        devices, more = (
            self._state.devices,
            max(0, groups_for(sequence.spec, sequence.tokens + 1) - sequence.pages.groups),
        )
        if any(devices[name].pages.free < pages * more for name, pages in sequence.place.weights):
            return
        if more:
            self._seating.grow(sequence, more)
        sequence.place.path_usage.tokens += 1
        self._send_predicted(sequence, in_flight, (tentative.sampled.token,), True, tentative.sampled.token, now)

    def _advance(
        self,
        sequence: ScheduledSequence,
        count: int,
        sampled: Sampled | None,
        scores: tuple[PromptLogprobs, ...],
        now: int,
        earlier: Sequence[Sampled] = (),
    ) -> None:
        """Record that K and V of a row are written, and append and emit its tokens.

        `earlier`: tokens of a decode credit before `sampled`.
        """
        counters, returned = self._state.counters, sequence.swapped is not None
        sequence.computed += count
        if returned:
            self._state.swapping.end_return(sequence)
        self._seating.show(sequence)
        if sequence.phase == "resume" and not returned:
            counters.resumed_tokens += count
        if scores and not sequence.output:
            sequence.prompt_logprobs.extend(scores)
        if sampled is None:
            if sequence.computed >= sequence.tokens:
                counters.prompt_tokens += len(sequence.request.prompt)
                self._seating.end(sequence, "length", now)
            elif self._early and self._state.devices.roles.apart:
                self._on_chunk(sequence, now)
            return
        if not sequence.output:
            counters.prompt_tokens += len(sequence.request.prompt)
            if (first_ms := sequence.request.ttft_slo_ms) is not None:
                counters.count_objective(now <= sequence.request.arrival + first_ms * 1_000_000)
        fresh = sequence.computed + 1 - sequence.tokens  # more than one only with a decode credit
        whole = sequence.phase != "decode"
        sequence.phase = "decode"
        counters.generated_tokens += fresh
        for one in earlier:
            sequence.output.append(one.token)
            self._emit(sequence, one, (), now)
            if sequence.seq not in self._state.running:
                return  # tokens after the end are dropped
        sequence.output.extend([sampled.token] * (fresh - len(earlier)))
        told = tuple(sequence.prompt_logprobs)
        if told:
            sequence.prompt_logprobs.clear()
        if self._state.order is not None:
            self._state.order.record_first_token(sequence, now)
        self._emit(sequence, sampled, told, now)
        if whole and self._state.devices.roles.apart and sequence.path:
            self._on_context(sequence, now)

    def _emit(
        self, sequence: ScheduledSequence, sampled: Sampled, scores: tuple[PromptLogprobs, ...], now: int
    ) -> None:
        """Emit the latest token of a sequence, and end the sequence if it is the last (see `LiveSequence.finish`)."""
        state, request, token, made = self._state, sequence.request, sampled.token, len(sequence.output)
        if sequence.failures is not NO_FAILURES and not sequence.lost:
            if since := sequence.failures.since:
                state.counters.recoveries += 1
                state.counters.recovery_ns += now - since
            sequence.failures, state.changed = NO_FAILURES, True
        reason: FinishReason | None = None
        place = sequence.place
        if token in place.ends and made >= request.sampling.min_tokens:
            reason = "stop"
        elif made >= place.most:
            reason = "length"
        if state.tell.on:
            state.tell.token(now, request, made - 1, token)
        served = None if sequence.variant is None else sequence.variant.name
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
                sequence.cached if made == 1 else 0,
            )
        )
        if reason is not None:
            self._seating.end_sequence(sequence, reason, now)

    # -- issuing rows --------------------------------------------------------------------------------------------------

    def go_on_all(self, sequences: Iterable[ScheduledSequence], now: int) -> None:
        """Issue the next row of each sequence, as `go_on`, with a fast path for decoding sequences that have pages."""
        state, strides = self._state, self._state.config.stride > 1
        starved, tell = state.starved, state.tell
        device: str | None = None
        for sequence in sequences:
            if (
                sequence.phase != "decode" or sequence.computed >= sequence.pages.room or sequence.predicted is not None
                or sequence.waits is not FREE or sequence.flying or not sequence.path or strides
                or sequence.failures is not NO_FAILURES
            ):  # fmt: skip
                if sequence.waits.move:
                    self._on_rest(sequence, now)
                    self._recalls.at_rest(sequence, now)
                self.go_on(sequence, now)
                device = None  # another command may follow the last rows
                continue
            if sequence.path[0].device != device:
                device = sequence.path[0].device
                put = state.out.rows(device).append
            request, output = sequence.request, sequence.output
            sequence.flying, sequence.issued = True, 1
            sequence.place.path_usage.tokens += 1
            if tell.on:
                tell.hops(now, request, sequence.computed, 1, sequence.path, sequence.offered.hops)
            put((request.seq, sequence.epoch, sequence.computed, (output[-1],), True, len(output), 1, 0, False))
            if starved:
                starved.pop(request.seq, None)
        self.run_prompts(now)

    def go_on(self, sequence: ScheduledSequence, now: int) -> None:
        """Issue the next row of a sequence, if it is on a path, has no row in flight and is not held or paused."""
        if not sequence.path or sequence.flying or sequence.waits.held:
            return
        starved = self._state.starved
        if sequence.waits.doomed:
            self._seating.preempt(sequence, now)
        elif sequence.waits.paused is not None or sequence.waits.skipped or sequence.waits.handoff:
            return
        elif sequence.lost:
            if not self._mend(sequence, now):
                starved[sequence.seq] = sequence
        elif self.prompts is not None and sequence.phase != "decode":
            self.prompts.add(sequence)
        elif self._rests(sequence):
            return
        elif not self._issue(sequence, now):
            starved[sequence.seq] = sequence
        elif starved:
            starved.pop(sequence.seq, None)

    def feed(self, now: int) -> None:
        """Retry sequences that wait for pages, in rank order.

        If no other sequence makes progress, preempt the lowest in rank: a paused or left out one with pages if there
        is any, else a starved one.
        """
        starved = self._state.starved
        for sequence in sorted(starved.values(), key=self._state.waiting.rank):
            if sequence.seq in starved:
                self.go_on(sequence, now)
        self.run_prompts(now)
        if (
            starved
            and not any(m.flying or m.waits.held for m in self._state.running.values())
            and not self._pages.may_come(starved.values(), now)
        ):
            running = self._state.running.values()
            paused = [m for m in running if (m.waits.paused is not None or m.waits.skipped) and m.pages.groups]
            self._seating.preempt(max(paused or starved.values(), key=self._state.waiting.rank), now)
            for sequence in sorted(starved.values(), key=self._state.waiting.rank):
                if sequence.seq in starved:
                    self.go_on(sequence, now)
            self.run_prompts(now)

    def run_prompts(self, now: int) -> None:
        """Send chunks of the prompts that are queued (TI-08), where they are."""
        if self.prompts is not None:
            self.prompts.run(now)

    def _mend(self, sequence: ScheduledSequence, now: int) -> bool:
        """Compute lost page sets of a sequence again; return False if there are no pages for them now."""
        groups = self._mending.wanted(sequence)
        if not self._pages.make(sequence, groups, now):
            return False
        self._state.starved.pop(sequence.seq, None)
        self._mending.start(sequence, groups, now)
        return True

    def _issue_part(self, sequence: ScheduledSequence, tokens: int, now: int) -> bool:
        return self._issue(sequence, now, tokens)

    def _issue(self, sequence: ScheduledSequence, now: int, most: int = 0) -> bool:
        """Send the next row of a sequence; return False if there are no pages for it now.

        `most`: tokens of a prompt in it; 0: `prefill_chunk`.
        """
        state = self._state
        if sequence.phase == "decode":
            count, steps = 1, self._stride(sequence)
        else:
            left = sequence.shared.entered if sequence.computed < sequence.shared.entered else sequence.tokens
            count, steps = min(most or state.config.prefill_chunk, left - sequence.computed), 1
            if state.limits.on:
                count = min(count, state.limits.chunk(sequence.spec, sequence.place.weights))
        after = sequence.computed + count + steps - 1
        if after > sequence.pages.room:
            more = groups_for(sequence.spec, after) - sequence.pages.groups
            if not self._pages.make(sequence, more, now):
                return False
            self._seating.grow(sequence, more)
        sequence.flying, sequence.issued = True, count + steps - 1
        sequence.place.path_usage.tokens += sequence.issued
        if state.tell.on:
            state.tell.hops(now, sequence.request, sequence.computed, count, sequence.path, sequence.offered.hops)
        tokens: tuple[int, ...]
        if sequence.phase == "decode":
            tokens, sample = (sequence.output[-1],), True
        else:
            tokens, sample = sequence.span(count), sequence.computed + count == sequence.tokens and sequence.samples
        if sequence.predicted is None:
            state.out.run_row(sequence, tokens, steps, sample, self._again(sequence, count))
            if self._by_layer and sample and sequence.phase != "decode" and self._goes_on(sequence):
                self._on_chunk(sequence, now)
        else:
            self._send_predicted(sequence, sequence.predicted.in_flight, tokens, sample, None, now)
        return True

    def _again(self, sequence: ScheduledSequence, count: int) -> InFlightRow | None:
        """Return the record of a row that some hops of its path may have run already; None for any other row."""
        if not sequence.failures.again or len(sequence.path) == 1:
            return None
        sequence.attempt += 2
        return InFlightRow(sequence.attempt, count, False)

    def _goes_on(self, sequence: ScheduledSequence) -> bool:
        """Return whether a sequence may be handed off behind its next token."""
        return self._state.devices.roles.apart and len(sequence.output) + 1 < sequence.place.most

    def _send_predicted(
        self,
        sequence: ScheduledSequence,
        in_flight: InFlightRows,
        tokens: tuple[int, ...],
        sample: bool,
        guess: int | None,
        now: int,
    ) -> None:
        sequence.attempt += 2
        # In exact mode only a row that samples can use a prediction. A migrating sequence is not predicted (UN-13).
        wanted = sequence.waits.move == 0 and self._speculation.goes_on(sequence)
        started = wanted and (sample or (sequence.ahead is not None and sequence.ahead.threshold is not None))
        one = InFlightRow(sequence.attempt, len(tokens), started, guess)
        in_flight.add(one)
        self._speculation.started(now, sequence, one)
        self._state.out.run_row(sequence, tokens, 1, sample, one)

    def _stride(self, sequence: ScheduledSequence) -> int:
        stride = self._state.config.stride
        if stride == 1 or len(sequence.path) > 1:
            return 1
        return max(1, min(stride, sequence.place.most - len(sequence.output)))
