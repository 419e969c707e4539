"""Measure requests for more models than fit, in turn: strict FCFS, EDF, and planned orders of groups (QLM, 8.1).

    python -m benchmarks.queue.tail_models STORE [--models 16] [--fit 2] [--each 6] [--prompt 4] [--answer 2]
        [--rate 200] [--slo 60,600] [--pages 128MiB] [--settle 30] [--side fcfs]… [--rounds 1] [--serve OPTION]…
        [--output FILE]

STORE holds fine-tunes (`benchmarks.residency.family`). Each side is a `zoo serve` process with room for `--fit` whole
models and an order of its own. `--each` requests for each of `--models` full fine-tunes come in turn (A, B, C, …, A,
B, C, …), `--rate` a second, which is faster than any side answers. Their SLOs, in seconds, alternate from round to
round. `edf-strict` is the paper's EDF: what does not fit holds back all that follow, as with `fcfs`, while with `edf`
later requests for loaded models run meanwhile. `models` is `qlm` with nothing shared between models. With `warm`
host memory keeps what leaves and reads ahead what the queue needs next (QL-13); with `kept` it only keeps; with `turns`
models serve for a second, or twice their load, at a time.

Servers with plans get `--settle` seconds, in which they compile their search. Then each server answers a group alone,
i.e. all requests for one model that is loaded, and loads some models for one request each: `load_over_group` is what a
load takes over what a group takes. Below 2 the condition for models of the tail does not hold; the document says so.

- `tokens_per_second`: of all answers, from the first request to the last answer.
- `met`: share of the requests that ended within their SLO.
- `loads`, `loaded`: loads during these requests, and the bytes that the scheduler counted for all loads of the server;
  `missing`: the sum over these loads of the components that no loaded model had (UN-04), by manifests and the
  scheduler's log, which is replayed.
- `own`: whether every answer has the tokens of its model alone in an engine.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.queue.servers import KillableServer, serving
from benchmarks.reports import deliver
from benchmarks.residency.family import names as names_of
from benchmarks.residency.more_than_fit import room_for
from benchmarks.residency.sides import own_answers
from cli.serving.options import ServeOptions
from cli.shared.sizes import size_of
from runtime.bench.drive import WallClock
from runtime.bench.workload import WorkloadRequest
from runtime.chains import Stage
from runtime.control.agent_io import Send
from runtime.control.scheduler_io import SchedulerCommand
from runtime.engine.catalog.held_bytes import HeldBytes, form_of
from runtime.engine.models.versions import unpinned
from runtime.messages import LoadStages, UnloadStages
from runtime.scheduler.observe.replay_log import replay
from zoo.api import Zoo
from zoo.manifest import Component

SIDES: Mapping[str, Sequence[str]] = {
    "off": (),
    "fcfs": ("--plan", "fcfs"),
    "edf": ("--plan", "edf"),
    "edf-strict": ("--plan", "edf"),
    "qlm": ("--plan", "qlm"),
    "models": ("--plan", "qlm", "--weight-sharing", "models"),
    "warm": ("--plan", "qlm", "--host-memory", "600MiB"),
    "kept": ("--plan", "qlm", "--host-memory", "600MiB"),
    "turns": ("--plan", "qlm", "--host-memory", "600MiB"),
}
#: Settings of a side's table `[order]`.
_ORDERS: Mapping[str, str] = {"edf-strict": "strict = true", "warm": "read_ahead = true", "turns": "turn_ms = 1000"}
#: Models that are loaded for one request each, to time a load.
_TIMED = 3
#: A load takes at least so many times what a group takes, else models are not of the tail.
_TAIL = 2.0
_COUNTERS = ("plans_used", "plans_rejected", "plans_failed", "violations_foreseen", "evictions", "preemptions")


@dataclass(frozen=True, slots=True)
class TailLoad:
    """The requests in the order of their arrival, with the SLO of each in seconds."""

    asks: tuple[WorkloadRequest, ...]
    slos: tuple[float, ...]

    def asked_of(self, model: str) -> list[WorkloadRequest]:
        return [ask for ask in self.asks if ask.model == model]


def make_load(models: Sequence[str], args: argparse.Namespace) -> TailLoad:
    """Return requests for all models in turn, with random prompts."""
    rng = random.Random(args.seed)
    count = args.each * len(models)
    prompts = [tuple(rng.randrange(3, args.vocabulary) for _ in range(args.prompt)) for _ in range(count)]
    asks = tuple(
        WorkloadRequest(number, number / args.rate, models[number % len(models)], prompt, args.answer)
        for number, prompt in enumerate(prompts)
    )
    return TailLoad(asks, tuple(args.slo[number // len(models) % len(args.slo)] for number in range(count)))


@dataclass(frozen=True, slots=True)
class Answered:
    """An answer: its tokens, and the times of its request and its end, in seconds."""

    tokens: tuple[int, ...]
    asked: float
    ended: float


class TailServer:
    """A side's server."""

    def __init__(self, server: KillableServer) -> None:
        self._server = server

    def counters(self) -> dict[str, int]:
        return self._server.counters()

    def answer(self, asks: Sequence[WorkloadRequest], slos: Sequence[float], at_once: bool = False) -> list[Answered]:
        """Send requests when they are due, and return their answers in order."""
        return asyncio.run(self._answer(asks, slos, at_once))

    async def _answer(self, asks: Sequence[WorkloadRequest], slos: Sequence[float], at_once: bool) -> list[Answered]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(
            base_url=self._server.address, timeout=600, limits=limits, trust_env=False
        ) as client:
            begin = time.monotonic()

            async def one(ask: WorkloadRequest, slo: float) -> Answered:
                await asyncio.sleep(0 if at_once else max(0.0, begin + ask.at - time.monotonic()))
                body = {
                    "model": ask.model, "prompt": ask.prompt, "max_tokens": ask.answer, "temperature": 0,
                    "ignore_eos": True, "return_token_ids": True, "slo_ms": round(1000 * slo),
                }  # fmt: skip
                asked = time.monotonic()
                answer = (await client.post("/v1/completions", json=body)).raise_for_status().json()
                return Answered(tuple(answer["choices"][0]["token_ids"]), asked, time.monotonic())

            return list(await asyncio.gather(*map(one, asks, slos)))


