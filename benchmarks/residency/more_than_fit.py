"""Compare ways to serve more models than fit a device: shared blocks, whole models, transformers models.

    python -m benchmarks.residency.more_than_fit FOLDER STORE [--full 40] [--lora 40] [--fit 5] [--requests 160]
        [--clients 8] [--rate R] [--rounds 2] [--prompt 64] [--answer 32] [--pages 256MiB] [--side NAME]...
        [--loop closed|open] [--own FILE] [--output FILE]

FOLDER is a Llama checkpoint; STORE is filled with fine-tunes of it (`benchmarks.residency.family`). The device has
room for the weights of `--fit` whole models; requests choose a model by Zipf's law with exponent 1, full fine-tunes
and LoRAs in turn. The sides (`benchmarks.residency.sides`) take turns, each round first with a fixed number of clients
(closed loop), then with Poisson arrivals at `--rate` (open loop; default: 0.8 of what whole models answered in the
first closed loop). Every answer of the runtime is compared with the one of its model alone in an engine; `--own` keeps
those in a file for later runs with the same requests.

Printed, per side and loop: throughput and latency, medians over rounds, with the processor time of this process, which
other processes change little; per side: the account of the device's weights
(`benchmarks.residency.ledger`) beside the scheduler's own count, with the most rows of a step and the preemptions;
ratios of the first side to each other one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from benchmarks.residency.family import make
from benchmarks.residency.sides import OURS, DeviceMemory, OpenSide, SideName, opened, own_answers
from cli.serving.options import ServeOptions
from cli.shared.sizes import size_of
from runtime.bench.arrivals import Arrivals
from runtime.bench.drive import WallClock, drive
from runtime.bench.lengths import Lengths
from runtime.bench.summary import Slo, summarize
from runtime.bench.workload import Workload, WorkloadRequest, WorkloadSettings, build
from runtime.engine.catalog.held_bytes import HeldBytes, form_of
from zoo.api import Zoo

SIDES: tuple[SideName, ...] = ("blocks", "shared", "models", "transformers")
LOOPS = ("closed", "open")
#: Load of the open loop, as a share of what whole models answer in a closed one.
_LOAD = 0.8
#: The document's figures of a loop, and where they are in a summary.
_FIGURES = {
    "requests_per_second": ("requests_per_second",),
    "p50": ("e2e", "median"),
    "p95": ("e2e", "p95"),
    "ttft_p50": ("ttft", "median"),
    "processor_seconds": ("processor_seconds",),
}


@dataclass(frozen=True, slots=True)
class FitSetting:
    """What is measured.

    Fields:
        fit: Number of whole models that the device has room for.
        rate: Requests per second of the open loop; None: by the load that whole models take.
        loops: Which loops run; an open one alone needs a rate.
        own: File of the models' own answers, read if it has those of these requests, else written.
    """

    names: tuple[str, ...]
    fit: int
    workload: WorkloadSettings
    rate: float | None
    rounds: int
    pages: int
    sides: tuple[SideName, ...] = SIDES
    own: Path | None = None
    loops: tuple[str, ...] = LOOPS


def measure(store: Path, setting: FitSetting) -> dict[str, Any]:
    """Run all sides and return the document."""
    clock, room = WallClock(), room_for(store, setting.names, setting.fit, setting.pages)
    closed = build(setting.workload, setting.names)
    rate = setting.rate
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = {
        name: {loop: [] for loop in setting.loops} for name in setting.sides
    }
    wrong: dict[str, int] = dict.fromkeys(setting.sides, 0)
    own = kept_answers(store, closed.asks, setting, clock)
    with ExitStack() as stack:
        sides = [stack.enter_context(opened(name, store, setting.names, room, clock)) for name in setting.sides]
        for side in sides:
            _warm(side, closed, clock)
        for number in range(setting.rounds):
            turns = sides if number % 2 == 0 else sides[::-1]
            for side in turns if "closed" in setting.loops else ():
                found[side.name]["closed"].append(_run(side, closed, clock))
                wrong[side.name] += differing(side, own)
            if "open" not in setting.loops:
                continue
            if rate is None:
                slowest = "models" if "models" in found else sides[-1].name
                rate = _LOAD * found[slowest]["closed"][0]["requests_per_second"]
            arriving = poisson(setting.workload, setting.names, rate)
            for side in turns:
                found[side.name]["open"].append(_run(side, arriving, clock))
                wrong[side.name] += differing(side, own)
        accounts = {side.name: _account(side) for side in sides if side.ledger is not None}
    compared = len(setting.loops) * setting.rounds * len(own)
    return {
        "models": len(setting.names), "fit": setting.fit, "budget": room.weights, "rounds": setting.rounds,
        "requests": len(closed.asks), "clients": setting.workload.clients, "rate": rate,
        "answers": {name: {"compared": compared, "other": wrong[name]} for name in wrong},
        "figures": {name: {loop: typical(runs) for loop, runs in loops.items()} for name, loops in found.items()},
        "errors": {name: _errors(loops) for name, loops in found.items()},
        "memory": accounts,
        "ratios": {name: ratios(found[setting.sides[0]], found[name]) for name in setting.sides[1:]},
        "runs": found,
    }  # fmt: skip


def kept_answers(
    store: Path, asks: Sequence[WorkloadRequest], setting: FitSetting, clock: WallClock
) -> dict[int, tuple[int, ...]]:
    """Return `own_answers`, from the setting's file if it has them."""
    key = [[ask.number, ask.model, list(ask.prompt), ask.answer] for ask in asks]
    if setting.own is not None and setting.own.exists():
        known = json.loads(setting.own.read_text())
        if known["asks"] == key:
            return {int(number): tuple(tokens) for number, tokens in known["answers"].items()}
    found = own_answers(store, asks, setting.pages, clock)
    if setting.own is not None:
        setting.own.write_text(json.dumps({"asks": key, "answers": found}))
    return found


