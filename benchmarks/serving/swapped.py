"""Per-model provisioning in virtual time: one model is resident, the rest are swapped in on demand. Pure.

The policy is that of `cli.bench.batches`: the request that waits longest decides the next model, and waiting requests
for the same model join it, up to a batch. One difference: the batch is formed after the swap, so that requests that
arrive meanwhile join too. Otherwise a swap of half a minute would count twice against the engine.

The durations of swaps and batches are arguments, measured elsewhere; the rest is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from runtime.bench.answers import Answer, TokenTimes
from runtime.bench.workload import WorkloadRequest

#: (model, batch) -> when each request was answered, in seconds from the batch's start.
Run = Callable[[str, Sequence[WorkloadRequest]], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Provisioned:
    """The result of a run.

    Fields:
        swaps: How often a model was swapped in.
        ran: Seconds spent in batches.
    """

    answers: tuple[Answer, ...]
    swaps: int
    ran: float


def provision(asks: Sequence[WorkloadRequest], swap: Callable[[str], float], run: Run, most: int) -> Provisioned:
    """Answer `asks`, which are ordered by arrival. The first one's model is resident at the start.

    Args:
        swap: Seconds until a model is resident.
        most: Requests in a batch.
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
    """Return answers from the times when they were complete, in seconds from the start."""
    return [_answered(ask, end) for ask, end in zip(asks, ended, strict=True)]


def _answered(ask: WorkloadRequest, ended: float) -> Answer:
    """Return an answer of which only the end is known.

    It is one group of tokens, so its time to first token is meaningless.
    """
    heard = TokenTimes((ended,), (ask.answer,), ask.answer, len(ask.prompt))
    return Answer(ask.number, ask.model, ask.at, ask.at, ended, heard)
