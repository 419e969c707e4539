"""The page pool with several geometries: a layer with narrow heads has as many tokens per page as a wide one.

Both layers are of the same model.
"""

from __future__ import annotations

import ctypes
import mmap
import sys

import pytest
import torch

from runtime.kv.pool import Geometry, PagePool
from zoo.errors import NotServable

WIDE = Geometry(3, 32, torch.float32)
NARROW = Geometry(2, 16, torch.float32)
HALF = Geometry(1, 8, torch.bfloat16)
HALF_PAGE = 4 * WIDE.token_bytes


@pytest.fixture
def pool() -> PagePool:
    made = PagePool(2 * 6 * HALF_PAGE, HALF_PAGE)
    made.clear(list(range(6)))
    return made


def some(geometry: Geometry, tokens: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((tokens, geometry.kv_heads, geometry.head_dim), generator=generator).to(geometry.dtype)


def test_pages_have_the_same_bytes_and_hold_more_tokens_of_a_narrow_geometry(pool):
    assert [pool.page_tokens(each) for each in (WIDE, NARROW, HALF)] == [4, 12, 96]


@pytest.mark.parametrize(
    ("geometry", "page_tokens"), [(WIDE, 4), (NARROW, 12), (NARROW, 4), (NARROW, 2), (HALF, 4), (HALF, 7)]
)
def test_what_is_written_is_gathered_and_nothing_else_is_touched(pool, geometry, page_tokens):
    view = pool.view(geometry, page_tokens)
    table, at = torch.tensor([4, 1, 3]), torch.arange(2 * page_tokens + 1)
    k, v = some(geometry, len(at), 1), some(geometry, len(at), 2)
    view.write(table[at // page_tokens], at % page_tokens, k, v)
    got_k, got_v = view.gather(table, pool)
    assert torch.equal(got_k[: len(at)], k) and torch.equal(got_v[: len(at)], v)
    assert not got_k[len(at) :].any() and not got_v[len(at) :].any()
    others = [0, 2, 5, pool.padding]
    assert not pool._k[others].any() and not pool._v[others].any()


def test_two_layers_of_one_model_keep_out_of_each_other_s_pages(pool):
    wide, narrow = pool.view(WIDE, 4), pool.view(NARROW, 4)
    pages, offsets = torch.tensor([0, 0, 0, 0]), torch.arange(4)
    wide.write(pages, offsets, *(some(WIDE, 4, seed) for seed in (1, 2)))
    narrow.write(pages + 1, offsets, *(some(NARROW, 4, seed) for seed in (3, 4)))
    assert torch.equal(wide.gather(torch.tensor([0]), pool)[0], some(WIDE, 4, 1))
    assert torch.equal(narrow.gather(torch.tensor([1]), pool)[1], some(NARROW, 4, 4))


def test_more_tokens_than_fit_are_refused(pool):
    with pytest.raises(NotServable, match="do not fit"):
        pool.view(WIDE, 5)
    with pytest.raises(NotServable, match="larger pages"):
        pool.page_tokens(Geometry(64, 128, torch.float32))


def test_pages_are_read_and_written_as_bytes(pool):
    """Bytes of a page beyond its tokens are copied too; a copy does not change later."""
    view = pool.view(NARROW, 4)
    k, v = some(NARROW, 4, 1), some(NARROW, 4, 2)
    view.write(torch.tensor([2, 2, 2, 2]), torch.arange(4), k, v)
    held = pool.read([2, 0])
    assert held.dtype == torch.uint8 and held.shape == (2, 2 * HALF_PAGE) and not held[1].any()
    assert torch.equal(held[0, : 4 * NARROW.token_bytes].view(torch.float32), k.flatten())
    assert torch.equal(held[0, HALF_PAGE : HALF_PAGE + 4 * NARROW.token_bytes].view(torch.float32), v.flatten())
    pool.clear([2])
    pool.write([5, 4], held)
    assert torch.equal(pool.read([5, 4]), held) and not pool.read([2]).any()
    assert all(torch.equal(got, given) for got, given in zip(view.gather(torch.tensor([5]), pool), (k, v), strict=True))


def test_pages_that_are_nobody_s_are_not_read(pool):
    for page in (-1, pool.padding, pool.spill):
        with pytest.raises(ValueError, match="numbered from 0 to 5"):
            pool.read([page])
        with pytest.raises(ValueError, match="numbered from 0 to 5"):
            pool.write([page], torch.zeros((1, 2 * HALF_PAGE), dtype=torch.uint8))
    for wrong in (torch.zeros((2, 2 * HALF_PAGE), dtype=torch.uint8), torch.zeros((1, 2 * HALF_PAGE))):
        with pytest.raises(ValueError, match="1 pages of"):
            pool.write([0], wrong)


def resident(pool: PagePool) -> int:
    """Return the bytes of memory behind a pool, from the system's own account (mincore)."""
    held = 0
    for half in (pool._k, pool._v):
        pages = (ctypes.c_ubyte * -(-half.nbytes // mmap.PAGESIZE))()
        assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(half.data_ptr()), ctypes.c_size_t(half.nbytes), pages)
        held += sum(page & 1 for page in pages) * mmap.PAGESIZE
    return held


@pytest.mark.skipif(sys.platform != "linux", reason="the system has other words for it")
def test_memory_of_pages_goes_back_to_the_system():
    """A pool of 64 MiB has memory for what was written; a huge page of 2 MiB may be around the two last pages."""
    half, mib = 2 * mmap.PAGESIZE, 1 << 20
    pool = PagePool(64 * mib, half)
    count, slack = pool.pages, 5 * mib
    assert resident(pool) < slack
    pool.clear(range(count // 2))
    assert resident(pool) >= 32 * mib
    pool.write([0, 5], torch.full((2, 2 * half), 7, dtype=torch.uint8))
    pool.give_back([page for page in range(count // 2) if page not in (0, 5)])
    assert resident(pool) < slack
    assert (pool.read([0, 5]) == 7).all() and not pool.read([1, 4, 6]).any()
    pool.clear(range(0, count, 2))
    assert resident(pool) < 32 * mib + slack, "no huge pages are made around them"
    pool.give_back([])


def test_pages_beside_others_in_a_page_of_the_system_keep_them(pool):
    """Given back are three of six pages, of 1,536 bytes: none has a page of the system for itself."""
    pool.write([0, 1, 2], torch.full((3, 2 * HALF_PAGE), 3, dtype=torch.uint8))
    pool.give_back([3, 4, 5])
    assert (pool.read([0, 1, 2]) == 3).all()
