"""Attention over a dense batch's store: the kernels' is torch's over the padded rectangle, whatever rows and columns do."""

from __future__ import annotations

import random

import pytest
import torch

from runtime.engine.attention import How, Tokens
from runtime.engine.native.build import NoKernels
from runtime.engine.native.calls import Kernels
from runtime.engine.slab import Slab

HEADS, KV_HEADS, DIM = 4, 2, 24


def kernels() -> Kernels:
    try:
        return Kernels()
    except NoKernels as why:
        pytest.skip(str(why))


def tokens(count: int, chance: torch.Generator, how: How) -> Tokens:
    query, key, value = (torch.randn(count, heads, DIM, generator=chance) for heads in (HEADS, KV_HEADS, KV_HEADS))
    return Tokens(query, key, value, how)


def padded(slab: Slab, now: Tokens) -> Tokens:
    """The window's rectangle around its tokens; what stands beside them must not matter."""
    rows, width = slab.window.positions.shape
    out = []
    for x in now[:3]:
        wide = torch.full((rows * width, *x.shape[1:]), 1e3)
        wide[slab.window.tokens] = x
        out.append(wide)
    return Tokens(*out, now.how)


@pytest.mark.parametrize("how", [How(), How(scaling=0.3), How(window=5), How(softcap=2.0)])
def test_as_over_the_rectangle(how):
    """Three stores of one content live through the same random windows, rows that come and go, and growth."""
    chance, rng = torch.Generator().manual_seed(0), random.Random(0)
    slabs = [Slab(1, torch.device("cpu")) for _ in range(3)]
    lengths: list[int] = []
    for turn in range(40):
        for slab in slabs:
            slab.columns.release()
            slab.shape(max(slab.stored_rows, len(lengths) + 1), max(slab.columns.capacity, slab.columns.needed + 12))
        if len(lengths) > 3 or (lengths and rng.random() < 0.2):
            row = rng.randrange(len(lengths))
            for slab in slabs:
                slab.leave(row)
            lengths[row] = lengths[-1]
            lengths.pop()
        if not lengths or rng.random() < 0.4:
            for slab in slabs:
                slab.enter(None)
            lengths.append(0)
        counts = [rng.choice((0, 1, 1, 1, 3)) if length else rng.randint(1, 9) for length in lengths]
        counts[rng.randrange(len(counts))] = 2
        for slab in slabs:
            slab.begin(counts, lengths)
        lengths = [length + count for length, count in zip(lengths, counts, strict=True)]
        now = tokens(sum(counts), chance, how)
        mine = slabs[0].attend_tokens(0, now, kernels())
        plain = slabs[1].attend_tokens(0, now, None)
        whole = slabs[2].attend(0, padded(slabs[2], now))[slabs[2].window.tokens]
        torch.testing.assert_close(mine, whole, atol=2e-5, rtol=2e-5, msg=lambda text, turn=turn: f"turn {turn}: {text}")
        torch.testing.assert_close(plain, whole, atol=2e-5, rtol=2e-5)
    for one, other, third in zip(*(slab.drain() for slab in slabs), strict=True):
        assert one.tokens == other.tokens == third.tokens
        assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(one.k, other.k, third.k, strict=True))


def test_a_rows_result_does_not_depend_on_the_window():
    """Bit for bit: alone, or beside rows that are longer, wider, or not there any more."""
    alone, beside = Slab(1, torch.device("cpu")), Slab(1, torch.device("cpu"))
    own, foreign = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    for slab in (alone, beside):
        slab.shape(3, 40)
        slab.enter(None)
    beside.enter(None)
    length = 0
    for count, other in ((4, 9), (1, 3), (1, 1), (1, 6)):
        mine = tokens(count, own, How())
        alone.begin([count], [length])
        beside.begin([count, other], [length, 0 if not length else beside.columns.span(1)])
        theirs = tokens(other, foreign, How())
        both = Tokens(*(torch.cat((a, b)) for a, b in zip(mine[:3], theirs[:3], strict=True)), How())
        expected = alone.attend_tokens(0, mine, kernels())
        assert torch.equal(beside.attend_tokens(0, both, kernels())[:count], expected)
        length += count
