"""Weights of linear layers in the layout that oneDNN multiplies fastest, each distinct weight once on a device, instead of the plain one.

    packs.acquire(digest, weight) -> the packed weight, or None where the plain one stays

One layout serves any number of rows. Whether it is the faster one depends on the processor (on one with AVX-512 of AMD it takes half to
two thirds of the time of stock products at 4 to 64 rows; on an older one of Intel it is behind), so a first use measures both. Knows
nothing of layers or models.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from runtime.config import Weights
from surgery.tensors import Counted

_log = logging.getLogger(__name__)

#: Elements below which a call costs more than the product: such weights stay plain where the choice is measured.
_WORTH = 1 << 18
_DTYPES = (torch.float32, torch.bfloat16)
#: What is measured: so many square matrices, by the rows of decode steps.
_WIDTH, _MATRICES, _ROWS, _ROUNDS = 1024, 4, (1, 4, 16, 64), 5


def pack(weight: Tensor) -> Tensor:
    """A weight [out, in] in oneDNN's layout: still [out, in] to its readers, but opaque. `to_dense` undoes it.

    Raises:
        RuntimeError, AttributeError: this build of torch has no such layout for this dtype and processor.
    """
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 16)
    return packed


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """x [.., in] times a packed weight -> [.., out]."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


@functools.cache
def faster(dtype: torch.dtype, threads: int) -> bool:
    """Whether this processor multiplies packed weights faster with so many threads, over all of `_ROWS` (takes a fraction of a second)."""
    try:
        ratio = _measured(dtype)
    except (RuntimeError, AttributeError):
        return False
    _log.info("packed %s weights take %.2f times as long as plain ones with %d threads", dtype, ratio, threads)
    return ratio < 1.0


@torch.inference_mode()
def _measured(dtype: torch.dtype) -> float:
    """Time of packed products over that of the plain ones: geometric mean over rows. Both alternate."""
    from runtime.engine.linear import product_of

    chance = torch.Generator().manual_seed(0)  # the process's own randomness is its user's
    plain = [torch.randn(_WIDTH, _WIDTH, generator=chance).to(dtype) for _ in range(_MATRICES)]
    packed = [pack(weight) for weight in plain]
    products = [product_of(weight, None) for weight in plain]
    ratio = 1.0
    for rows in _ROWS:
        x = torch.randn(1, rows, _WIDTH, generator=chance).to(dtype)
        sides: tuple[Callable[[], object], ...] = (
            lambda x=x: [multiply(x, weight, None) for weight in packed],  # type: ignore[misc]
            lambda x=x: [product.of(x) for product in products],  # type: ignore[misc]
        )
        best = [float("inf"), float("inf")]
        for _ in range(_ROUNDS):
            for side, run in enumerate(sides):
                begin = time.perf_counter()
                run()
                best[side] = min(best[side], time.perf_counter() - begin)
        ratio *= (best[0] / best[1]) ** (1 / len(_ROWS))
    return ratio


class Packs:
    """The packed weights of a device. `acquire` and `release` go in pairs.

    Args:
        wanted: `plain` packs nothing, `packed` everything that can be, `auto` what is large enough where that is faster.
    """

    def __init__(self, wanted: Weights, device: torch.device) -> None:
        self._wanted = wanted if device.type == "cpu" else "plain"
        self._counted = Counted()

    def acquire(self, digest: str, weight: Tensor) -> Tensor | None:
        """The packed form of a weight [out, in], counted once more; None where the plain one is to be used."""
        if digest not in self._counted:
            packed = self._packed(weight)
            if packed is None:
                return None
            self._counted.put(digest, packed)
        return self._counted.take(digest)

    def release(self, digests: Iterable[str]) -> None:
        """Count down; a weight without users is dropped."""
        self._counted.release(digests)

    @property
    def nbytes(self) -> int:
        """Bytes of all weights held, each once (without what the layout pads)."""
        return self._counted.nbytes

    def _packed(self, weight: Tensor) -> Tensor | None:
        if self._wanted == "plain" or weight.dtype not in _DTYPES or weight.dim() != 2:
            return None
        if self._wanted == "auto" and (weight.numel() < _WORTH or not faster(weight.dtype, torch.get_num_threads())):
            return None
        try:
            return pack(weight)
        except (RuntimeError, AttributeError):
            return None