def run_side(
    store: Path, models: Sequence[str], load: TailLoad, own: Mapping[int, tuple[int, ...]], side: str,
    args: argparse.Namespace,
) -> dict[str, Any]:  # fmt: skip
    """Serve all requests under one order."""
    pages = size_of(args.pages)
    weights = room_for(store, models, args.fit, pages).weights
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "log"
        options = [
            "--device-memory", str(weights + pages), "--kv-cache-memory-bytes", str(pages), "--max-num-seqs",
            str(args.places), "--scheduler-log", str(log), *SIDES[side], *args.serve, *models[1:],
        ]  # fmt: skip
        if side in _ORDERS:
            (Path(scratch) / "config.toml").write_text(f"[order]\n{_ORDERS[side]}\n")
            options += ["--config", str(Path(scratch) / "config.toml")]
        with serving(str(store), models[0], options) as running:
            server = TailServer(running)
            time.sleep(args.settle if "qlm" in SIDES[side] else 0.0)
            alone = _alone(server, models, load)
            before = server.counters()
            answers = server.answer(load.asks, load.slos)
            after = server.counters()
            running.process.terminate()  # so that the log is complete
            running.process.wait(60)
        missing = _missing(store, log, private=side == "models")
    seconds = max(each.ended for each in answers) - min(each.asked for each in answers)
    changes = {name: after[name] - before[name] for name in before if isinstance(before[name], int)}
    loads = changes["stage_loads"]
    return {
        "tokens_per_second": round(sum(len(each.tokens) for each in answers) / seconds, 2),
        "seconds": round(seconds, 2),
        "met": round(
            statistics.mean(each.ended - each.asked <= slo for each, slo in zip(answers, load.slos, strict=True)), 3
        ),
        "own": all(each.tokens == own[ask.number] for ask, each in zip(load.asks, answers, strict=True)),
        **alone,
        "loads": loads,
        "load_seconds": round(changes["load_ns"] / 1e9 / max(loads, 1), 3),
        "loaded": after["loaded_bytes"],
        "missing": missing,
        **{name: changes[name] for name in _COUNTERS},
    }


