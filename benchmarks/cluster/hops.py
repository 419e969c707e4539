"""Measure the cost of a hop: a decode step of 32 sequences along a chain on one agent, and on the chain cut over two.

    python -m benchmarks.cluster.hops [--rows 32] [--width 512] [--layers 3] [--steps 200] [--turn 10]
        [--sockets unix|ipc|tcp] [--tensor-transport direct] [--output FILE]

The agents are real: processes, sockets, and the staged engine with a Llama of random weights. `--rows 32 --width 512`
in float32 are 64 KB of hidden states per hop. This program takes the scheduler's place, so that a step is only the way
of the rows: RunRows -> (stage -> ForwardRows ->) stage -> RowsDone.

Four paths take turns:
- `one`: the whole chain on `a`.
- `cut`: cut in two, both on `a`.
- `two`: the second half on `b`.
- `three`: cut in three, on `a`, `b`, `a`.

Printed:
- `step`: milliseconds per step of each path.
- `hop_adds_ms`: what a hop adds. `two - one` and half of `three - one` include a second engine step; `two - cut` is the
  difference to the same two steps in one process: encoding, socket, wake-up of another process.
- `between_engines_ms`: from the end of one engine's step to the start of the next one's, by timestamps of one clock
  (`benchmarks.cluster.stamped_agents`); between processes (`two`, `three`) and within one (`cut`).
- `engines_ms`: the time of the engine steps themselves, which is longer where each half wakes another core.
- `bare`: the same bytes between two processes without engines, one way.
- `links`: whether hidden states went from device to device, as with `--tensor-transport direct` (gloo on a CPU).

A path takes `--turn` steps in a row, as in serving; the first two are not counted. Differences are between steps of
neighbouring turns, as medians, since the machine's other load changes over time.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from bisect import bisect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster.stamped_agents import STAMPS
from benchmarks.reports import deliver
from runtime.chains import Array, Hop, Stage
from runtime.chains import Path as Hops
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import DirectConfig, EngineConfig
from runtime.messages import (
    SCHEDULER,
    AgentHello,
    AgentStats,
    LoadStages,
    Message,
    OpenSequences,
    PageData,
    PeerList,
    RowsDone,
    RowsLost,
    RunRows,
    StageReady,
)
from runtime.scheduler.decode.batch_numbers import BatchNumbers
from runtime.transport.keys import Keys
from runtime.transport.messenger import Envelope, Messenger
from runtime.types import SamplingParams, SequenceRequest

MODEL = "hops"
PROMPT = 8
LIMIT = 60.0
#: Uncounted steps at the start of a turn.
_SKIPPED = 2
_WANTED = (AgentHello, StageReady, RowsDone, RowsLost)


def make_store(folder: Path, width: int, layers: int) -> Path:
    """Make a store with one Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from surgery.ingest.ingest import ingest
    from surgery.sources import open_source
    from zoo.store import Store

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    with Store.open(folder / "store") as store:
        ingest(store, open_source(str(folder / "model")), name=MODEL)
    return folder / "store"


