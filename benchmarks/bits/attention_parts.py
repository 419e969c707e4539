"""Measure attention to a long context in parts (IL-01) beside attention to all of it: error, and the time it costs.

    python -m benchmarks.bits.attention_parts [--context 32768] [--parts 2 4 8] [--queries 1 512] [--kv-heads 8 2]
        [--dtype float32 bfloat16] [--rounds 9] [--output FILE]

One layer of 32 heads of 64 values, native kernels, as many threads as torch uses; the last `queries` tokens attend.

- `error`: largest difference of the merged parts from attention to all tokens at once.
- `ratio`: seconds of all parts and their merge, over seconds of all at once; median of rounds, with the least and most.
  All parts run on one device here, so it is what cutting and merging cost, without any message.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.reports import deliver
from runtime.config import EngineConfig
from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.attention.partial import PartialAttention, attend_partly
from runtime.engine.kernels.paged_attention import native_attention
from runtime.engine.layers.operations import NativeOperations
from runtime.engine.models.registry import kernels_for
from runtime.engine.step.context import AttentionBackend, PagedMetadata, RowSpan
from runtime.kv.pool import Geometry, PagePool

_HEADS, _WIDTH, _PAGE = 32, 64, 16


class LongContext:
    """K and V of one row, at random, on pages in a random order."""

    def __init__(self, context: int, queries: int, kv_heads: int, dtype: torch.dtype) -> None:
        kernels = kernels_for(EngineConfig())
        if kernels is None:
            raise RuntimeError("there are no native kernels on this machine")
        self._make, self._merge = native_attention(kernels), NativeOperations(kernels).merge
        self.queries, self._pages = queries, torch.randperm(context // _PAGE)
        half = _PAGE * kv_heads * _WIDTH * dtype.itemsize
        self._pool = PagePool(2 * half * len(self._pages), half)
        at = torch.arange(len(self._pages) * _PAGE)
        geometry = Geometry(kv_heads, _WIDTH, dtype)
        k, v = (torch.randn(len(at), kv_heads, _WIDTH).to(dtype) for _ in range(2))
        self._pool.view(geometry, _PAGE).write(self._pages[at // _PAGE], at % _PAGE, k, v)
        none = torch.empty(0, kv_heads, _WIDTH, dtype=dtype)
        self._now = Tokens(torch.randn(queries, _HEADS, _WIDTH), none, none, AttentionSettings())

    def part(self, lo: int, hi: int) -> AttentionBackend:
        """Return attention to the page groups [lo, hi)."""
        before, held = len(self._pages) * _PAGE - self.queries, (hi - lo) * _PAGE
        span = RowSpan(0, self.queries, min(before - lo * _PAGE, held))
        empty = torch.empty(0, dtype=torch.int64)
        lengths = torch.tensor([min(span.length, held)])
        tables = self._pages[lo:hi].view(1, 1, -1)
        return self._make(
            PagedMetadata(self._pool, _PAGE, None, (span,), tables, lengths, empty.view(1, 0), empty, (held,))
        )

    def cut(self, parts: int) -> list[AttentionBackend]:
        ends = [len(self._pages) * part // parts for part in range(parts + 1)]
        return [self.part(lo, hi) for lo, hi in pairwise(ends)]

    def attend(self, parts: list[AttentionBackend]) -> Tensor:
        room, out = PartialAttention.empty(self._now.query, len(parts)), torch.empty(self._now.query.shape)
        for at, each in enumerate(parts):
            attend_partly(each, 0, self._now, room.part(at))
        self._merge(room.values, room.sums, out, None)
        return out

    def attend_whole(self, whole: AttentionBackend) -> Tensor:
        out = torch.zeros(self._now.query.shape)
        whole.decode(0, self._now, out)
        whole.chunks(0, self._now, out)
        return out


def timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(given: argparse.Namespace, kv_heads: int, queries: int, dtype: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    made, found = LongContext(given.context, queries, kv_heads, getattr(torch, dtype)), []
    whole = made.cut(1)[0]
    exact = made.attend_whole(whole)
    for count in given.parts:
        parts = made.cut(count)
        error = float((made.attend(parts) - exact).abs().max())
        pairs = [
            (timed(partial(made.attend, parts)), timed(partial(made.attend_whole, whole))) for _ in range(given.rounds)
        ]
        ratios = [mine / all_of_it for mine, all_of_it in pairs]
        found.append(
            {
                "dtype": dtype, "kv_heads": kv_heads, "queries": queries, "parts": count, "error": error,
                "whole_ms": round(1e3 * statistics.median(whole for _, whole in pairs), 3),
                "ratio": [round(each, 3) for each in (statistics.median(ratios), min(ratios), max(ratios))],
            }
        )  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--context", type=int, default=32768)
    parser.add_argument("--parts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--queries", type=int, nargs="+", default=[1, 512])
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[8, 2])
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    rows = [
        row
        for dtype in given.dtype
        for kv_heads in given.kv_heads
        for queries in given.queries
        for row in measure(given, kv_heads, queries, dtype)
    ]
    deliver({"context": given.context, "threads": torch.get_num_threads(), "rows": rows}, given.output)


if __name__ == "__main__":
    main()
