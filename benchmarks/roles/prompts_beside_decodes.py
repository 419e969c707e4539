"""Measure what a stream of long prompts costs decodes beside it: on the same devices, and on separate ones (TI-02).

    python -m benchmarks.roles.prompts_beside_decodes STORE MODEL [--decodes 8] [--tokens 160] [--prompt 512]
        [--answer 1] [--rounds 3] [--output FILE]

Two agent processes of one thread each. `apart` has `--roles prefill,decode`, `mixed` has none (each agent runs both).
In every round each side decodes `--decodes` answers alone, and then beside prompts that come one after another without
a pause. `token_ms`: median time between two tokens of an answer; `p99_ms`. `ratio`: beside to alone, of the same round:
median, least, greatest. `prompts_per_s`: what the stream got.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.cluster.driver.driver import ClusterDriver
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

_SIDES: Mapping[str, str | None] = {"apart": "prefill,decode", "mixed": None}
#: Tokens of an answer that do not count: the answers have not all begun.
_FIRST = 12


@dataclass(frozen=True, slots=True)
class Gaps:
    """Milliseconds between two tokens of an answer, and prompts per second beside them."""

    median: float
    p99: float
    prompts: float


class PromptStream:
    """Prompts that come one after another until the block ends."""

    def __init__(self, driver: ClusterDriver, model: str, tokens: int, answer: int) -> None:
        self._driver, self._model, self._tokens, self._answer = driver, model, tokens, answer
        self.count = 0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> PromptStream:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.is_set():
            name, self.count = f"p{time.monotonic_ns()}", self.count + 1
            prompt = tuple(300 + (self.count * 31 + at * 7) % 4000 for at in range(self._tokens))
            sampling = SamplingParams(self._answer, ignore_eos=True)
            for event in self._driver.run([SequenceRequest(name, name, self._model, prompt, sampling)]):
                if event.error is not None:
                    raise RuntimeError(event.error)


def decoded(driver: ClusterDriver, model: str, args: argparse.Namespace, beside: bool) -> Gaps:
    """Decode answers; return the times between their tokens."""
    sampling = SamplingParams(args.tokens, ignore_eos=True)
    requests = []
    for number in range(args.decodes):
        name = f"d{time.monotonic_ns()}"
        prompt = tuple(300 + (number * 131 + at * 11) % 4000 for at in range(24))
        requests.append(SequenceRequest(name, name, model, prompt, sampling))
    last: dict[str, float] = {}
    gaps: list[float] = []

    def run() -> None:
        for event in driver.run(requests):
            now = time.perf_counter()
            if event.error is not None:
                raise RuntimeError(event.error)
            if event.index >= _FIRST:
                gaps.append((now - last[event.seq]) * 1000)
            last[event.seq] = now

    begun, prompts = time.perf_counter(), 0.0
    if beside:
        with PromptStream(driver, model, args.prompt, args.answer) as stream:
            run()
            prompts = stream.count / (time.perf_counter() - begun)
    else:
        run()
    gaps.sort()
    return Gaps(statistics.median(gaps), gaps[round(0.99 * (len(gaps) - 1))], prompts)


def measured(zoo: Zoo, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of both sides."""
    name = zoo.model(model).name
    chosen = choose(zoo, [name])
    found: dict[str, Any] = {}
    for side, roles in _SIDES.items():
        with start_driver(zoo, ServeOptions(agents=2, backend="processes", roles=roles), chosen) as driver:
            for beside in (False, True):  # loads what both kinds of paths need
                decoded(driver, name, args, beside)
            rounds = [[decoded(driver, name, args, beside) for beside in (False, True)] for _ in range(args.rounds)]
        ratios = [beside.median / alone.median for alone, beside in rounds]
        found[side] = {
            "alone_token_ms": statistics.median(alone.median for alone, _ in rounds),
            "beside_token_ms": statistics.median(beside.median for _, beside in rounds),
            "alone_p99_ms": statistics.median(alone.p99 for alone, _ in rounds),
            "beside_p99_ms": statistics.median(beside.p99 for _, beside in rounds),
            "ratio": {"median": statistics.median(ratios), "least": min(ratios), "greatest": max(ratios)},
            "prompts_per_s": statistics.median(beside.prompts for _, beside in rounds),
        }
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--decodes", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160, help="tokens of an answer")
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt of the stream")
    parser.add_argument("--answer", type=int, default=1, help="tokens of its answer")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    with Zoo(given.store, create=False) as zoo:
        deliver(measured(zoo, given.model, given), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
