"""Time a block against its stand-in, with the real modules in the stored dtype.

Decoding runs one token for each of a batch of sequences, over a cache that holds a context. Prefill runs a prompt.
Exact block and stand-in alternate, so that other load on the machine affects both. Each pair gives a ratio; reported
are the median and the quartiles.

The paper reports speedups of 18 to 37 for half of a dense block. Half the work gives at most a speedup of about 2, so
those figures are not a goal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from surrogates.block import ParentBlock

#: Minimum number of passes of a pair, if that many are requested.
_FEWEST = 3


@dataclass(frozen=True, slots=True)
class Ratio:
    """Time of the exact block over that of the stand-in.

    Fields:
        low: Lower quartile; `high`: upper quartile.
        exact_seconds: Best single pass of the exact block.
        seconds: Best single pass of the stand-in.
    """

    median: float
    low: float
    high: float
    exact_seconds: float
    seconds: float


@dataclass(frozen=True, slots=True)
class Speed:
    """Times of both blocks.

    Fields:
        batch: Sequences in decoding.
        context: Tokens per sequence; prefill runs one sequence of that length.
    """

    batch: int
    context: int
    threads: int
    decode: Ratio
    prefill: Ratio


@dataclass(frozen=True, slots=True)
class TimingSettings:
    """How to time.

    Fields:
        pairs: Measured pairs.
        rounds: Maximum passes per pair and side; the best counts.
        seconds: No further passes of a pair start after this time.
    """

    batch: int = 16
    context: int = 64
    pairs: int = 9
    rounds: int = 30
    seconds: float = 2.0


@torch.inference_mode()
def measure(exact: ParentBlock, given: ParentBlock, width: int, settings: TimingSettings) -> Speed:
    """Time both blocks on random hidden states, which do not change the time.

    Args:
        width: Width of the hidden states that the blocks read.
    """
    like = next(exact.parameters())
    hidden = torch.randn(settings.batch, settings.context + 1, width, generator=torch.Generator().manual_seed(0))
    hidden = hidden.to(device=like.device, dtype=like.dtype)
    decode = _pairs(_decoding(exact, hidden), _decoding(given, hidden), settings, like.device)
    prefill = _pairs(_prefill(exact, hidden[:1]), _prefill(given, hidden[:1]), settings, like.device)
    return Speed(settings.batch, settings.context, torch.get_num_threads(), decode, prefill)


def _decoding(block: ParentBlock, hidden: Tensor) -> Callable[[], object]:
    """Return a run of one token per sequence over a filled cache, which it leaves unchanged."""
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
        if pair:  # the first pair is a warm-up
            left.append(one if pair % 2 else other)
            right.append(other if pair % 2 else one)
    ratios = [a / b for a, b in zip(left, right, strict=True)]
    low, high = _quartiles(ratios)
    return Ratio(statistics.median(ratios), low, high, min(left), min(right))


def _bests(
    runs: tuple[Callable[[], object], Callable[[], object]], settings: TimingSettings, device: torch.device
) -> list[float]:
    """Return the best of several passes of each, taken in turns, so that other load on the machine affects both.

    Several passes are needed, since on a busy machine the longer pass is more likely to be interrupted, which would
    favour the shorter one.
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
