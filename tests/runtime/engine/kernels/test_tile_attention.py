"""Attention over pages of bfloat16 on tiles: a token has the same bits in decode steps and in chunks, near exact ones.

Keys are read in place where TILE_ROWS of them lie in a page, in whole tiles, and copied else.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.build import Build
from runtime.engine.kernels.operands import Pool, PromptChunk, PromptChunks
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.kernels.test_paths import compiled_for, described, flags

pytestmark = needs_kernels

BUILDS = [Build("emulated"), Build("amx")]
HELD = 150
#: Query heads, KV heads, values of a head, tokens of a page.
SIZES = [
    (9, 3, 64, 16),  # in place
    (4, 4, 32, 32),  # one query head each
    (20, 1, 64, 16),  # more query heads than rows of a tile
    (6, 2, 96, 8),  # small pages: copied
    (4, 2, 24, 16),  # not in whole tiles: copied
    (3, 1, 80, 64),
]


def pool_of(kv_heads: int, dim: int, page: int, rows: int = 1) -> Pool:
    groups = -(-HELD // page)
    k, v = (torch.randn(rows * groups + 3, page, kv_heads, dim).bfloat16() for _ in range(2))
    return Pool(k, v, torch.randperm(rows * groups + 3)[: rows * groups].view(rows, groups).contiguous())


def decoded(
    kernels: Kernels, query: torch.Tensor, pool: Pool, held: int, scale: float, window: int = 0
) -> torch.Tensor:
    """Attention of one token [heads, dim] in a decode step, over the first tokens of the pool's only row."""
    out = torch.empty(1, *query.shape)
    kernels.decode(query[None], pool, torch.tensor([held]), out, scale, window)
    return out[0]


def exact(query: torch.Tensor, pool: Pool, position: int, scale: float, window: int) -> torch.Tensor:
    """Attention of one token [heads, dim] in float64, queries rounded to bfloat16, weights not."""
    heads, (kv_heads, dim) = query.shape[0], pool.k.shape[2:]
    keys, values = (
        each[pool.tables[0]].reshape(-1, kv_heads, dim)[: position + 1].double().repeat_interleave(heads // kv_heads, 1)
        for each in (pool.k, pool.v)
    )
    first = max(0, position + 1 - window) if window else 0
    scores = torch.einsum("hd,thd->ht", query.bfloat16().double(), keys[first:]) * scale
    return torch.einsum("ht,thd->hd", scores.softmax(-1), values[first:])


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.path)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page"), SIZES)
@pytest.mark.parametrize("window", [0, 70])
def test_a_token_has_one_attention(build: Build, heads: int, kv_heads: int, dim: int, page: int, window: int) -> None:
    kernels = compiled_for(build)
    torch.manual_seed(heads)
    pool, scale = pool_of(kv_heads, dim, page), 1 / math.sqrt(dim)
    query, chunk = torch.randn(HELD, heads, dim), torch.empty(HELD, heads, dim)
    kernels.chunks(query, pool, PromptChunks([PromptChunk(0, HELD, 0, 0)]), chunk, scale, window)
    for position in (0, 1, 14, 15, 16, 31, 32, 47, 63, 64, 65, 100, 127, 128, 149):
        one = decoded(kernels, query[position], pool, position + 1, scale, window)
        assert torch.equal(one, chunk[position]), position
        wanted = exact(query[position], pool, position, scale, window)
        torch.testing.assert_close(one.double(), wanted, rtol=0.01, atol=0.01)


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.path)
def test_a_prompt_cut_anywhere_has_the_same_bits(build: Build) -> None:
    kernels = compiled_for(build)
    torch.manual_seed(1)
    pool = pool_of(3, 64, 16)
    query, whole = torch.randn(HELD, 9, 64), torch.empty(HELD, 9, 64)
    kernels.chunks(query, pool, PromptChunks([PromptChunk(0, HELD, 0, 0)]), whole, 0.1)
    for cuts in ([0, 31, 150], [0, 1, 33, 34, 97, 150], [0, 64, 128, 150]):
        cut = torch.empty(HELD, 9, 64)
        parts = [PromptChunk(lo, hi - lo, lo, 0, hi) for lo, hi in pairwise(cuts)]
        kernels.chunks(query, pool, PromptChunks(parts), cut, 0.1)
        assert torch.equal(cut, whole), cuts


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.path)
def test_rows_of_a_step_do_not_depend_on_each_other(build: Build) -> None:
    kernels = compiled_for(build)
    torch.manual_seed(2)
    pool = pool_of(2, 64, 16, rows=7)
    lengths, query = torch.tensor([1, 150, 0, 17, 64, 96, 149]), torch.randn(7, 8, 64)
    together = torch.empty(7, 8, 64)
    kernels.decode(query, pool, lengths, together, 0.1)
    for row in range(7):
        one = Pool(pool.k, pool.v, pool.tables[row : row + 1].contiguous())
        assert torch.equal(decoded(kernels, query[row], one, int(lengths[row]), 0.1), together[row])
    assert not together[2].any(), "a row of no tokens gives zeros"


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.path)
def test_what_lies_behind_a_row_does_not_count(build: Build) -> None:
    """Keys are read in place, also those of a tile that the row does not reach: they may be anything."""
    kernels = compiled_for(build)
    torch.manual_seed(3)
    pool, query = pool_of(2, 64, 32), torch.randn(6, 64)
    made = decoded(kernels, query, pool, 37, 0.1)
    page = pool.tables[0, 1]
    pool.k[page, 5:], pool.v[page, 5:] = torch.nan, torch.nan
    assert torch.equal(decoded(kernels, query, pool, 37, 0.1), made)


