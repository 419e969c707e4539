"""Read Meta's `consolidated.NN.pth` shards tensor by tensor: inventory of a shard, and tensors joined while streaming.

Shards are the parts of one model cut for model parallelism: column-parallel matrices are split along their rows (as
stored), row-parallel ones along their columns. A joined tensor is streamed in runs of rows, so memory stays at one
chunk for any tensor size.

The files are pickles. They are only read with `weights_only=True`, and only for their structure: tensors are built
without bytes, their offsets in the file are recorded, and the bytes are then read directly.
"""

from __future__ import annotations

import os
import struct
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zoo.errors import MalformedCheckpoint, UnsafeCheckpoint
from zoo.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Axis = Literal["rows", "columns"]

#: Limit for a state dict's pickle, which holds names and shapes; the largest model's is far smaller.
_LARGEST_PICKLE = 64_000_000
_LOCAL_HEADER = struct.Struct("<26xHH")


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a shard: `dtype` is safetensors' name, `begin` the offset of its elements in the file."""

    dtype: str
    shape: tuple[int, ...]
    begin: int


def inventory(path: Path) -> dict[str, Stored]:
    """Return names, dtypes, shapes and offsets of a shard's tensors; none of their bytes is read.

    Raises:
        UnsafeCheckpoint: The pickle contains more than tensors; nothing of it was run.
        MalformedCheckpoint: Not a zip archive of contiguous little-endian floating point tensors.
    """
    records = _records(path)
    return {key: _stored(path, key, tensor, records) for key, tensor in _structure(path).items()}


def _records(path: Path) -> dict[int, int]:
    """Return offset of each record's bytes -> their number.

    Compressed records are refused: they cannot be read in place, and would let a small file unpack to a huge pickle.
    """
    try:
        with zipfile.ZipFile(path) as archive, path.open("rb") as file:
            infos = archive.infolist()
            order = next(
                (archive.read(info) for info in infos if info.filename.endswith("/byteorder") and info.file_size < 16),
                b"little",
            )
            records = {_data_offset(file.fileno(), info): info.file_size for info in infos}
    except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError, struct.error) as error:
        raise MalformedCheckpoint(f"{path.name} is not a PyTorch checkpoint in zip format: {error}") from None
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or (
            info.filename.endswith(".pkl") and info.file_size > _LARGEST_PICKLE
        ):
            raise MalformedCheckpoint(f"{path.name}: record {info.filename[:100]!r} is compressed or too large")
    if order != b"little":
        raise MalformedCheckpoint(f"{path.name} was written on a big-endian machine")
    return records


def _data_offset(descriptor: int, info: zipfile.ZipInfo) -> int:
    """Return the offset of a record's bytes.

    They follow its local header, where name and padding may differ in length from the central directory's.
    """
    name, extra = _LOCAL_HEADER.unpack(os.pread(descriptor, _LOCAL_HEADER.size, info.header_offset))
    return info.header_offset + _LOCAL_HEADER.size + int(name) + int(extra)