class Cluster:
    """Two agents, controlled by this program instead of a scheduler."""

    def __init__(self, settings: dict[str, Any], kind: str, direct: bool) -> None:
        program = (sys.executable, "-m", "benchmarks.cluster.stamped_agents")
        self._fleet = ProcessLauncher(
            ProcessConfig(
                Preparation("staged", settings),
                settings=AgentSettings(direct=DirectConfig() if direct else None),
                host="127.0.0.1" if kind == "tcp" else None,
                sockets="ipc" if kind == "ipc" else "unix",
                warm=False,
                program=program,
            )
        )
        self._messenger = Messenger(SCHEDULER, 0, self._fleet.seat.bind, self._fleet.seat.keys)
        self._came: list[Message] = []
        self._numbers = BatchNumbers()
        self.links: dict[str, dict[str, str]] = {}
        self._fleet.attach(lambda died: None, self._messenger.address)
        for name in "ab":
            self._fleet.start(name, 1)
        ready = [self.next(AgentHello) for _ in "ab"]
        for name in "ab":
            self._messenger.send(
                name,
                PeerList(
                    tuple((each.device, 1, each.address) for each in ready),
                    tuple(each.tensor_transport for each in ready),
                ),
            )

    def next(self, kind: type[Message]) -> Any:
        end = time.monotonic() + LIMIT
        while time.monotonic() < end:
            for at, message in enumerate(self._came):
                if isinstance(message, RowsLost):
                    raise RuntimeError(f"rows are lost: {message.reason}")
                if isinstance(message, kind):
                    return self._came.pop(at)
            came = [item.message for item in self._messenger.receive(1.0) if isinstance(item, Envelope)]
            self._came += [message for message in came if isinstance(message, _WANTED)]
            self.links |= {message.device: dict(message.links) for message in came if isinstance(message, AgentStats)}
        raise RuntimeError(f"no {kind.__name__} came")

    def provide(self, path: Hops) -> None:
        for hop in path:
            self._messenger.send(hop.device, LoadStages((Stage(MODEL, hop.lo, hop.hi),), (("b",),)))
            self.next(StageReady)

    def open(self, requests: Sequence[SequenceRequest], path: Hops) -> None:
        count = len(requests)
        for device in {hop.device for hop in path}:
            self._messenger.send(
                device,
                OpenSequences(
                    (1,) * count,
                    tuple(requests),
                    ((),) * count,
                    (path,) * count,
                    (False,) * count,
                    (0,) * count,
                    (None,) * count,
                ),
            )

    def step(
        self, path: Hops, seqs: tuple[str, ...], start: int, tokens: Sequence[tuple[int, ...]], generated: int
    ) -> tuple[list[int], float]:
        """Run one row of every sequence; return their tokens and the seconds until all have arrived."""
        count = len(seqs)
        flat = tuple(token for each in tokens for token in each)
        ones, starts, counts = (1,) * count, (start,) * count, tuple(map(len, tokens))
        sample, made = (True,) * count, (generated,) * count
        batch = self._numbers.number(path[0].device, seqs, ones, starts, counts, sample, ones)
        go = RunRows(seqs, ones, starts, counts, flat, sample, made, ones, batch=batch)
        begin = time.perf_counter()
        self._messenger.send(path[0].device, go)
        got: dict[str, int] = {}
        while len(got) < count:
            done = self.next(RowsDone)
            got.update((one.seq, one.token) for one in done.sampled)
        return [got[seq] for seq in seqs], time.perf_counter() - begin

    def close(self) -> None:
        self._fleet.shutdown(10.0)
        self._messenger.close()


class HopRun:
    """The sequences of one path, run step by step.

    Fields:
        tokens: Per step, one token of each sequence.
        seconds: Duration of each counted step.
    """

    def __init__(self, cluster: Cluster, name: str, path: Hops, rows: int) -> None:
        self._cluster, self._path = cluster, path
        self._seqs = tuple(f"{name}{number}" for number in range(rows))
        sampling = SamplingParams(4000, ignore_eos=True)
        prompts = [tuple((number * 7 + at) % 1024 for at in range(PROMPT)) for number in range(rows)]
        cluster.provide(path)
        cluster.open(
            [
                SequenceRequest(seq, seq, MODEL, prompt, sampling)
                for seq, prompt in zip(self._seqs, prompts, strict=True)
            ],
            path,
        )
        first, _ = cluster.step(path, self._seqs, 0, prompts, 0)
        self.tokens, self._generated = [first], 1
        self.seconds: list[float] = []
        #: When each of these steps ended, in ns of the clock of the agents' timestamps.
        self.ends: list[int] = []

    def step(self) -> None:
        last = [(token,) for token in self.tokens[-1]]
        tokens, seconds = self._cluster.step(
            self._path, self._seqs, PROMPT + self._generated - 1, last, self._generated
        )
        self.tokens.append(tokens)
        self.seconds.append(seconds)
        self.ends.append(time.monotonic_ns())
        self._generated += 1

    def run_steps(self, turn: int, skipped: int) -> None:
        """Run `turn` steps in a row and discard the times of the first `skipped`."""
        for _ in range(turn):
            self.step()
        for each in (self.seconds, self.ends):
            del each[len(each) - turn : len(each) - turn + skipped]


