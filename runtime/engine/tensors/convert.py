"""Convert between tensors and the arrays that pass between devices (`runtime.chains.Array`), byte for byte.

Outgoing: at most one copy to the host; the array is a view of it. Incoming: one copy into the tensor that a model's
rows start from. With direct links (`engine.tensors.links`) an array's data is a flat uint8 tensor on its device, on
which `len` and slices mean the same as on bytes. Such an array is copied to the host only to be compared, or where
bytes are requested.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch
from torch import Tensor

from runtime.chains import Array, Likeness, Stacked


def whole_of(hidden: Tensor, stays: bool = False) -> Array:
    """Return hidden states [1, tokens, width] as an array [tokens, width]; `stays` keeps it on the tensor's device."""
    return staying(hidden[0]) if stays else array_of(hidden[0].cpu().contiguous())


def staying(tensor: Tensor) -> Array:
    """Return a tensor as an array on its device."""
    return Array(_name_of(tensor.dtype), tuple(tensor.shape), tensor.contiguous().reshape(-1).view(torch.uint8))


def is_tensor(array: Array) -> bool:
    """Return whether the array's data is a flat uint8 tensor."""
    return isinstance(array.data, Tensor)


def flat_of(array: Array) -> Tensor:
    """Return the array's bytes as a flat tensor on their device. For host bytes this is a read-only view."""
    if is_tensor(array):
        return array.data  # type: ignore[no-any-return]
    if not memoryview(array.data).nbytes:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(array.data, dtype=torch.uint8)


def array_of(pages: Tensor) -> Array:
    """Return a contiguous host tensor as an array, without a copy."""
    return Array(_name_of(pages.dtype), tuple(pages.shape), bytes_of(pages))


def gathered(
    inputs: Mapping[str, Array],
    names: Sequence[str],
    shape: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> Tensor:
    """Return the arrays of these rows as one tensor, as `joined`; one copy if they are back to back in one array.

    Raises KeyError for a row without an array.
    """
    return joined(_parts(inputs, names), shape, dtype, device)


def gather(inputs: Mapping[str, Array], names: Sequence[str], into: memoryview, width: int, dtype: torch.dtype) -> None:
    """Write the arrays of these rows into host bytes; see `gathered`."""
    _put(_parts(inputs, names), into, width, dtype)


def _parts(inputs: Mapping[str, Array], names: Sequence[str]) -> list[Array]:
    if isinstance(inputs, Stacked) and inputs.names == tuple(names):  # in one piece
        return [inputs.whole]
    return [inputs[name] for name in names]


def joined(
    arrays: Sequence[Array], shape: tuple[int, int], dtype: torch.dtype, device: torch.device | None = None
) -> Tensor:
    """Concatenate arrays [n, width] into a new tensor [rows, width] of `shape` on `device` (None: the host).

    Raises ValueError unless the sizes and dtypes match.
    """
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
    """Raise ValueError unless the arrays have this width and dtype and `rows` rows in all."""
    name, size = _name_of(dtype), width * dtype.itemsize
    for array in arrays:
        nbytes = len(array.data) if is_tensor(array) else memoryview(array.data).nbytes
        if array.dtype != name or array.shape[1:] != (width,) or nbytes != array.shape[0] * size:
            raise ValueError(f"{array.dtype} {array.shape} is not {name} [.., {width}] as it should be")
    there = sum(array.shape[0] for array in arrays)
    if there != rows:
        raise ValueError(f"{there * size} bytes where {rows * size} should be")


def _memory(array: Array) -> memoryview:
    """Return the array's bytes in host memory, copied there if necessary."""
    return bytes_of(array.data.cpu()) if is_tensor(array) else memoryview(array.data).cast("B")


def likeness(a: Array, b: Array) -> Likeness:
    """Compare two arrays [tokens, width] of one dtype and shape.

    A token without a cosine (zeros, infinities) counts as -1.
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
    """Return the bytes of a contiguous host tensor, readable and writable."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


@lru_cache
def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
