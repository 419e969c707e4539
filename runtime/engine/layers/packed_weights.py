"""Packed weights of linear layers, in the fastest layout of this processor; each distinct weight once per device.

    packs.acquire(digest, weight) -> (layout, packed weight), or None where the plain weight stays

One layout serves any number of rows. With native kernels it is their layout, measured by
`benchmarks/serving/packed_weights.py`. Whether oneDNN's is faster than plain weights depends on the processor, so it is
measured at first use. Independent of layers and models.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from runtime.config import Weights
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.layers.matmul import CodedPanels, OneDnn, Panels, WeightLayout, plain_product
from surgery.quantize.decompress import CodedWeight
from surgery.tensors.pool import Counted

_log = logging.getLogger(__name__)

#: What is measured: the width and number of square matrices, the rows of decode steps, and the rounds.
_WIDTH, _MATRICES, _ROWS, _ROUNDS = 1024, 4, (1, 4, 16, 64), 5


@dataclass(frozen=True, slots=True)
class Packed:
    """A packed weight and its layout."""

    layout: WeightLayout
    data: Tensor


@functools.cache
def faster(layout: WeightLayout, dtype: torch.dtype, threads: int) -> bool:
    """Return whether a layout multiplies faster than plain weights on this processor, averaged over `_ROWS`.

    `threads` is part of the cache key: the result is measured once per layout, dtype and number of threads.
    """
    ratio = _measured(layout, dtype)
    _log.info(
        "%s weights in %s take %.2f times as long as plain ones with %d threads", dtype, layout.name, ratio, threads
    )
    return ratio < 1.0


@torch.inference_mode()
def _measured(layout: WeightLayout, dtype: torch.dtype) -> float:
    """Return the time of packed products relative to plain ones: the geometric mean over rows, measured alternately.

    Infinite if the layout cannot pack this dtype.
    """
    chance = torch.Generator().manual_seed(0)  # leaves the process's global generator untouched
    weights = [torch.randn(_WIDTH, _WIDTH, generator=chance).to(dtype) for _ in range(_MATRICES)]
    try:
        packed = [layout.product(layout.pack(weight), _WIDTH, None) for weight in weights]
    except (RuntimeError, AttributeError):
        return math.inf
    plain = [plain_product(weight, None) for weight in weights]
    ratio = 1.0
    for rows in _ROWS:
        x = torch.randn(1, rows, _WIDTH, generator=chance).to(dtype)
        sides: tuple[Callable[[], object], ...] = (
            lambda x=x: [product.multiply(x) for product in packed],  # type: ignore[misc]
            lambda x=x: [product.multiply(x) for product in plain],  # type: ignore[misc]
        )
        fastest = [math.inf, math.inf]
        for _ in range(_ROUNDS):
            for side, run in enumerate(sides):
                begin = time.perf_counter()
                run()
                fastest[side] = min(fastest[side], time.perf_counter() - begin)
        ratio *= (fastest[0] / fastest[1]) ** (1 / len(_ROWS))
    return ratio


class PackedWeights:
    """The packed weights of a device. Each `acquire` needs one `release`.

    Args:
        wanted: `plain` packs nothing, `packed` everything that can be packed, `auto` large weights where that is
            faster.
        kernels: the native kernels, if there are any; their layout is preferred.
        narrow: whether bfloat16 weights are packed for the kernels, too.
    """

    def __init__(
        self, wanted: Weights, device: torch.device, kernels: Kernels | None = None, narrow: bool = False
    ) -> None:
        self._wanted = wanted if device.type == "cpu" else "plain"
        self._ours = None if kernels is None else Panels(kernels, narrow=narrow)
        self._coded = None if kernels is None else CodedPanels(kernels)
        self._theirs = OneDnn()
        self._counted = Counted()
        self._layout_of: dict[str, WeightLayout] = {}

    def acquire(self, digest: str, weight: Tensor) -> Packed | None:
        """Return the packed form of a weight [out, in] and count one more user; None if the plain one is to be used."""
        if digest not in self._counted:
            made = self._packed(weight)
            if made is None:
                return None
            self._counted.put(digest, made.data)
            self._layout_of[digest] = made.layout
        return Packed(self._layout_of[digest], self._counted.acquire(digest))

    def acquire_coded(self, key: str, weight: CodedWeight) -> Packed:
        """Return the packed form of an int8 weight and count one more user; only where there are kernels."""
        if self._coded is None:
            raise RuntimeError("int8 weights are packed for the kernels only")
        if key not in self._counted:
            packed = self._coded.kernels.pack_coded(weight.codes, weight.inputs, weight.row_scales())
            self._counted.put(key, packed)
            self._layout_of[key] = self._coded
        return Packed(self._layout_of[key], self._counted.acquire(key))

    def release(self, digests: Iterable[str]) -> None:
        """Count one user less; a weight without users is dropped."""
        self._counted.release(digests)

    def users(self, digest: str) -> int:
        """Return a weight's number of users."""
        return self._counted.users(digest)

    def nbytes_of(self, digest: str) -> int:
        """Return the bytes of a weight, 0 if it is not held."""
        return self._counted.nbytes_of(digest)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights held, each once (without the padding of oneDNN's layout)."""
        return self._counted.nbytes

    def _packed(self, weight: Tensor) -> Packed | None:
        layout = self._layout_for(weight)
        if layout is None:
            return None
        try:
            return Packed(layout, layout.pack(weight))
        except (RuntimeError, AttributeError):
            return None

    def _layout_for(self, weight: Tensor) -> WeightLayout | None:
        if self._wanted == "plain" or weight.dim() != 2:
            return None
        if self._ours is not None and self._ours.takes(weight.dtype):
            return self._ours
        if not self._theirs.takes(weight.dtype):
            return None
        if self._wanted == "packed":
            return self._theirs
        worth = weight.numel() >= self._theirs.smallest
        return self._theirs if worth and faster(self._theirs, weight.dtype, torch.get_num_threads()) else None
