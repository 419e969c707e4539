"""Allocate the tensors behind the pages: one pool per device, shared by all models.

A page is a fixed number of bytes for K and as many for V, of one attention layer. Its layout depends on the model:

    geometry (kv_heads, head_dim, dtype)  ->  k, v: [pages, page_tokens, kv_heads, head_dim]

so a page holds more tokens of a narrow model than of a wide one. All layers of a model put the same number of tokens
into a page (its tables have one shape); in a model with differing layers, the narrower ones leave a part unused. Where
the device's attention kernel reads only pages of a multiple of some number of tokens, a page's last slots stay unused.

`kv.pages` tracks which sequence has which page. A page is zeroed when it is allocated, unless it is filled at once: the
slots after a sequence's end must be finite in every dtype (masked NaN is still NaN), and must not leak tokens of
another sequence. Two pages lie beyond the capacity: one stays zero and pads the tables, the other takes writes that are
never read (rows that only fill up a batch).

On a CPU a page has no memory before it is written, and none after `give_back`: a pool may be as large as the memory
that weights and pages share (`EngineConfig.device_memory_bytes`), of which weights then use a part.
"""

from __future__ import annotations

import contextlib
import copy
import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.kv.transfers import put
from zoo.errors import NotServable

#: Bytes of K (or V) from which on a pool uses huge pages, of 2 MiB: the first page written takes one.
_LARGE = 32 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Describe the layout of one token's K or V in one layer."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Return the bytes of K (or V) of one token in one layer."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageView:
    """View the pool in one geometry. `k` and `v`: [pages, page_tokens, kv_heads, head_dim], writable."""

    k: Tensor
    v: Tensor
    page_tokens: int
    geometry: Geometry

    def write(self, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Write one layer's K and V [tokens, kv_heads, head_dim] at (pages[i], offsets[i])."""
        self.k[pages, offsets] = k
        self.v[pages, offsets] = v

    def gather(self, pages: Tensor, pool: PagePool) -> tuple[Tensor, Tensor]:
        """Copy K and V of `pages` [n] into the pool's scratch buffers and return them.

        Each is [n * page_tokens, kv_heads, head_dim] and valid until the next call.
        """
        geometry = self.geometry
        count, width = pages.numel(), self.page_tokens * geometry.kv_heads * geometry.head_dim
        out = []
        for name, source in (("k", self.k), ("v", self.v)):
            buffer = pool.scratch(name, count * width * geometry.dtype.itemsize)
            flat = buffer.view(geometry.dtype)[: count * width].view(count, width)
            torch.index_select(source.view(source.shape[0], width), 0, pages, out=flat)
            out.append(flat.view(count * self.page_tokens, geometry.kv_heads, geometry.head_dim))
        return out[0], out[1]


class Pages(Protocol):
    """Define what a model needs to know about a device's pages before it is loaded."""

    @property
    def padding(self) -> int: ...

    def page_tokens(self, geometry: Geometry) -> int:
        """Return the tokens of this geometry that fit a page. Raises NotServable if none does."""
        ...


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Compute page counts and sizes without allocating: memory divided into pages of `half_bytes` each for K and V.

    Fields:
        multiple: The tokens of a page are rounded down to a multiple of this, where a page holds as many.

    Raises:
        ValueError: The memory holds no page.
    """

    nbytes: int
    half_bytes: int
    multiple: int = 1

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a pool of {self.nbytes} bytes holds no page of {2 * self.half_bytes} bytes")

    @property
    def count(self) -> int:
        return self.nbytes // (2 * self.half_bytes)

    @property
    def padding(self) -> int:
        """Return the id of the padding page, which follows all the other pages."""
        return self.count

    def page_tokens(self, geometry: Geometry) -> int:
        """Return the tokens of this geometry that fit a page. Raises NotServable if none does."""
        tokens = self.half_bytes // geometry.token_bytes
        if tokens < 1:
            need, have = geometry.token_bytes, self.half_bytes
            raise NotServable(
                f"one token's K takes {need} bytes, a page holds {have}; start with larger pages (page_tokens)"
            )
        return tokens - tokens % self.multiple if tokens >= self.multiple else tokens


class PagePool:
    """Hold two byte tensors, one for K and one for V, cut into pages, and scratch buffers to gather them into.

    Args:
        nbytes: Bytes of K and V together; at least one page.
        half_bytes: Bytes of K (and of V) in a page, a multiple of 64.
        multiple: As in `PageSizes`.

    Raises:
        ValueError: The pool holds no page.
    """

    #: Pages beyond those that can be allocated.
    SPARE = 2

    def __init__(self, nbytes: int, half_bytes: int, device: str = "cpu", multiple: int = 1) -> None:
        self._sizes = PageSizes(nbytes, half_bytes, multiple)
        self.half_bytes = half_bytes
        self.pages = self._sizes.count
        halves = [_room(self.pages + self.SPARE, half_bytes, torch.device(device)) for _ in range(2)]
        (self._k, _), (self._v, _) = halves
        self._mapped = [mapped for _, mapped in halves if mapped is not None]
        self._compact = True  # whether huge pages may be used
        self._scratch: dict[str, Tensor] = {}
        self._views: dict[tuple[Geometry, int], PageView] = {}
        self.clear([self.padding, self.spill])

    def second_lane(self) -> PagePool:
        """Return a pool on the same pages with its own scratch buffers, for steps that run concurrently."""
        other = copy.copy(self)
        other._scratch = {}
        return other

    @property
    def padding(self) -> int:
        """Return the id of the page that is always zero and never allocated."""
        return self.pages

    @property
    def spill(self) -> int:
        """Return the id of the page that takes K and V that are never read, in any geometry; never allocated."""
        return self.pages + 1

    @property
    def nbytes(self) -> int:
        """Return the bytes of all pages that can be allocated."""
        return 2 * self.pages * self.half_bytes

    def clear(self, pages: Sequence[int]) -> None:
        """Zero these pages."""
        index = put(pages, self._k.device)
        for half in (self._k, self._v):
            half.view(torch.int64).index_fill_(0, index, 0)  # eight bytes at a time

    def give_back(self, pages: Sequence[int]) -> None:
        """Give the memory of these pages, whose content is lost, back to the system; does nothing on a GPU.

        Pages of the system that a page shares with one that is not given back stay; there are none if `half_bytes` is a
        multiple of their size. From the first call on no huge pages are made, which would take the memory again.
        """
        for mapped in self._mapped:
            if self._compact and hasattr(mmap, "MADV_NOHUGEPAGE"):
                with contextlib.suppress(OSError):  # a kernel without huge pages
                    mapped.madvise(mmap.MADV_NOHUGEPAGE)
            for first, end in _runs(pages):
                lo, hi = -(-first * self.half_bytes // mmap.PAGESIZE), end * self.half_bytes // mmap.PAGESIZE
                if lo < hi:
                    mapped.madvise(mmap.MADV_DONTNEED, lo * mmap.PAGESIZE, (hi - lo) * mmap.PAGESIZE)
        self._compact = False

    def read(self, pages: Sequence[int]) -> Tensor:
        """Return a copy of these pages on the CPU: uint8 [pages, 2 * half_bytes], K before V.

        Raises ValueError for page ids outside the pool.
        """
        return self.held(pages).cpu()

    def held(self, pages: Sequence[int]) -> Tensor:
        """Return the same as `read`, on the pages' device."""
        index = self._index(pages)
        out = torch.empty((len(pages), 2, self.half_bytes), dtype=torch.uint8, device=self._k.device)
        for at, half in enumerate((self._k, self._v)):
            torch.index_select(half, 0, index, out=out[:, at])
        return out.flatten(1)

    def write(self, pages: Sequence[int], data: Tensor) -> None:
        """Write data as returned by `read`.

        Raises ValueError for page ids outside the pool and for data of another shape.
        """
        if data.dtype != torch.uint8 or data.shape != (len(pages), 2 * self.half_bytes):
            raise ValueError(
                f"{len(pages)} pages of {2 * self.half_bytes} bytes are not {data.dtype} {tuple(data.shape)}"
            )
        index, words = self._index(pages), data.to(self._k.device).view(torch.int64)  # eight bytes at a time
        for half, given in zip((self._k, self._v), words.chunk(2, dim=1), strict=True):
            half.view(torch.int64)[index] = given

    def _index(self, pages: Sequence[int]) -> Tensor:
        if not all(0 <= page < self.pages for page in pages):
            raise ValueError(f"pages are numbered from 0 to {self.pages - 1}")
        return torch.tensor(pages, dtype=torch.int64, device=self._k.device)

    def page_tokens(self, geometry: Geometry) -> int:
        """Return the tokens of this geometry that fit a page. Raises NotServable if none does."""
        return self._sizes.page_tokens(geometry)

    def view(self, geometry: Geometry, page_tokens: int) -> PageView:
        """Return the pool as pages of this geometry with `page_tokens` tokens each.

        Raises NotServable if they do not fit.
        """
        key = (geometry, page_tokens)
        if key not in self._views:
            if page_tokens > self.page_tokens(geometry):
                raise NotServable(
                    f"{page_tokens} tokens of {geometry.token_bytes} bytes do not fit a page of {self.half_bytes} bytes"
                )
            used = page_tokens * geometry.token_bytes // geometry.dtype.itemsize
            shape = (self.pages + self.SPARE, page_tokens, geometry.kv_heads, geometry.head_dim)
            k, v = (half.view(geometry.dtype)[:, :used].view(shape) for half in (self._k, self._v))
            self._views[key] = PageView(k, v, page_tokens, geometry)
        return self._views[key]

    @property
    def scratches(self) -> tuple[Tensor, ...]:
        """Return the current scratch buffers.

        A caller that keeps their addresses must keep references to them, because larger ones may replace them.
        """
        return tuple(self._scratch.values())

    def scratch(self, name: str, nbytes: int) -> Tensor:
        """Return a byte buffer of at least `nbytes`, kept between steps: new memory costs more than the copy."""
        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            size = max(nbytes + nbytes // 2, 1 << 20) // 64 * 64
            held = self._scratch[name] = torch.empty(size, dtype=torch.uint8, device=self._k.device)
        return held


def _runs(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the runs of consecutive page ids as (first, last + 1)."""
    first = last = -1
    for page in sorted(pages):
        if page != last + 1 or first < 0:
            if first >= 0:
                yield first, last + 1
            first = page
        last = page
    if first >= 0:
        yield first, last + 1


def _room(pages: int, half_bytes: int, device: torch.device) -> tuple[Tensor, mmap.mmap | None]:
    """Allocate [pages, bytes]; on a CPU as a mapping, a large one in huge pages if the system has them.

    Rows read pages from all over the pool, and address translation takes a tenth of that time (measured).
    """
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        # without huge pages or enough memory, torch's own allocation gives the better error
        with contextlib.suppress(OSError):
            memory = mmap.mmap(-1, pages * half_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE if len(memory) >= _LARGE else mmap.MADV_NOHUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.uint8).view(pages, half_bytes), memory
    return torch.empty((pages, half_bytes), dtype=torch.uint8, device=device), None
