"""Between tensors and the arrays that pass from device to device (`runtime.stages.Array`), by their bytes, whatever the dtype.

Out: one copy to the host, where the tensor is not there already; the arrays are views of it. In: one copy, into what the rows of a model
start from together. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from runtime.stages import Array, Likeness


def arrays_of(hidden: Tensor, spans: Iterable[tuple[int, int]]) -> list[Array]:
    """Tokens [lo, hi) of hidden states [1, tokens, width], an array [hi - lo, width] for each span."""
    host = hidden[0].cpu().contiguous()
    width, name = host.shape[1], _name_of(host.dtype)
    data, size = _bytes_of(host), width * host.element_size()
    return [Array(name, (hi - lo, width), data[lo * size : hi * size]) for lo, hi in spans]


def array_of(pages: Tensor) -> Array:
    """A contiguous tensor of the host as it is."""
    return Array(_name_of(pages.dtype), tuple(pages.shape), _bytes_of(pages))


def joined(arrays: Sequence[Array], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Arrays [some, width] below each other: [rows, width] = `shape`, on the host. Raises ValueError unless all fits, dtypes too."""
    out, name = torch.empty(shape, dtype=dtype), _name_of(dtype)
    into, size, at = _bytes_of(out), shape[1] * dtype.itemsize, 0
    for array in arrays:
        if array.dtype != name or array.shape[1:] != shape[1:] or memoryview(array.data).nbytes != array.shape[0] * size:
            raise ValueError(f"{array.dtype} {array.shape} is not {name} [.., {shape[1]}] as it should be")
        at += array.shape[0] * size
    if at != into.nbytes:
        raise ValueError(f"{at} bytes where {into.nbytes} should be")
    into[:] = b"".join(array.data for array in arrays)
    return out


def likeness(a: Array, b: Array) -> Likeness:
    """Of two arrays [tokens, width] of one dtype and shape; what has no cosine (zeros, infinities) is not alike at all: -1."""
    x, y = (_tensor_of(each) for each in (a, b))
    if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return Likeness(True, 1.0)
    x, y = x.double(), y.double()
    found = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return Likeness(False, float(torch.nan_to_num(found, nan=-1.0).min()))


def _tensor_of(array: Array) -> Tensor:
    dtype = getattr(torch, array.dtype)
    return joined([array], (array.shape[0], array.shape[1]), dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
