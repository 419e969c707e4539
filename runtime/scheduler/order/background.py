"""Let lines of batches run in what interactive sequences leave of each step (`policy.slo.background`).

    RowsDone -> `record_step`: learn step times -> `review`: which background rows are in the next step
    admission -> `holds_back`: a background prompt begins where the next step has time for it
    ExpectRequest -> `expect_request`: no step of the background alone begins until that request has come, or does not;
        where requests are announced without end, one begins after a while

Background are the sequences with a priority of `types.BACKGROUND` and more. One that is left out of steps keeps its
place and its pages. While there are none, only some steps are looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from runtime.messages import RowsDone
from runtime.policy.slo.background import Background, StepCosts
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.state import ClusterState
from runtime.types import BACKGROUND

#: Time in ns for which a request may be prepared before lines go on without it.
_EXPECTED = 50_000_000
#: Time in ns after the last background sequence until which every step is measured; then one of so many.
_AFTER, _SAMPLE = 60_000_000_000, 16


@dataclass(slots=True)
class _DeviceShare:
    """What is known of a device.

    Fields:
        interactive: Those that ran at the latest review.
        held: Least time of a prompt that was held back since the last step; None where none was.
        spare: Time that prompts may still take in the next step; None: any.
        lines: Background sequences that may run in the next step.
        waits: Since when the background alone has waited for announced requests; None: it has run since.
    """

    share: Background
    costs: StepCosts = field(default_factory=StepCosts)
    ended: int = 0
    seqs: frozenset[str] = frozenset()
    interactive: dict[str, ScheduledSequence] = field(default_factory=dict)
    held: float | None = None
    spare: float | None = None
    lines: set[str] = field(default_factory=set)
    waits: int | None = None


class BackgroundRows:
    """The background rows of one scheduler. `share`: see `policy.slo.background.Background`."""

    def __init__(self, state: ClusterState, share: float) -> None:
        self._state, self._share = state, share
        self._devices: dict[str, _DeviceShare] = {}
        self._due: set[str] = set()
        self._until = self._steps = 0
        #: By request: when it was announced, and when those of them came that may not be on a device yet.
        self._expected: dict[str, int] = {}
        self._came: dict[str, int] = {}

    def record_step(self, done: RowsDone, now: int) -> None:
        """Learn from a step's rows, after they have been processed; the device is due for a review."""
        known = self._known(done.device)
        seqs = frozenset(done.seqs)
        sampled = now <= self._until or not known.costs.known or self._steps % _SAMPLE == 0
        self._steps += 1
        # Only a step behind another one, with a row of it, took the time between the two.
        if sampled and seqs and not known.seqs.isdisjoint(seqs):
            self._learn(known.costs, done, now - known.ended)
        known.ended, known.seqs = now, seqs
        for each in self._devices.values():  # all on the path
            if each.waits is not None and not each.lines.isdisjoint(seqs):
                each.waits = None
        if sampled:
            self._due.add(done.device)

    def expect_request(self, request: str, comes: bool, now: int) -> None:
        """Record that an interactive request is being prepared, or that one that was does not come."""
        if not comes and request in self._expected:
            self._drop_expected([request])
        elif comes and now <= self._until:
            self._expected[request] = now

    def record_arrival(self, request: str, now: int) -> None:
        """Record that a request has come; it is admitted behind the review of the same event."""
        if request in self._expected:
            self._came[request] = now

    def review(self, now: int) -> None:
        """Choose the background rows of the next step on the devices that are due."""
        if self._came:
            self._drop_expected([request for request, at in self._came.items() if at < now])
        due, self._due = self._due, set()
        soon = bool(self._expected) and self._waits([name for name in due if self._is_alone(name)], now)
        for name in sorted(due):
            known, here = self._devices[name], self._state.devices[name].passing.here
            self._note_stays(known, here.values(), now)
            background = [each for each in here.values() if is_background(each)]
            if background:
                self._until = now + _AFTER
            known.lines = {each.seq for each in background}
            decoding = [each for each in background if each.phase == "decode" and not each.waits.handoff]
            prompts = [each for each in background if each.phase != "decode"]
            costs = [self._prompt(known, each) for each in prompts]
            beside = [each for each in self._interactive(name) if _is_active(each)]
            if not known.costs.known:
                rows, known.spare = (0, 0.0) if beside else (len(decoding), None)
            else:
                waits = costs if known.held is None else [*costs, known.held]
                least, step = min(waits, default=None), known.costs.step
                got = known.share.next_step(len(beside), len(decoding), least, step, now, soon)
                rows, known.spare = got.rows, got.spare
            if soon and not beside:
                known.seqs = frozenset()  # the time until the next step is not that of the step
            decoding.sort(key=self._state.waiting.rank)
            for at, each in enumerate(decoding):
                self._let_run(each, at < rows)
            for each, cost in zip(prompts, costs, strict=True):
                free = len(here) == len(background) and not soon
                self._let_run(each, free or self._pays(known, cost))
            if known.held is not None and (known.spare is None or known.held <= known.spare):
                known.held, self._state.changed = None, True

    def review_all(self, now: int) -> None:
        """Review all devices with sequences next, and no longer expect what was announced too long ago.

        No rows return where an interactive one is paused, or where a background one that was left out was moved to.
        """
        self._drop_expected([request for request, since in self._expected.items() if now - since > _EXPECTED])
        if self._expected and any(map(partial(_has_waited, now=now), self._devices.values())):
            self._state.changed = True
        self._make_due()

    def holds_back(self, sequence: ScheduledSequence, devices: Iterable[str], now: int) -> bool:
        """Return whether a waiting sequence is of the background, and the next step has no time for its prompt."""
        if not is_background(sequence):
            return False
        self._until = now + _AFTER
        names = tuple(devices)
        if self._expected and self._waits([name for name in names if self._is_alone(name, sequence)], now):
            return True
        for name in names:
            known, here = self._known(name), self._state.devices[name].passing.here
            cost = self._prompt(known, sequence)
            if not here:  # nothing runs, so that no step was reviewed: one always begins
                share = known.share.next_step(0, 0, None, known.costs.step, now)
                known.spare = None if share.spare is None or not known.costs.known else max(share.spare, cost)
            elif any(each.seq not in known.interactive for each in self._interactive(name)):
                known.spare = 0.0  # an interactive one has come since
            if not self._pays(known, cost):
                known.held = cost if known.held is None else min(known.held, cost)
                return True
            known.lines.add(sequence.seq)
        return False

    def _is_alone(self, device: str, waiting: ScheduledSequence | None = None) -> bool:
        """Return whether the background is on a device, or waits for it, and no steps run there for other sequences."""
        here = self._state.devices[device].passing.here
        lines = waiting is not None or any(map(is_background, here.values()))
        return lines and not any(_is_active(each) for each in self._interactive(device))

    def _interactive(self, device: str) -> Iterator[ScheduledSequence]:
        here = self._state.devices[device].passing.here
        return (each for each in here.values() if not is_background(each))

    def _waits(self, alone: Sequence[str], now: int) -> bool:
        """Return whether the background of devices waits for a request that is announced.

        Not for ever: requests may come one after the other, or none of them at all.
        """
        devices = [self._known(name) for name in alone]
        for known in devices:
            known.waits = now if known.waits is None else known.waits
        return bool(devices) and not any(_has_waited(known, now) for known in devices)

    def _make_due(self) -> None:
        for device in self._state.devices:
            if device.passing.here:
                self._known(device.name)
                self._due.add(device.name)

    def _drop_expected(self, requests: Sequence[str]) -> None:
        """Expect some requests no longer; where it is none any more, let the background go on."""
        for request in requests:
            del self._expected[request]
            self._came.pop(request, None)
        if requests and not self._expected:
            self._state.changed = True
            self._make_due()

    def _learn(self, costs: StepCosts, done: RowsDone, elapsed: int) -> None:
        rows, stride, most = len(done.seqs), self._state.config.stride, max(done.counts)
        if stride == 1:
            costs.add(rows, sum(done.counts) - rows, elapsed)
        elif most <= stride:  # so many steps in one; with a prompt it is not known how many
            costs.add(rows, 0, elapsed // most)

    def _known(self, device: str) -> _DeviceShare:
        if device not in self._devices:
            self._devices[device] = _DeviceShare(Background(self._share))
        return self._devices[device]

    def _prompt(self, known: _DeviceShare, sequence: ScheduledSequence) -> float:
        tokens = min(sequence.tokens - sequence.computed, self._state.config.prefill_chunk)
        return known.costs.prompt(tokens)

    def _pays(self, known: _DeviceShare, cost: float) -> bool:
        """Take the time of a prompt from what is spare; return whether there was enough."""
        if known.spare is None:
            return True
        if cost > known.spare:
            return False
        known.spare -= cost
        known.share.pay(cost)
        return True

    def _note_stays(self, known: _DeviceShare, here: Iterable[ScheduledSequence], now: int) -> None:
        present = {each.seq: each for each in here if not is_background(each)}
        for seq in [seq for seq in known.interactive if seq not in present]:
            each = known.interactive[seq]
            begin = known.costs.prompt(len(each.request.prompt))
            known.share.record_stay(begin + len(each.output) * known.costs.step(1), now)
        known.interactive = present

    def _let_run(self, each: ScheduledSequence, runs: bool) -> None:
        """Issue a sequence's rows, or leave it out of the next step."""
        if runs == (not each.waits.behind):
            return
        each.stay_behind(not runs)
        if runs and not each.flying:
            self._state.ready.append(each)
        elif not runs:
            self._state.starved.pop(each.seq, None)


def is_background(sequence: ScheduledSequence) -> bool:
    """Return whether a sequence is of the lowest class."""
    return sequence.rank.priority >= BACKGROUND


def _has_waited(known: _DeviceShare, now: int) -> bool:
    """Return whether the background of a device has waited for announced requests for long enough."""
    return known.waits is not None and now - known.waits > _EXPECTED


def _is_active(sequence: ScheduledSequence) -> bool:
    """Return whether steps run for a sequence: it is neither paused nor left out of them."""
    waits = sequence.waits
    return waits.paused is None and not (waits.skipped or waits.handoff)
