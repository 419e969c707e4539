"""Per-model provisioning in virtual time: one model is resident, others are swapped in when asked for. Pure but for
what it is given.

The policy is `cli.bench.batches`': whoever waits longest says which model is next, and all that wait for the same one
go along, up to a batch. What differs is that the batch is made up after the swap, so that those who came meanwhile go
along too: a swap of half a minute would be held against the engine twice otherwise. The time that a swap takes and the
time that a batch takes are told from outside, where they were measured; everything between is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.bench.answers import Answer, TokenTimes
from runtime.bench.workload import WorkloadRequest

#: A model and its batch -> when each request was answered, in seconds from the batch's begin.
Run = Callable[[str, Sequence[WorkloadRequest]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Provisioned:
    """What came of it. `swaps`: how often another model was brought in; `ran`: seconds in batches."""

    answers: tuple[Answer, ...]
    swaps: int
    ran: float


def provision(asks: Sequence[WorkloadRequest], swap: Callable[[str], float], run: Run, most: int) -> Provisioned:
    """Answer `asks`, which are ordered by when they come; the first one's model is there already.

    Args:
        swap: seconds until a model is there.
        most: requests in a batch.
    """
    waiting, answers = list(asks), list[Answer]()
    now, ran, swaps, resident = 0.0, 0.0, 0, asks[0].model if asks else None
    while waiting:
        oldest = waiting[0]
        now = max(now, oldest.at)
        if oldest.model != resident:
            now, resident, swaps = now + swap(oldest.model), oldest.model, swaps + 1
        batch = [ask for ask in waiting if ask.at <= now and ask.model == resident][:most]
        taken = {ask.number for ask in batch}
        waiting = [ask for ask in waiting if ask.number not in taken]
        ended = run(oldest.model, batch)
        answers += [_answered(ask, now + seconds) for ask, seconds in zip(batch, ended, strict=True)]
        now, ran = now + max(ended), ran + max(ended)
    return Provisioned(tuple(sorted(answers, key=lambda answer: answer.number)), swaps, ran)


def answered(asks: Sequence[WorkloadRequest], ended: Sequence[float]) -> list[Answer]:
    """Answers from when they were whole, in seconds from the begin."""
    return [_answered(ask, end) for ask, end in zip(asks, ended, strict=True)]


def _answered(ask: WorkloadRequest, ended: float) -> Answer:
    """Only the end is known: the whole answer counts as one lot then, so times to the first token mean nothing."""
    heard = TokenTimes((ended,), (ask.answer,), ask.answer, len(ask.prompt))
    return Answer(ask.number, ask.model, ask.at, ask.at, ended, heard)