def _structure(path: Path) -> Mapping[str, Tensor]:
    """Return the shard's state dict on the meta device: tensors without bytes."""
    import torch

    try:
        state = torch.load(path, map_location="meta", weights_only=True, mmap=True)
    except Exception as error:
        # torch raises UnpicklingError for what it refuses, and almost any exception for a damaged archive; its messages
        # are long.
        if type(error).__name__ == "UnpicklingError":
            raise UnsafeCheckpoint(
                f"{path.name} holds more than tensors; it was refused and nothing of it was run"
            ) from None
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise MalformedCheckpoint(f"{path.name} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise MalformedCheckpoint(f"{path.name} does not hold a state dict")
    return state


def _stored(path: Path, key: str, tensor: object, records: Mapping[int, int]) -> Stored:
    import torch

    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in names:
        raise MalformedCheckpoint(f"{path.name}: {key!r} is not a tensor of float32, float16 or bfloat16")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise MalformedCheckpoint(f"{path.name}: tensor {key!r} is not stored contiguously")
    # torch documents this attribute for loads without bytes: the offset of the storage's record. Checked against the
    # archive, since torch computes it.
    record = tensor.untyped_storage()._checkpoint_offset
    begin = int(tensor.storage_offset()) * tensor.element_size()
    if record is None or begin + tensor.numel() * tensor.element_size() > records.get(record, -1):
        raise MalformedCheckpoint(f"{path.name}: tensor {key!r} does not lie inside a record of the archive")
    return Stored(names[tensor.dtype], tuple(tensor.shape), record + begin)


@dataclass(frozen=True, slots=True)
class ShardPart:
    """A matrix in a shard; a vector is a matrix of one column."""

    path: Path
    begin: int
    rows: int
    columns: int


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor joined from parts in several shards: a `SourceTensor`.

    Fields:
        parts: In order; a single one for a tensor that all shards replicate.
        head_rows: Rows per attention head if the rotary layout is to be changed from Meta's interleaved pairs to
            Hugging Face's halves, else 0.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    parts: tuple[ShardPart, ...]
    axis: Axis = "rows"
    head_rows: int = 0

    @property
    def nbytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size

    def chunks(self, size: int) -> Iterator[memoryview]:
        """Yield all bytes in order, at most `size` at a time. Holds the chunk and its parts, never the whole tensor.

        Raises MalformedCheckpoint if a file has become shorter since it was inspected.
        """
        for run in self._runs(size):
            data = _halves(run, self.head_rows).reshape(-1).data.cast("B")
            for begin in range(0, len(data), size):
                yield data[begin : begin + size]

    def _runs(self, size: int) -> Iterator[np.ndarray]:
        """Yield runs of whole rows (whole heads) of the joined matrix, each of about `size` bytes."""
        import numpy as np

        width = DTYPE_BYTES[self.dtype]
        with ExitStack() as stack:
            files = [stack.enter_context(part.path.open("rb", buffering=0)) for part in self.parts]
            if self.axis == "columns":
                for lo, hi in _ranges(
                    self.parts[0].rows, sum(part.columns for part in self.parts) * width, self.head_rows or 1, size
                ):
                    blocks = [
                        _read_rows(file, part, lo, hi, width) for file, part in zip(files, self.parts, strict=True)
                    ]
                    yield np.concatenate(blocks, axis=1)
                return
            for file, part in zip(files, self.parts, strict=True):
                for lo, hi in _ranges(part.rows, part.columns * width, self.head_rows or 1, size):
                    yield _read_rows(file, part, lo, hi, width)


def _ranges(rows: int, row_bytes: int, step: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield row ranges [lo, hi) of whole steps, each of about `size` bytes."""
    count = max(1, size // (row_bytes * step)) * step
    for lo in range(0, rows, count):
        yield lo, min(lo + count, rows)


def _read_rows(file: FileIO, part: ShardPart, lo: int, hi: int, width: int) -> np.ndarray:
    """Return rows [lo, hi) of a part: an array [hi - lo, columns] of elements of `width` bytes, not interpreted."""
    import numpy as np

    array = np.empty((hi - lo, part.columns), dtype=f"u{width}")
    view = array.reshape(-1).data.cast("B")
    file.seek(part.begin + lo * part.columns * width)
    filled = 0
    while filled < len(view):
        count = file.readinto(view[filled:])
        if not count:
            raise MalformedCheckpoint(f"{part.path.name} became shorter while it was read")
        filled += count
    return array


def _halves(rows: np.ndarray, head_rows: int) -> np.ndarray:
    """Reorder each head's rows from (pair, part) to (part, pair): rotary dimension 2i + j moves to j * half + i."""
    if not head_rows:
        return rows
    heads, columns = rows.shape[0] // head_rows, rows.shape[1]
    return rows.reshape(heads, head_rows // 2, 2, columns).swapaxes(1, 2).reshape(rows.shape)


def same_bytes(one: JoinedTensor, other: JoinedTensor, size: int = 1 << 20) -> bool:
    """Return whether two tensors are equal bit for bit.

    Streams both up to the first difference; their chunks may be cut at different offsets.
    """
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    left, right = one.chunks(size), other.chunks(size)
    a, b = memoryview(b""), memoryview(b"")
    while True:
        a, b = a or next(left, a), b or next(right, b)
        count = min(len(a), len(b))
        if count == 0:
            return len(a) == len(b)
        if a[:count] != b[:count]:
            return False
        a, b = a[count:], b[count:]