def _alone(server: TailServer, models: Sequence[str], load: TailLoad) -> dict[str, Any]:
    """Time groups of loaded models, and loads, with nothing beside them."""
    groups, loads = [], []
    for model in models[-_TIMED:]:
        some = load.asked_of(model)
        before = server.counters()["load_ns"]
        server.answer(some[:1], [600.0])
        loads.append((server.counters()["load_ns"] - before) / 1e9)
        answers = server.answer(some, [600.0] * len(some), at_once=True)
        groups.append(max(each.ended for each in answers) - min(each.asked for each in answers))
    ratio = statistics.median(loads[1:]) / statistics.median(groups)
    return {
        "group_seconds": [round(each, 3) for each in groups],
        "load_seconds_alone": [round(each, 3) for each in loads],
        "load_over_group": round(ratio, 2),
    }


def _missing(store: Path, log: Path, private: bool) -> int:
    """Return the bytes of the components that were missing at each load, by manifests and a scheduler's log.

    Bytes are those that the engine holds, such as norms in float32.
    """
    with Zoo(store, create=False) as zoo:
        ledgers: dict[str, _Components] = defaultdict(lambda: _Components(zoo, private))

        def count(commands: Sequence[SchedulerCommand]) -> None:
            for command in commands:
                if isinstance(command, Send) and isinstance(command.message, LoadStages):
                    for stage in command.message.stages:
                        ledgers[command.to].load(stage)
                elif isinstance(command, Send) and isinstance(command.message, UnloadStages):
                    for stage in command.message.stages:
                        ledgers[command.to].unload(stage)

        replay(log, count)
        return sum(each.missing for each in ledgers.values())


class _Components:
    """The components on a device, by the stages that have them."""

    def __init__(self, zoo: Zoo, private: bool) -> None:
        self._zoo, self._private, self._form = zoo, private, form_of(ServeOptions().engine())
        self._users: Counter[str] = Counter()
        self.missing = 0

    def load(self, stage: Stage) -> None:
        """Count what is missing: tensors that several components have count once, so all less those that are there."""
        held, components = self._held(stage)
        there = [] if self._private else [each for each in components if self._users[each.base_digest]]
        self.missing += held.weights(components) - held.weights(there) + held.adapters(components)
        self._users.update(each.base_digest for each in components)

    def unload(self, stage: Stage) -> None:
        self._users.subtract(each.base_digest for each in self._held(stage)[1])

    def _held(self, stage: Stage) -> tuple[HeldBytes, list[Component]]:
        manifest = self._zoo.model(unpinned(stage.model)[0]).manifest
        components = [placed.component for placed in manifest.components[stage.lo : stage.hi]]
        return HeldBytes(manifest, self._form), components


def measure(store: Path, models: Sequence[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run all sides in turns and return the document."""
    load = make_load(models, args)
    own = own_answers(store, load.asks, size_of(args.pages), WallClock())
    found: dict[str, list[dict[str, Any]]] = {side: [] for side in args.side}
    for _ in range(args.rounds):
        for side in args.side:
            found[side].append(run_side(store, models, load, own, side, args))
            print(side, found[side][-1], flush=True)
    ratios = [run["load_over_group"] for runs in found.values() for run in runs]
    typical = {side: statistics.median(run["tokens_per_second"] for run in runs) for side, runs in found.items()}
    return {
        "models": len(models),
        "fit": args.fit,
        "requests": len(load.asks),
        "load_over_group": statistics.median(ratios),
        "tail": statistics.median(ratios) >= _TAIL,
        "sides": found,
        "last_side_over": {
            side: round(typical[args.side[-1]] / value, 2) for side, value in typical.items() if side != args.side[-1]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--models", type=int, default=16)
    parser.add_argument("--fit", type=int, default=2)
    parser.add_argument("--each", type=int, default=6)
    parser.add_argument("--places", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=4)
    parser.add_argument("--answer", type=int, default=2)
    parser.add_argument("--rate", type=float, default=200.0)
    parser.add_argument("--settle", type=float, default=30.0, help="seconds after the start of a server with plans")
    parser.add_argument("--slo", type=lambda text: tuple(map(float, text.split(","))), default=(60.0, 600.0))
    parser.add_argument("--pages", default="128MiB")
    parser.add_argument("--vocabulary", type=int, default=1000)
    parser.add_argument("--side", action="append", choices=tuple(SIDES))
    parser.add_argument("--serve", action="append", default=[], help="more options of zoo serve")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    args.side = args.side or ["fcfs", "edf-strict", "edf", "qlm"]
    document = measure(args.store, names_of(args.models, 0), args)
    if not document["tail"]:
        print(f"a load takes {document['load_over_group']} times what a group takes: the condition does not hold")
    deliver(document, args.output)


if __name__ == "__main__":
    main()
