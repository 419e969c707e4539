"""What a stand-in saves: the block's time beside its stand-in's, on the real modules, in the dtype that is stored.

Decoding: one token for each of a batch of sequences, over a cache that holds a context. Prefill: a prompt. Exact and
stand-in alternate pair by pair, so that what else the machine does hurts both; a ratio per pair, then the median and
the spread (quartiles).

The paper reports 18 to 37 times for half of a dense block; half the work cannot take a twentieth of the time (at most
about 2 times), so those figures are not a goal. Knows nothing of how the stand-in was made.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surrogates.block import ParentBlock

#: Passes of a pair that are always made, if so many are asked for.
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of the exact block over that of the stand-in; seconds are of the best single pass."""

    median: float
    low: float
    high: float
    exact_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Speed:
    """`batch` sequences with a context of `context` tokens each; prefill: one sequence of that length."""

    batch: int
    context: int
    threads: int
    decode: Ratio
    prefill: Ratio


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """`pairs` are measured; each is the best of up to `rounds` passes on either side, fewer once they have taken
    `seconds`.
    """

    batch: int = 16
    context: int = 64
    pairs: int = 9
    rounds: int = 30
    seconds: float = 2.0


@torch.inference_mode()
def measure(exact: ParentBlock, given: ParentBlock, width: int, settings: TimingSettings) -> Speed:
    """Time both blocks. `width`: of the hidden states they read; values are random, which changes no time."""
    like = next(exact.parameters())
    hidden = torch.randn(settings.batch, settings.context + 1, width, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(device=like.device, dtype=like.dtype)
    decode = _pairs(_decoding(exact, hidden), _decoding(given, hidden), settings, like.device)
    prefill = _pairs(_prefill(exact, hidden[:1]), _prefill(given, hidden[:1]), settings, like.device)
    return Speed(settings.batch, settings.context, torch.get_num_threads(), decode, prefill)


def _decoding(block: ParentBlock, hidden: Tensor) -> Callable[[], object]:
    """One token per sequence over a filled cache, which is as it was afterwards."""
    from transformers import DynamicCache

    context = hidden.shape[1] - 1
    ids = torch.zeros(hidden.shape[:2], dtype=torch.int64, device=hidden.device)
    cache = DynamicCache()
    block(hidden[:, :context].contiguous(), block.course(ids[:, :context], cache))
    course = block.course(ids[:, :1], cache, torch.full_like(ids[:, :1], context))
    token = hidden[:, -1:].contiguous()
    full = [(layer, layer.keys, layer.values) for layer in cache.layers if layer.is_initialized]

    def run() -> None:
        block(token, course)
        for layer, keys, values in full:
            layer.keys, layer.values = keys, values

    return run


def _prefill(block: ParentBlock, hidden: Tensor) -> Callable[[], object]:
    prompt = hidden[:, :-1].contiguous()
    course = block.course(torch.zeros(prompt.shape[:2], dtype=torch.int64, device=prompt.device))
    return lambda: block(prompt, course)


def _pairs(
    exact: Callable[[], object], given: Callable[[], object], settings: TimingSettings, device: torch.device
) -> Ratio:
    left, right = [], []
    for pair in range(settings.pairs + 1):
        one, other = _bests((exact, given) if pair % 2 else (given, exact), settings, device)
        if pair:  # the first pair warms caches
            left.append(one if pair % 2 else other)
            right.append(other if pair % 2 else one)
    ratios = [a / b for a, b in zip(left, right, strict=True)]
    low, high = _quartiles(ratios)
    return Ratio(statistics.median(ratios), low, high, min(left), min(right))


def _bests(
    runs: tuple[Callable[[], object], Callable[[], object]], settings: TimingSettings, device: torch.device
) -> list[float]:
    """The best of some passes of each, taken in turns: what else the machine does then hurts both.

    Many passes, because on a busy machine the longer pass is the likelier to be interrupted, which would flatter the
    shorter.
    """
    best = [float("inf"), float("inf")]
    due = time.perf_counter() + settings.seconds
    for done in range(settings.rounds):
        if done >= _FEWEST and time.perf_counter() > due:
            break
        for at, run in enumerate(runs):
            _wait(device)
            begin = time.perf_counter()
            run()
            _wait(device)
            best[at] = min(best[at], time.perf_counter() - begin)
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def _quartiles(values: list[float]) -> tuple[float, float]:
    if len(values) < 2:
        return values[0], values[0]
    quartiles = statistics.quantiles(values, n=4, method="inclusive")
    return quartiles[0], quartiles[2]
