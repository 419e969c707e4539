"""Keep steps short for urgent sequences that run: rows that can wait are left out (`policy.slo.batch_cap`).

    RowsDone -> `record_step`: learn d(B) -> `review`: what is left out, before the next rows are issued

A sequence that is left out keeps its place and its pages, and goes on when the urgent one has ended. Nothing that can
wait starts on that device if its prompt would take time that the urgent one needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from runtime.messages import RowsDone
from runtime.policy.slo.batch_cap import BatchCap, Claim, cap_batch
from runtime.policy.slo.step_times import StepTimes
from runtime.scheduler.order.deadlines import DeadlineOrder
from runtime.scheduler.order.forecasts import objective_for
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState


@dataclass(slots=True)
class _DeviceSteps:
    """What is known of a device: its step times, its latest step, and what is left out there."""

    times: StepTimes = field(default_factory=StepTimes)
    ended: int = 0
    seqs: frozenset[str] = frozenset()
    cap: BatchCap = BatchCap()


class BatchCaps:
    """The batch caps of one scheduler."""

    def __init__(self, state: ClusterState, order: DeadlineOrder) -> None:
        self._state, self._order = state, order
        self._devices: dict[str, _DeviceSteps] = {}
        self._due: set[str] = set()

    def record_step(self, done: RowsDone, now: int) -> None:
        """Learn from a step's rows, after they have been processed; the device is due for a review."""
        known = self._devices.setdefault(done.device, _DeviceSteps())
        seqs = frozenset(done.seqs)
        # Only a step behind another one, with a row of it, took the time between the two.
        if seqs and not known.seqs.isdisjoint(seqs) and self._decodes_only(done):
            known.times.add(len(seqs), (now - known.ended) / max(1, *done.counts))
            self._order.quickest[done.device] = known.times.at(1 + self._urgent(done.device))
        known.ended, known.seqs = now, seqs
        self._due.add(done.device)

    def review(self, now: int) -> None:
        """Choose what is left out on the devices that are due, and let go on what no longer is."""
        due, self._due = self._due, {name for name, each in self._devices.items() if each.cap.until}
        for name in sorted(due):
            known = self._devices[name]
            before, known.cap = known.cap, self._cap(name, known, now)
            if before.left_out or known.cap.left_out:
                self._apply(before.left_out, known.cap.left_out)
            # What waits may start now; while an urgent one runs, ticks look whether it has time.
            self._state.changed |= (before.until > 0 and not known.cap.until) or (
                bool(before.left_out) and not known.cap.left_out
            )

    def holds_back(self, sequence: ScheduledSequence, devices: Iterable[str], now: int) -> bool:
        """Return whether a waiting sequence can wait, and an urgent one on its devices has no time for its prompt."""
        here = [self._devices[name] for name in devices if name in self._devices]
        prompt = self._order.context(sequence, sequence.tokens)
        tight = [each.cap.until for each in here if each.cap.spare is not None and each.cap.spare < prompt]
        if tight and max(tight) + self._order.longest(sequence) <= sequence.rank.order:
            return True
        for each in here:
            if each.cap.spare is not None:  # what starts now takes of it, until the next review
                each.cap = replace(each.cap, spare=max(each.cap.spare - prompt, 0))
        return False

    def _cap(self, device: str, known: _DeviceSteps, now: int) -> BatchCap:
        here = self._state.devices[device].passing.here.values()
        if not known.times.known or not any(objective_for(each) is not None for each in here):
            return BatchCap()
        claims = [self._claim(each) for each in here if each.waits.paused is None and not each.waits.doomed]
        return cap_batch(claims, known.times.at, known.times.excess, now)

    def _claim(self, each: ScheduledSequence) -> Claim:
        left = each.tokens - each.computed
        context = self._order.context(each, left) if each.phase != "decode" else 0
        objective, due = objective_for(each), max(each.rank.order, self._order.due_of(each))
        steps = 1 if objective is not None and objective.first_token else self._order.forecasts.most_tokens(each)
        return Claim(each.seq, due, steps, context, objective is not None)

    def _apply(self, before: frozenset[str], left_out: frozenset[str]) -> None:
        running = self._state.running
        for seq in sorted(before - left_out):
            if seq in running:
                running[seq].leave_out(False)
                if not running[seq].flying:
                    self._state.ready.append(running[seq])
        for seq in left_out - before:
            running[seq].leave_out(True)
            self._state.starved.pop(seq, None)

    def _decodes_only(self, done: RowsDone) -> bool:
        """Return whether neither this step had a prompt's tokens nor one is on its way there."""
        here = self._state.devices[done.device].passing.here
        return max(done.counts) <= self._state.config.stride and all(each.phase == "decode" for each in here.values())

    def _urgent(self, device: str) -> int:
        here = self._state.devices[device].passing.here
        return sum(objective_for(each) is not None for each in here.values())
