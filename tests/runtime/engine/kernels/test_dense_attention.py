"""Attention over a dense batch's KV store: the kernels equal torch over the padded rectangle."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.engine.attention.interface import AttentionSettings, Tokens
from runtime.engine.dense.kv_store import DenseKV
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.build import NoKernels

HEADS, KV_HEADS, DIM = 4, 2, 24


def kernels() -> Kernels:
    try:
        return Kernels()
    except NoKernels as why:
        pytest.skip(str(why))


def tokens(count: int, chance: torch.Generator, how: AttentionSettings) -> Tokens:
    query, key, value = (torch.randn(count, heads, DIM, generator=chance) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return Tokens(query, key, value, how)


def computed(kv_store: DenseKV, now: Tokens) -> Tokens:
    """Place a window's tokens among all computed ones; the values beside them must not matter."""
    window = kv_store.window
    count = sum(place.count + place.empty for place in window.places)
    at = slice(None) if window.tokens is None else window.tokens
    out = []
    for x in now[:3]:
        wide = torch.full((count, *x.shape[1:]), 1e3)
        wide[at] = x
        out.append(wide)
    return Tokens(*out, now.how)


def attended(kv_store: DenseKV, now: Tokens, by: Kernels | None) -> torch.Tensor:
    out = kv_store.attend(0, computed(kv_store, now), by)
    assert torch.isfinite(out).all()
    return out if kv_store.window.tokens is None else out[kv_store.window.tokens]


@pytest.mark.parametrize(
    "how",
    [AttentionSettings(), AttentionSettings(scaling=0.3), AttentionSettings(window=5), AttentionSettings(softcap=2.0)],
)
def test_as_over_the_rectangle(how):
    """Four stores of the same content go through the same random windows, arrivals and removals of rows, and growth.

    Either all tokens of a window are computed or its tokens and some empty rows, each with the kernels and without.
    """
    chance, rng = torch.Generator().manual_seed(0), random.Random(0)
    slabs = [DenseKV(1, torch.device("cpu")) for _ in range(4)]
    lengths: list[int] = []
    for turn in range(40):
        for kv_store in slabs:
            kv_store.columns.release()
            kv_store.shape(
                max(kv_store.stored_rows, len(lengths) + 1),
                max(kv_store.columns.capacity, kv_store.columns.needed + 12),
            )
        if len(lengths) > 3 or (lengths and rng.random() < 0.2):
            row = rng.randrange(len(lengths))
            for kv_store in slabs:
                kv_store.remove_row(row)
            lengths[row] = lengths[-1]
            lengths.pop()
        if not lengths or rng.random() < 0.4:
            for kv_store in slabs:
                kv_store.enter(None)
            lengths.append(0)
        counts = [rng.choice((0, 1, 1, 1, 3)) if length else rng.randint(1, 9) for length in lengths]
        counts[rng.randrange(len(counts))] = 2
        filled = [row for row, count in enumerate(counts) if not count][:2]
        for number, kv_store in enumerate(slabs):
            kv_store.begin(counts, lengths, filled if number % 2 else None)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        now = tokens(sum(counts), chance, how)
        whole, *others = (
            attended(kv_store, now, kernels() if number > 1 else None) for number, kv_store in enumerate(slabs)
        )
        for other in others:
            torch.testing.assert_close(
                other, whole, atol=2e-5, rtol=2e-5, msg=lambda text, turn=turn: f"turn {turn}: {text}"
            )
    for first, *rest in zip(*(kv_store.drain() for kv_store in slabs), strict=True):
        for other in rest:
            assert other.tokens == first.tokens and all(
                torch.equal(a, b) for a, b in zip(first.k, other.k, strict=True)
            )


def test_a_rows_result_does_not_depend_on_the_window():
    """A row's result is the same bit for bit alone and beside rows that are longer, wider, or already removed."""
    alone, beside = DenseKV(1, torch.device("cpu")), DenseKV(1, torch.device("cpu"))
    own, foreign = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    for kv_store in (alone, beside):
        kv_store.shape(3, 40)
        kv_store.enter(None)
    beside.enter(None)
    length = reached = 0
    for count, other in ((4, 9), (1, 3), (1, 1), (1, 6)):
        mine = tokens(count, own, AttentionSettings())
        alone.begin([count], [length], ())
        beside.begin([count, other], [length, reached], ())
        reached += other
        theirs = tokens(other, foreign, AttentionSettings())
        both = Tokens(*(torch.cat((a, b)) for a, b in zip(mine[:3], theirs[:3], strict=True)), AttentionSettings())
        expected = alone.attend(0, mine, kernels())
        assert torch.equal(beside.attend(0, both, kernels())[:count], expected)
        length += count
