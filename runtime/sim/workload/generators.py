"""Generate requests to a simulated cluster: times, models and lengths, drawn as in the papers or taken from a trace.

- `blockllm`: mean rates of applications are uniform, requests of an application are in proportion to its rate, and each
  application is a Poisson process (BlockLLM 7.1). Lengths are S-LoRA's, which the paper follows: uniform from 8 to 512
  for both.
- `twitter`: one Poisson process with a daily wave, noise and sudden spikes, limited to [1, 45] requests per second.
  Modelled on the trace that the paper used, which is not available.
- `poisson`: one Poisson process at a constant rate.
- traces: what `runtime.bench.traces` reads, with models assigned.

A function of settings and seed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from runtime.bench.lengths import Lengths, draw
from runtime.bench.popularity import Popularity, assign
from runtime.bench.traces import TraceRow
from runtime.sim.models.family import App, Kind
from runtime.sim.run.clock import Streams
from runtime.sim.workload.requests import SECOND, Demand, Numbers
from zoo.errors import InputError

#: S-LoRA's synthetic workloads.
SLORA = Lengths("uniform", 8, 512)
#: The paper's kinds of fine-tunes: four parameter-efficient ones, and full ones. Its only full one is Vicuna, a
#: fine-tuned LLaMA: so there is one full fine-tune of each LLaMA here.
_PE: tuple[Kind, ...] = ("lora", "adapter", "prefix", "bitfit")
_FOUNDATIONS = ("llama-7b", "llama-13b", "chatglm-6b")


@dataclass(frozen=True, slots=True)
class Asked:
    """Settings of generated requests. `longest`: tokens of prompt and answer together (BL-31)."""

    count: int = 400
    seconds: float = 1200.0
    prompts: Lengths = SLORA
    answers: Lengths = SLORA
    longest: int = 1024

    def __post_init__(self) -> None:
        if not 1 <= self.count <= 10_000_000 or not 0 < self.seconds < 1e9 or self.longest < 2:
            raise InputError("1 to 10,000,000 requests within a positive time, of 2 tokens or more")


def paper_apps(count: int = 20, foundations: Sequence[str] = _FOUNDATIONS) -> tuple[App, ...]:
    """Return fine-tunes of the paper's foundations, in turns."""
    if not foundations or count < 1:
        raise InputError("applications have a foundation, and there is at least one of them")
    turns = [(foundations[number % len(foundations)], number // len(foundations)) for number in range(count)]
    kinds = [(foundation, _kind(foundation, turn)) for foundation, turn in turns]
    return tuple(
        App(f"app{number:02}-{foundation}-{kind}", foundation, kind) for number, (foundation, kind) in enumerate(kinds)
    )


def _kind(foundation: str, turn: int) -> Kind:
    """Return the kind of the foundation's model number `turn`: each PE kind once, one full fine-tune, then PE kinds."""
    if not foundation.startswith("llama") or turn < len(_PE):
        return _PE[turn % len(_PE)]
    return "full" if turn == len(_PE) else _PE[(turn - 1) % len(_PE)]


def blockllm_demand(models: Sequence[str], asked: Asked, streams: Streams) -> Demand:
    """Generate each application's requests as a Poisson process, given its total number: uniform times, in order."""
    weights = streams.named("rates").random(len(models))
    counts = _apportioned(weights / weights.sum(), asked.count)
    model = np.repeat(np.arange(len(models)), counts)
    at = streams.named("arrivals").random(asked.count) * asked.seconds
    return _drawn(models, at, model, asked, streams)


def twitter_demand(
    models: Sequence[str],
    asked: Asked,
    streams: Streams,
    least: float = 1.0,
    most: float = 45.0,
    popularity: Popularity = "uniform",
) -> Demand:
    """Generate the requests that arrive within `seconds`, at most `count`.

    `least`, `most`: limits of the rate per second. The rate of each second is a wave times noise times spikes. The wave
    goes from a quarter of `most / 2` to all of it, in a day that lasts `seconds`. The noise is correlated over about a
    minute. A spike, three to six times the rate, begins every few minutes and decays within seconds.
    """
    rng = streams.named("arrivals")
    seconds = np.arange(int(np.ceil(asked.seconds)))
    wave = most / 2 * (0.625 - 0.375 * np.cos(2 * np.pi * seconds / asked.seconds))
    rate = np.clip(wave * _noise(rng, len(seconds)) * _spikes(rng, len(seconds)), least, most)
    per_second = rng.poisson(rate)
    at = np.sort(np.repeat(seconds, per_second) + rng.random(int(per_second.sum())))[: asked.count]
    chosen = np.array(assign(popularity, len(models), len(at), 1.0, streams.named("models")), dtype=np.int64)
    return _drawn(models, at, chosen, asked, streams)


def poisson_demand(models: Sequence[str], asked: Asked, streams: Streams, popularity: Popularity = "uniform") -> Demand:
    """Generate `count` requests at a constant rate of `count / seconds`."""
    gaps = streams.named("arrivals").exponential(asked.seconds / asked.count, asked.count)
    chosen = np.array(assign(popularity, len(models), asked.count, 1.0, streams.named("models")), dtype=np.int64)
    return _drawn(models, np.cumsum(gaps), chosen, asked, streams)


def trace_demand(
    models: Sequence[str], rows: Sequence[TraceRow], asked: Asked, streams: Streams, popularity: Popularity
) -> Demand:
    """Return a trace's times and lengths; missing ones are Poisson times and drawn lengths."""
    chosen = np.array(assign(popularity, len(models), len(rows), 1.0, streams.named("models")), dtype=np.int64)
    drawn = np.cumsum(streams.named("arrivals").exponential(asked.seconds / len(rows), len(rows)))
    at = np.array([time if row.at is None else row.at for row, time in zip(rows, drawn, strict=True)])
    lengths = [
        (row.prompt or prompt, row.answer or answer)
        for row, prompt, answer in zip(rows, *_lengths(asked, streams, len(rows)), strict=True)
    ]
    return _demand(
        models, at, chosen, [prompt for prompt, _ in lengths], [answer for _, answer in lengths], asked.longest
    )


def _drawn(models: Sequence[str], at: NDArray[np.float64], model: Numbers, asked: Asked, streams: Streams) -> Demand:
    return _demand(models, at, model, *_lengths(asked, streams, len(at)), asked.longest)


def _lengths(asked: Asked, streams: Streams, count: int) -> tuple[list[int], list[int]]:
    return draw(asked.prompts, count, streams.named("prompt lengths")), draw(
        asked.answers, count, streams.named("answer lengths")
    )


def _demand(
    models: Sequence[str],
    at: NDArray[np.float64],
    model: Numbers,
    prompts: Sequence[int],
    answers: Sequence[int],
    longest: int,
) -> Demand:
    """Sort by time, and cut prompts and then answers to the longest length."""
    order = np.argsort(at, kind="stable")
    prompt = np.minimum(np.array(prompts, dtype=np.int64), longest - 1)
    answer = np.minimum(np.array(answers, dtype=np.int64), longest - prompt)
    return Demand(
        tuple(models), np.rint(at[order] * SECOND).astype(np.int64), model[order], prompt[order], answer[order]
    )


def _apportioned(shares: NDArray[np.float64], count: int) -> Numbers:
    """Return integers in proportion to shares, `count` in total; the largest remainders get the rest."""
    exact = shares * count
    counts = np.floor(exact).astype(np.int64)
    most = np.argsort(counts - exact, kind="stable")[: count - int(counts.sum())]
    counts[most] += 1
    return counts


def _noise(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    """Return noise around 1, correlated from second to second."""
    keep = np.exp(-1 / 60)
    drawn = rng.normal(0.0, 0.25 * np.sqrt(1 - keep**2), count)
    level = np.empty(count)
    last = 0.0
    for second in range(count):
        last = level[second] = keep * last + drawn[second]
    return np.exp(level)


def _spikes(rng: np.random.Generator, count: int) -> NDArray[np.float64]:
    factor = np.ones(count)
    start = int(rng.exponential(180))
    while start < count:
        length = min(30, count - start)
        factor[start : start + length] += rng.uniform(2, 5) * np.exp(-np.arange(length) / 8)
        start += 1 + int(rng.exponential(180))
    return factor