def measure(
    rows: int, width: int, layers: int, steps: int, turn: int, kind: str, direct: bool = False
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[STAMPS] = scratch
        store = make_store(Path(scratch), width, layers)
        cluster = Cluster(_settings(store), kind, direct)
        try:
            runs = _run(cluster, rows, layers, steps, turn)
        finally:
            cluster.close()
        stamps = sorted(
            (begin, end) for file in Path(scratch).glob("*.json") for begin, end in json.loads(file.read_text())
        )
    if any(run.tokens != runs["one"].tokens for run in runs.values()):
        raise RuntimeError("the paths give different tokens")
    times = {name: _spread(run.seconds) for name, run in runs.items()}
    return {
        "rows": rows, "bytes_per_hop": rows * width * 4, "steps": steps, "turn": turn,
        "over": kind, "links": cluster.links, "step": times,
        "hop_adds_ms": _hops(runs), "between_engines_ms": _between(runs, stamps), "engines_ms": _engines(runs, stamps),
        "bare": bare(rows * width * 4, kind),
    }  # fmt: skip


def _settings(store: Path) -> dict[str, Any]:
    from runtime.engine.models.registry import half_page
    from zoo.store import Store

    config = EngineConfig(kv_cache_memory_bytes=512 << 20)
    with Store.open(store) as opened:
        half = half_page(opened, config, [MODEL])
    return {
        "store": str(store),
        "database": None,
        "config": msgspec.to_builtins(config),
        "half_page": half,
        "threads": 1,
    }


def _run(cluster: Cluster, rows: int, layers: int, steps: int, turn: int) -> dict[str, HopRun]:
    """Measure `steps` counted steps of each path.

    The components are the embedding, two for each layer, and the head. Cuts are before a layer's attention.
    """
    end, half, third = 2 * layers + 2, layers // 2, layers // 3 or 1
    paths = {
        "one": (Hop("a", 0, end, (0, layers)),),
        "cut": (Hop("a", 0, 1 + 2 * half, (0, half)), Hop("a", 1 + 2 * half, end, (half, layers))),
        "two": (Hop("a", 0, 1 + 2 * half, (0, half)), Hop("b", 1 + 2 * half, end, (half, layers))),
        "three": (
            Hop("a", 0, 1 + 2 * third, (0, third)),
            Hop("b", 1 + 2 * third, 1 + 4 * third, (third, 2 * third)),
            Hop("a", 1 + 4 * third, end, (2 * third, layers)),
        ),
    }
    runs = {name: HopRun(cluster, name, path, rows) for name, path in paths.items()}
    skipped = min(_SKIPPED, turn - 1)
    for number in range(1 + -(-steps // (turn - skipped))):
        for run in runs.values():
            run.run_steps(turn, skipped)
            if not number:  # the first round is a warm-up
                run.seconds.clear()
                run.ends.clear()
    return runs


def bare(nbytes: int, kind: str, rounds: int = 500) -> dict[str, float]:
    """Measure one way between two processes: half of a round trip of a message with `nbytes` bytes of data."""
    with tempfile.TemporaryDirectory() as scratch:
        keys = Keys.make() if kind == "tcp" else None
        messenger = Messenger("here", 0, "tcp://127.0.0.1:*" if kind == "tcp" else f"{kind}://{scratch}/here", keys)
        pair = None if keys is None else (keys.public, keys.secret)
        process = multiprocessing.get_context("spawn").Process(
            target=_echo, args=(messenger.address, pair, rounds), daemon=True
        )
        process.start()
        while not messenger.knows("there"):
            messenger.receive(1.0)
        seconds = []
        message, array = PageData(1, "s", 1, 0, 1, "d"), Array("uint8", (1, nbytes), bytes(nbytes))
        for _ in range(rounds):
            begin = time.perf_counter()
            messenger.send("there", message, (array,))
            while not any(isinstance(item, Envelope) for item in messenger.receive(1.0)):
                pass
            seconds.append((time.perf_counter() - begin) / 2)
        process.join(LIMIT)
        messenger.close()
    return _spread(seconds)


def _echo(address: str, keys: tuple[str, str] | None, rounds: int) -> None:
    messenger = Messenger("there", 0, keys=None if keys is None else Keys(*keys))
    messenger.learn("here", 0, address)
    messenger.send("here", PageData(0, "", 0, 0, 0, "", "hello"))
    done = 0
    while done < rounds:
        for item in messenger.receive(1.0):
            if isinstance(item, Envelope):
                messenger.send("here", item.message, item.arrays)
                done += 1
    messenger.close()


def _hops(runs: Mapping[str, HopRun]) -> dict[str, float]:
    return {
        "two - one": _apart(runs, "two", "one"),
        "two - cut": _apart(runs, "two", "cut"),
        "two - cut, best of each": 1e3 * (min(runs["two"].seconds) - min(runs["cut"].seconds)),
        "(three - one) / 2": _apart(runs, "three", "one") / 2,
    }


def _steps(run: HopRun, stamps: Sequence[tuple[int, int]]) -> list[list[tuple[int, int]]]:
    """Return the engine runs (begin, end) within each step of a path."""
    begins = [begin for begin, _ in stamps]
    spans = ((end - int(seconds * 1e9), end) for end, seconds in zip(run.ends, run.seconds, strict=True))
    return [list(stamps[bisect(begins, begin) : bisect(begins, end)]) for begin, end in spans]


def _between(runs: Mapping[str, HopRun], stamps: Sequence[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """Return the time from one engine's end to the next one's start, per hop."""
    out = {}
    for name in ("cut", "two", "three"):
        gaps = [[after[0] - before[1] for before, after in pairwise(step)] for step in _steps(runs[name], stamps)]
        out[name] = _spread([sum(each) / len(each) / 1e9 for each in gaps if each])
    return out


def _engines(runs: Mapping[str, HopRun], stamps: Sequence[tuple[int, int]]) -> dict[str, dict[str, float]]:
    """Return the total time of the engines in a step."""
    return {
        name: _spread([sum(end - begin for begin, end in step) / 1e9 for step in _steps(run, stamps)])
        for name, run in runs.items()
    }


def _apart(runs: Mapping[str, HopRun], more: str, less: str) -> float:
    """Return the median milliseconds by which a step of one path takes longer than the other's of the same round."""
    pairs = zip(runs[more].seconds, runs[less].seconds, strict=True)
    return 1e3 * statistics.median(one - other for one, other in pairs)


def _spread(seconds: Sequence[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "best_ms": 1e3 * ordered[0],
        "p50_ms": 1e3 * statistics.median(ordered),
        "p95_ms": 1e3 * ordered[int(0.95 * (len(ordered) - 1))],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turn", type=int, default=10)
    parser.add_argument("--sockets", choices=("unix", "ipc", "tcp"), default="unix", help="tcp: encrypted")
    parser.add_argument("--tensor-transport", choices=("host", "direct"), default="host")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    deliver(
        measure(
            given.rows,
            given.width,
            given.layers,
            given.steps,
            given.turn,
            given.sockets,
            given.tensor_transport == "direct",
        ),
        given.output,
    )


if __name__ == "__main__":
    main()
