"""The tensors behind the pages: one pool per device, shared by all models.

A page is a fixed number of bytes for K and as many for V, of one attention layer. What it holds depends on who uses it:

    geometry (kv_heads, head_dim, dtype)  ->  k, v: [pages, page_tokens, kv_heads, head_dim]

so a narrow model gets more tokens into a page than a wide one. All layers of a model put as many tokens into a page
(its tables have one shape), so in a model whose layers differ the narrower ones leave the rest of their pages unused.
Who owns which page is the bookkeeping's affair (`kv.pages`). A page is zeroed when it is handed out, unless it is
filled at once: what lies behind a sequence's end must be finite under every dtype (masked NaN is still NaN), and no
sequence may find another's tokens there. Two pages lie beyond the capacity: one stays zero for ever and pads the
tables, the other takes what nobody reads (rows that only fill a batch up).
"""

from __future__ import annotations

import contextlib
import copy
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from runtime.kv.transfers import put
from zoo.errors import NotServable


@dataclass(frozen=True, slots=True)
class Geometry:
    """What one token's K or V of one layer looks like."""

    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_bytes(self) -> int:
        """Bytes of K (or V) of one token in one layer."""
        return self.kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PageView:
    """A pool seen through one geometry. `k` and `v`: [pages, page_tokens, kv_heads, head_dim], writable."""

    k: Tensor
    v: Tensor
    page_tokens: int
    geometry: Geometry

    def write(self, pages: Tensor, offsets: Tensor, k: Tensor, v: Tensor) -> None:
        """Put one layer's K and V [tokens, kv_heads, head_dim] at (pages[i], offsets[i])."""
        self.k[pages, offsets] = k
        self.v[pages, offsets] = v

    def gather(self, pages: Tensor, pool: PagePool) -> tuple[Tensor, Tensor]:
        """K and V of `pages` [n], copied into the pool's scratch; [n * page_tokens, kv_heads, head_dim] each, valid
        until the next call.
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
    """How many tokens a device's pages hold, and which page pads tables: what a model must know before it is loaded."""

    @property
    def padding(self) -> int: ...

    def page_tokens(self, geometry: Geometry) -> int:
        """Tokens of this geometry in a page. Raises NotServable when not one fits."""
        ...


@dataclass(frozen=True, slots=True)
class PageSizes:
    """Pages that are only counted: a device's memory in pages of `half_bytes` for K and as many for V.

    Raises:
        ValueError: the memory holds no page.
    """

    nbytes: int
    half_bytes: int

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(f"a pool of {self.nbytes} bytes holds no page of {2 * self.half_bytes} bytes")

    @property
    def count(self) -> int:
        return self.nbytes // (2 * self.half_bytes)

    @property
    def padding(self) -> int:
        """Id of the page beyond all others."""
        return self.count

    def page_tokens(self, geometry: Geometry) -> int:
        """Tokens of this geometry in a page. Raises NotServable when not one fits."""
        tokens = self.half_bytes // geometry.token_bytes
        if tokens < 1:
            need, have = geometry.token_bytes, self.half_bytes
            raise NotServable(
                f"one token's K takes {need} bytes, a page holds {have}; start with larger pages (page_tokens)"
            )
        return tokens


class PagePool:
    """Two byte tensors, one for K and one for V, cut into pages; and the scratch space to gather them.

    Args:
        nbytes: of K and V together; at least one page.
        half_bytes: bytes of K (and of V) in a page, a multiple of 64.

    Raises:
        ValueError: the pool holds no page.
    """

    def __init__(self, nbytes: int, half_bytes: int, device: str = "cpu") -> None:
        self._sizes = PageSizes(nbytes, half_bytes)
        self.half_bytes = half_bytes
        self.pages = self._sizes.count
        self._k, self._v = (_room(self.pages + 2, half_bytes, torch.device(device)) for _ in range(2))
        self._scratch: dict[str, Tensor] = {}
        self._views: dict[tuple[Geometry, int], PageView] = {}
        self.clear([self.padding, self.spill])

    def second_lane(self) -> PagePool:
        """The same pages with scratch of their own: for steps that run at the same time as others."""
        other = copy.copy(self)
        other._scratch = {}
        return other

    @property
    def padding(self) -> int:
        """Id of the page that is always zero and never handed out."""
        return self.pages

    @property
    def spill(self) -> int:
        """Id of the page for K and V that nobody reads, of any geometry; never handed out."""
        return self.pages + 1

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that can be handed out."""
        return 2 * self.pages * self.half_bytes

    def clear(self, pages: Sequence[int]) -> None:
        """Zero these pages."""
        index = put(pages, self._k.device)
        for half in (self._k, self._v):
            half.view(torch.int64).index_fill_(0, index, 0)  # eight bytes at a time

    def read(self, pages: Sequence[int]) -> Tensor:
        """What is in these pages: uint8 [pages, 2 * half_bytes] on the CPU, K before V; a copy. Raises ValueError for
        others' pages.
        """
        return self.held(pages).cpu()

    def held(self, pages: Sequence[int]) -> Tensor:
        """As `read`, on the pages' device."""
        index = self._index(pages)
        out = torch.empty((len(pages), 2, self.half_bytes), dtype=torch.uint8, device=self._k.device)
        for at, half in enumerate((self._k, self._v)):
            torch.index_select(half, 0, index, out=out[:, at])
        return out.flatten(1)

    def write(self, pages: Sequence[int], data: Tensor) -> None:
        """Put there what `read` gives. Raises ValueError for others' pages and for data of another shape."""
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
        """Tokens of this geometry in a page. Raises NotServable when not one fits."""
        return self._sizes.page_tokens(geometry)

    def view(self, geometry: Geometry, page_tokens: int) -> PageView:
        """The pool as pages of this geometry with so many tokens each. Raises NotServable when they do not fit."""
        key = (geometry, page_tokens)
        if key not in self._views:
            if page_tokens > self.page_tokens(geometry):
                raise NotServable(
                    f"{page_tokens} tokens of {geometry.token_bytes} bytes do not fit a page of {self.half_bytes} bytes"
                )
            used = page_tokens * geometry.token_bytes // geometry.dtype.itemsize
            shape = (self.pages + 2, page_tokens, geometry.kv_heads, geometry.head_dim)
            k, v = (half.view(geometry.dtype)[:, :used].view(shape) for half in (self._k, self._v))
            self._views[key] = PageView(k, v, page_tokens, geometry)
        return self._views[key]

    @property
    def scratches(self) -> tuple[Tensor, ...]:
        """The buffers there are now: whoever has their addresses must hold them, since larger ones may take their
        place.
        """
        return tuple(self._scratch.values())

    def scratch(self, name: str, nbytes: int) -> Tensor:
        """A byte buffer of at least `nbytes`, kept between steps: fresh memory costs more than the copy into it."""
        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes:
            size = max(nbytes + nbytes // 2, 1 << 20) // 64 * 64
            held = self._scratch[name] = torch.empty(size, dtype=torch.uint8, device=self._k.device)
        return held


def _room(pages: int, half_bytes: int, device: torch.device) -> Tensor:
    """[pages, bytes]. On a CPU in the system's large pages, where it has any: rows read their pages from all over the
    pool, and finding out where each lies costs a good part of that (measured: a tenth).
    """
    if device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system that has none, or not so much memory: torch says so better
            memory = mmap.mmap(-1, pages * half_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            memory.madvise(mmap.MADV_HUGEPAGE)
            return torch.frombuffer(memory, dtype=torch.uint8).view(pages, half_bytes)
    return torch.empty((pages, half_bytes), dtype=torch.uint8, device=device)
