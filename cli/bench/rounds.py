"""Run the rounds of a benchmark: open and warm up the targets, alternate between them, and build the document.

Of two targets, the second one starts every other round, so that a machine that slows down affects both equally.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from cli.bench.targets import Access, BenchmarkTarget, EngineTarget, opened
from cli.shared.progress import counting
from runtime.bench.answers import Answer
from runtime.bench.drive import Clock, Done, WallClock, drive
from runtime.bench.summary import Slo, ratios, summarize, typical
from runtime.bench.traces import TraceFormat, read_trace
from runtime.bench.workload import Encode, Workload, WorkloadSettings, build
from zoo.errors import InputError

#: Tokens of a warm-up answer.
_WARM_TOKENS = 4


@dataclass(frozen=True, slots=True)
class BenchmarkRun:
    """The settings of a benchmark.

    Fields:
        targets: One or two addresses or engine names.
        models: Models to request, the most popular first; empty: all.
        trace: File and format of a trace, None without one.
        tokenizer: Stored model with the tokenizer for a trace's texts.
        warm: Uncounted requests per model before the first round.
    """

    targets: tuple[str, ...]
    models: tuple[str, ...]
    workload: WorkloadSettings
    trace: tuple[Path, TraceFormat] | None
    tokenizer: str | None
    slo: Slo
    rounds: int
    warm: int
    access: Access
    inside: EngineTarget


@dataclass(frozen=True, slots=True)
class Round:
    """One target's answers to the whole workload.

    Fields:
        target: Index of the target.
        number: Number of the round.
        seconds: CPU seconds of this process during the round.
    """

    target: int
    number: int
    answers: tuple[Answer, ...]
    seconds: float


def run_bench(bench: BenchmarkRun, silent: bool) -> dict[str, Any]:
    """Run a benchmark and return its document. Raises InputError, Unavailable and the errors of loading."""
    with counting("asking", silent) as progress:
        return asyncio.run(_run(bench, WallClock(), progress))


async def _run(bench: BenchmarkRun, clock: Clock, progress: Done | None) -> dict[str, Any]:
    rows = read_trace(*bench.trace, bench.workload.count) if bench.trace else []
    encode = _encoder(bench)
    async with contextlib.AsyncExitStack() as stack:
        targets: list[BenchmarkTarget] = []
        for name in bench.targets:
            models = targets[0].models if targets else bench.models
            targets.append(await stack.enter_async_context(opened(name, models, clock, bench.access, bench.inside)))
        settings = _bounded(bench.workload, targets)
        workload = build(settings, targets[0].models, rows, encode)
        for target in targets:
            await _warm(target, workload, bench.warm, clock)
        found: list[Round] = []
        try:
            await _rounds(found, bench.rounds, targets, workload, clock, progress)
        except asyncio.CancelledError:  # Ctrl-C: keep the rounds measured so far
            if len(found) < len(targets):
                raise
        return _document(bench, settings, targets, found[: len(found) // len(targets) * len(targets)])


def _encoder(bench: BenchmarkRun) -> Encode | None:
    """Return the function that turns a trace's texts into ids. Raises the errors of `Zoo.model`."""
    if bench.tokenizer is None:
        return None
    from cli.serving.source import tokenizer_of
    from zoo.api import Zoo

    with Zoo(bench.inside.store, bench.inside.database, create=False) as zoo:
        return tokenizer_of(zoo.model(bench.tokenizer)).encode


def _bounded(settings: WorkloadSettings, targets: Sequence[BenchmarkTarget]) -> WorkloadSettings:
    """Return the settings limited to what every target accepts."""
    vocabularies = [target.vocabulary for target in targets if target.vocabulary is not None]
    lengths = [target.longest for target in targets if target.longest is not None]
    longest = min([*lengths, *([settings.longest] if settings.longest is not None else [])], default=None)
    return replace(settings, vocabulary=min([settings.vocabulary, *vocabularies]), longest=longest)