def room_for(store: Path, names: Sequence[str], fit: int, pages: int) -> DeviceMemory:
    """Return the room of a device for so many of the largest model, as the engine holds it."""
    form, whole = form_of(ServeOptions().engine()), 0
    with Zoo(store, create=False) as zoo:
        for manifest in (zoo.model(name).manifest for name in names):
            held, components = HeldBytes(manifest, form), [placed.component for placed in manifest.components]
            whole = max(whole, held.weights(components) + held.adapters(components))
    return DeviceMemory(fit, fit * whole, pages)


def poisson(settings: WorkloadSettings, names: Sequence[str], rate: float) -> Workload:
    """Return the same requests with Poisson arrivals."""
    return build(replace(settings, clients=None, arrivals=Arrivals(rate)), names)


def differing(side: OpenSide, own: Mapping[int, tuple[int, ...]]) -> int:
    """Return how many answers of a side are not the models' own."""
    return sum(side.answers.get(number) != answer for number, answer in own.items())


def typical(runs: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each figure over runs."""
    return {name: statistics.median(_figure(run, path) for run in runs) for name, path in _FIGURES.items()}


def ratios(
    ours: Mapping[str, Sequence[Mapping[str, Any]]], other: Mapping[str, Sequence[Mapping[str, Any]]]
) -> dict[str, dict[str, list[float]]]:
    """Return, per loop and figure, ours over the other side's for each round."""
    return {
        loop: {
            name: [_figure(a, path) / _figure(b, path) for a, b in zip(runs, other[loop], strict=True)]
            for name, path in _FIGURES.items()
        }
        for loop, runs in ours.items()
    }


def _figure(run: Mapping[str, Any], path: Sequence[str]) -> float:
    value: Any = run
    for key in path:
        value = value[key]
    return float(value)


def _run(side: OpenSide, workload: Workload, clock: WallClock) -> Mapping[str, Any]:
    side.answers.clear()
    before = time.process_time()
    summary = {**summarize(asyncio.run(drive(workload, side.client, clock)), Slo())}
    summary["processor_seconds"] = time.process_time() - before
    loop = "open" if workload.clients is None else "closed"
    took, busy = summary["seconds"], summary["processor_seconds"]
    print(
        f"{side.name}, {loop}: {summary['completed']} answers in {took:.1f} s, {busy:.1f} s of processors",
        file=sys.stderr,
    )
    return summary


def _warm(side: OpenSide, workload: Workload, clock: WallClock) -> None:
    """Answer a quarter of the requests, so that what is loaded is what the popularity makes it."""
    _run(side, replace(workload, asks=workload.asks[-max(1, len(workload.asks) // 4) :]), clock)


def _errors(loops: Mapping[str, Sequence[Mapping[str, Any]]]) -> int:
    return sum(run["requests"] - run["completed"] for runs in loops.values() for run in runs)


def _account(side: OpenSide) -> Mapping[str, int]:
    return {
        "loaded": side.loaded_bytes(),
        "preemptions": side.preemptions(),
        **({} if side.ledger is None else side.ledger.document()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--full", type=int, default=40)
    parser.add_argument("--lora", type=int, default=40)
    parser.add_argument("--fit", type=int, default=5, help="whole models that fit the device")
    parser.add_argument("--requests", type=int, default=160)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--rate", type=float)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--answer", type=int, default=32)
    parser.add_argument("--pages", default="256MiB", help="size of the KV cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--side", choices=(*OURS, "transformers"), action="append")
    parser.add_argument("--loop", choices=LOOPS, action="append", help="default: both")
    parser.add_argument("--own", type=Path, help="file of the models' own answers")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    workload = WorkloadSettings(
        count=given.requests, seed=given.seed, clients=given.clients, prompts=Lengths("fixed", given.prompt),
        answers=Lengths("fixed", given.answer), popularity="skewed", zipf=1.0,
    )  # fmt: skip
    if given.loop == ["open"] and given.rate is None:
        parser.error("an open loop alone needs --rate")
    names = make(given.folder, given.store, given.full, given.lora)
    sides = tuple(given.side or SIDES)
    setting = FitSetting(
        names, given.fit, workload, given.rate, given.rounds, size_of(given.pages), sides, given.own,
        tuple(given.loop or LOOPS),
    )  # fmt: skip
    deliver(measure(given.store, setting), given.output)


if __name__ == "__main__":
    main()
