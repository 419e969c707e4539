"""Between tensors and the arrays that pass from device to device (`runtime.chains.Array`), by their bytes, whatever the
dtype.

Out: one copy to the host, where the tensor is not there already; the array is a view of it. In: one copy, into what the
rows of a model start from together. Where arrays go directly from device to device (`engine.tensors.links`) their data
is a flat tensor of uint8 on its device, of which `len` and slices mean what they mean of bytes; such a one is never
taken to the host here, but to be compared, or where bytes are asked for. Knows nothing of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from runtime.chains import Array, Likeness, Stacked


def whole_of(hidden: Tensor, stays: bool = False) -> Array:
    """Hidden states [1, tokens, width] as an array [tokens, width]. `stays`: on their device."""
    return staying(hidden[0]) if stays else array_of(hidden[0].cpu().contiguous())


def staying(tensor: Tensor) -> Array:
    """A tensor on its device, as it is there."""
    return Array(_name_of(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8))


def is_tensor(array: Array) -> bool:
    """Whether its data is a flat tensor of uint8."""
    return isinstance(array.data, Tensor)


def flat_of(array: Array) -> Tensor:
    """Its bytes, flat, where they lie; of bytes a view, only to be read."""
    if is_tensor(array):
        return array.data  # type: ignore[no-any-return]
    if not memoryview(array.data).nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(array.data, dtype=torch.uint8)


def array_of(pages: Tensor) -> Array:
    """A contiguous tensor of the host as it is."""
    return Array(_name_of(pages.dtype), tuple(pages.shape), bytes_of(pages))


def gathered(
    inputs: Mapping[str, Array],
    names: Sequence[str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """As `joined`, those of these rows; one copy where they lie back to back. Raises KeyError for a row that has
    none.
    """
    return joined(_parts(inputs, names), shape, dtype, device)


def gather(inputs: Mapping[str, Array], names: Sequence[str], into: memoryview, width: int, dtype: torch.dtype) -> None:
    """As `gathered`, into bytes."""
    _put(_parts(inputs, names), into, width, dtype)


def _parts(inputs: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
    if isinstance(inputs, Stacked) and inputs.names == tuple(names):  # in one piece
        return [inputs.whole]
    return [inputs[name] for name in names]


def joined(
    arrays: Sequence[Array], shape: tuple[int, int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Arrays [some, width] below each other: a tensor [rows, width] = `shape` of its own, on `device` (the host).
    Raises ValueError unless all fits, dtypes too."""
    target = device or torch.device("cpu")
    if not any(map(is_tensor, arrays)):
        out = torch.empty(shape, dtype=dtype)
        _put(arrays, bytes_of(out), shape[1], dtype)
        return out.to(target)
    _require_fit(arrays, shape[0], shape[1], dtype)
    whole = torch.empty(shape, dtype=dtype, device=target)
    into, at = whole.view(-1).view(torch.uint8), 0
    for array in arrays:
        part = flat_of(array)
        into[at : at + part.numel()].copy_(part)
        at += part.numel()
    return whole


def _put(arrays: Sequence[Array], into: memoryview, width: int, dtype: torch.dtype) -> None:
    _require_fit(arrays, into.nbytes // (width * dtype.itemsize), width, dtype)
    into[:] = _memory(arrays[0]) if len(arrays) == 1 else b"".join(map(_memory, arrays))


def _require_fit(arrays: Sequence[Array], rows: int, width: int, dtype: torch.dtype) -> None:
    """Raises ValueError unless these are so many rows."""
    name, size = _name_of(dtype), width * dtype.itemsize
    for array in arrays:
        nbytes = len(array.data) if is_tensor(array) else memoryview(array.data).nbytes
        if array.dtype != name or array.shape[1:] != (width,) or nbytes != array.shape[0] * size:
            raise ValueError(f"{array.dtype} {array.shape} is not {name} [.., {width}] as it should be")
    there = sum(array.shape[0] for array in arrays)
    if there != rows:
        raise ValueError(f"{there * size} bytes where {rows * size} should be")


def _memory(array: Array) -> memoryview:
    """Its bytes in the host's memory; they are copied there if they are not."""
    return bytes_of(array.data.cpu()) if is_tensor(array) else memoryview(array.data).cast("B")


def likeness(a: Array, b: Array) -> Likeness:
    """Of two arrays [tokens, width] of one dtype and shape; what has no cosine (zeros, infinities) is not alike at all:
    -1.
    """
    x, y = (_tensor_of(each) for each in (a, b))
    y = y.to(x.device)
    if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
        return Likeness(True, 1.0)
    x, y = x.double(), y.double()
    found = (x * y).sum(-1) / (x.norm(dim=-1) * y.norm(dim=-1))
    return Likeness(False, float(torch.nan_to_num(found, nan=-1.0).min()))


def _tensor_of(array: Array) -> Tensor:
    dtype = getattr(torch, array.dtype)
    return joined([array], (array.shape[0], array.shape[1]), dtype, array.data.device if is_tensor(array) else None)


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor of the host, to be read or written."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@lru_cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