async def _warm(target: BenchmarkTarget, workload: Workload, times: int, clock: Clock) -> None:
    """Send uncounted requests to each model. Raises InputError if none of them is answered."""
    first = {ask.model: ask for ask in reversed(workload.asks)}
    asks = [replace(ask, answer=min(ask.answer, _WARM_TOKENS), at=0.0) for ask in first.values() for _ in range(times)]
    answers = await drive(Workload(tuple(asks)), target.client, clock)
    failed = [answer for answer in answers if answer.error is not None]
    if answers and len(failed) == len(answers):
        raise InputError(
            f"{target.name} answers nothing ({failed[0].error}): {failed[0].heard.detail or 'no reason given'}"
        )


async def _rounds(
    found: list[Round],
    count: int,
    targets: Sequence[BenchmarkTarget],
    workload: Workload,
    clock: Clock,
    progress: Done | None,
) -> None:
    """Run the rounds and append them to `found` as they end."""
    for number in range(count):
        order = list(enumerate(targets))
        for index, target in order if number % 2 == 0 else reversed(order):
            before = len(found) * len(workload.asks)
            done = _counted(progress, before, count * len(targets) * len(workload.asks))
            spent = time.process_time()
            answers = await drive(workload, target.client, clock, done)
            found.append(Round(index, number, tuple(answers), time.process_time() - spent))


def _counted(progress: Done | None, before: int, total: int) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, _: progress(before + done, total)


def _document(
    bench: BenchmarkRun, settings: WorkloadSettings, targets: Sequence[BenchmarkTarget], found: Sequence[Round]
) -> dict[str, Any]:
    from cli.bench.where import where

    found = sorted(found, key=lambda one: (one.number, one.target))
    summaries = [summarize(one.answers, bench.slo) for one in found]
    by_target = [
        [summary for one, summary in zip(found, summaries, strict=True) if one.target == index]
        for index in range(len(targets))
    ]
    document: dict[str, Any] = {
        "benchmark": "zoo bench",
        "seed": settings.seed,
        "workload": asdict(settings),
        "trace": None if bench.trace is None else {"file": bench.trace[0].name, "format": bench.trace[1]},
        "tokenizer": bench.tokenizer,
        "slo_seconds": asdict(bench.slo),
        "rounds": len(found) // len(targets),
        "interrupted": len(found) < bench.rounds * len(targets),
        "warm": bench.warm,
        "engines": {
            **asdict(bench.inside.config.engine()),
            "backend": bench.inside.config.backend,
            "executor": bench.inside.config.executor,
            "batch": bench.inside.batch,
            "resident": bench.inside.resident,
        },
        "where": where(bench.inside.config.device, inside=not all("://" in target.name for target in targets)),
        "targets": [
            {
                "name": target.name,
                "models": list(target.models),
                "memory": dict(target.memory()),
                "typical": typical(own),
            }
            for target, own in zip(targets, by_target, strict=True)
        ],
        "runs": [
            {
                "target": one.target,
                "round": one.number,
                **summary,
                "client_cpu_seconds": _client(one, targets),
                "answers": [_row(answer) for answer in one.answers],
            }
            for one, summary in zip(found, summaries, strict=True)
        ],
    }
    if len(targets) == 2:
        document["ratios"] = ratios(list(zip(*by_target, strict=True)))
    return document


def _client(one: Round, targets: Sequence[BenchmarkTarget]) -> float | None:
    """Return the CPU seconds of the client, None if the engine ran in this process too.

    On the same machine the server does without this time.
    """
    return one.seconds if "://" in targets[one.target].name else None


def _row(answer: Answer) -> dict[str, Any]:
    """Return one request's figures. Times in seconds from the start of its round."""
    return {
        "number": answer.number, "model": answer.model, "due": answer.due, "sent": answer.sent, "ended": answer.ended,
        "prompt_tokens": answer.heard.prompt_tokens, "tokens": answer.tokens, "ttft": answer.ttft, "tpot": answer.tpot,
        "e2e": answer.e2e, "error": answer.error,
    }  # fmt: skip
