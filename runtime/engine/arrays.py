"""Between tensors and the arrays that pass from device to device (`runtime.stages.Array`), by their bytes, whatever the dtype.

Out: one copy to the host, where the tensor is not there already; the array is a view of it. In: one copy, into what the rows of a model
start from together. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from runtime.stages import Array, Likeness, Stacked


def whole_of(hidden: Tensor) -> Array:
    """Hidden states [1, tokens, width] as an array [tokens, width]."""
    return array_of(hidden[0].cpu().contiguous())


def array_of(pages: Tensor) -> Array:
    """A contiguous tensor of the host as it is."""
    return Array(_name_of(pages.dtype), tuple(pages.shape), bytes_of(pages))


def gathered(inputs: Mapping[str, Array], names: Sequence[str], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """As `joined`, those of these rows; one copy where they lie back to back. Raises KeyError for a row that has none."""
    out = torch.empty(shape, dtype=dtype)
    gather(inputs, names, bytes_of(out), shape[1], dtype)
    return out


def gather(inputs: Mapping[str, Array], names: Sequence[str], into: memoryview, width: int, dtype: torch.dtype) -> None:
    """As `gathered`, into bytes."""
    if isinstance(inputs, Stacked) and inputs.names == tuple(names):  # in one piece
        _put([inputs.whole], into, width, dtype)
    else:
        _put([inputs[name] for name in names], into, width, dtype)


def joined(arrays: Sequence[Array], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Arrays [some, width] below each other: [rows, width] = `shape`, on the host. Raises ValueError unless all fits, dtypes too."""
    out = torch.empty(shape, dtype=dtype)
    _put(arrays, bytes_of(out), shape[1], dtype)
    return out


def _put(arrays: Sequence[Array], into: memoryview, width: int, dtype: torch.dtype) -> None:
    name, size, at = _name_of(dtype), width * dtype.itemsize, 0
    for array in arrays:
        if array.dtype != name or array.shape[1:] != (width,) or memoryview(array.data).nbytes != array.shape[0] * size:
            raise ValueError(f"{array.dtype} {array.shape} is not {name} [.., {width}] as it should be")
        at += array.shape[0] * size
    if at != into.nbytes:
        raise ValueError(f"{at} bytes where {into.nbytes} should be")
    into[:] = memoryview(arrays[0].data).cast("B") if len(arrays) == 1 else b"".join(array.data for array in arrays)


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


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, to be read or written."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@lru_cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