def skip_without_pairs() -> None:
    if "avx512_bf16" not in flags():
        pytest.skip("ATTENTION ON TILES IS NOT TESTED: no avx512_bf16")


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.path)
def test_values_have_the_bits_of_intel_s_description(build: Build) -> None:
    """Queries of zeros: all weights are 1."""
    skip_without_pairs()
    kernels = compiled_for(build)
    torch.manual_seed(5)
    pool, sums = pool_of(1, 96, 16), torch.empty(1, 2, 2, dtype=torch.float64)
    values = torch.empty(1, 2, 96, dtype=torch.float64)
    kernels.decode(torch.zeros(1, 2, 96), pool, torch.tensor([64]), values, 0.1, sums=sums)
    assert sums.tolist() == [[[64.0, 0.0]] * 2]
    v = pool.v[pool.tables[0]].reshape(-1, 96)[:64]
    wanted = torch.tensor(described(torch.ones(1, 64), v.t().contiguous())[0])
    assert torch.equal(values[0].float(), wanted.expand(2, -1))


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.path)
def test_scores_are_summed_in_the_order_of_intel_s_description(build: Build) -> None:
    """Large products of even values cancel. In another order the small ones between them would be lost."""
    skip_without_pairs()
    kernels = compiled_for(build)
    torch.manual_seed(6)
    pool = pool_of(1, 64, 16)
    queries = torch.randn(20, 1, 64)
    queries[:, :, :4:2] = 3e4
    page = pool.tables[0, 0]
    pool.k[page, 0, 0, 0], pool.k[page, 0, 0, 2] = 3e4, -3e4
    for query in queries:
        values, sums = torch.empty(1, 1, 64, dtype=torch.float64), torch.empty(1, 1, 2, dtype=torch.float64)
        kernels.decode(query[None], pool, torch.tensor([1]), values, 1.0, sums=sums)
        x = float(described(query, pool.k[page, 0])[0, 0]) * math.log2(math.e)
        assert sums[0, 0, 1] == math.ceil(x)
        assert abs(float(sums[0, 0, 0]) - 2 ** (x - math.ceil(x))) < 0.005


@pytest.mark.parametrize("build", BUILDS, ids=lambda build: build.path)
def test_a_key_that_ends_within_a_tile_is_read_no_further(build: Build) -> None:
    """What follows are the next head's keys: infinite ones would make NaN of the queries' zeros."""
    kernels = compiled_for(build)
    torch.manual_seed(7)
    pool, query = pool_of(2, 24, 16), torch.randn(2, 24)
    made = decoded(kernels, query, pool, 37, 0.1)
    pool.k[:, :, 1] = torch.inf
    assert torch.equal(decoded(kernels, query, pool, 37, 0.1)[0], made[0])
