"""Meta's `consolidated.NN.pth` shards, read tensor by tensor: the map of what they hold, and tensors joined on the fly.

Shards are the parts of one model cut for model parallelism: column-parallel matrices were split along their rows (as
stored), row-parallel ones along their columns. A joined tensor is streamed in runs of rows, so that memory stays at one
chunk whatever the tensor's size. It knows nothing of names, of params.json or of Hugging Face's layout.

Pickle is what these files are; they are only ever read with `weights_only=True` and memory-mapped.
"""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from zoo.errors import MalformedCheckpoint, UnsafeCheckpoint
from zoo.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

Axis = Literal["rows", "columns"]

#: A state dict's pickle holds names and shapes; the largest model's is far below this.
_LARGEST_PICKLE = 64_000_000


@dataclass(frozen=True, slots=True)
class Stored:
    """What one shard holds under a name. `dtype` is safetensors' name."""

    dtype: str
    shape: tuple[int, ...]


def inventory(path: Path) -> dict[str, Stored]:
    """Names, dtypes and shapes of a shard; no tensor's bytes are read.

    Raises:
        UnsafeCheckpoint: the pickle asks for more than tensors; nothing of it was run.
        MalformedCheckpoint: not a zip archive of contiguous floating point tensors.
    """
    _check_archive(path)
    return {key: _stored(path, key, tensor) for key, tensor in _load(path).items()}


def _check_archive(path: Path) -> None:
    """Memory mapping needs plain records; compressed ones would also let a small file unpack to a huge pickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            records = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError) as error:
        raise MalformedCheckpoint(f"{path.name} is not a PyTorch checkpoint in zip format: {error}") from None
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or (record.filename.endswith(".pkl") and record.file_size > _LARGEST_PICKLE):
            raise MalformedCheckpoint(f"{path.name}: record {record.filename!r} is compressed or too large")


def _load(path: Path) -> dict[str, Tensor]:
    """The shard's state dict, mapped. It lives as long as its tensors do, so that no page outstays its use."""
    import torch

    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # torch raises UnpicklingError for what it refuses, and almost anything for a damaged archive; its texts span pages.
        if type(error).__name__ == "UnpicklingError":
            raise UnsafeCheckpoint(f"{path.name} holds more than tensors; it was refused and nothing of it was run") from None
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise MalformedCheckpoint(f"{path.name} cannot be read: {reason}") from None
    if not isinstance(state, dict) or not all(isinstance(key, str) for key in state):
        raise MalformedCheckpoint(f"{path.name} does not hold a state dict")
    return state


def _stored(path: Path, key: str, tensor: object) -> Stored:
    import torch

    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in names:
        raise MalformedCheckpoint(f"{path.name}: {key!r} is not a tensor of float32, float16 or bfloat16")
    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise MalformedCheckpoint(f"{path.name}: tensor {key!r} is not stored contiguously")
    return Stored(names[tensor.dtype], tuple(tensor.shape))


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor put together from the same name in several shards: a `SourceTensor`.

    `shards`: the files in order; one file for a tensor that all of them replicate. `head_rows`: rows per attention head
    where the rotary layout is to be changed from Meta's interleaved pairs to Hugging Face's halves, else 0.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    name: str
    shards: tuple[Path, ...]
    axis: Axis = "rows"
    head_rows: int = 0

    @property
    def nbytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size

    def chunks(self, size: int) -> Iterator[memoryview]:
        """All bytes in order, at most `size` at a time. Holds the chunk and its parts, never the tensor."""
        parts = [self._part(path) for path in self.shards]
        for run in self._runs(parts, size):
            data = _bytes_of(_halves(run, self.head_rows))
            for begin in range(0, len(data), size):
                yield data[begin : begin + size]

    def _part(self, path: Path) -> Tensor:
        """A shard's part as a matrix; a vector is a matrix of one column."""
        tensor = _load(path).get(self.name)
        if tensor is None:
            raise MalformedCheckpoint(f"{path.name} no longer holds {self.name!r}")
        return tensor.unsqueeze(1) if tensor.dim() == 1 else tensor

    def _runs(self, parts: list[Tensor], size: int) -> Iterator[Tensor]:
        """Runs of whole rows (whole heads) of the joined matrix, each of about `size` bytes."""
        import torch

        step = self.head_rows or 1
        if self.axis == "columns":
            rows = _rows_per_run(sum(part.shape[1] for part in parts) * parts[0].element_size(), step, size)
            for lo in range(0, parts[0].shape[0], rows):
                yield torch.cat([part[lo : lo + rows] for part in parts], dim=1)
            return
        for part in parts:
            rows = _rows_per_run(part.shape[1] * part.element_size(), step, size)
            for lo in range(0, part.shape[0], rows):
                yield part[lo : lo + rows]


def _rows_per_run(row_bytes: int, step: int, size: int) -> int:
    return max(1, size // (row_bytes * step)) * step


def _halves(rows: Tensor, head_rows: int) -> Tensor:
    """Rows of each head from (pair, part) order to (part, pair) order: rotary dimension 2i + j moves to j * half + i."""
    if not head_rows:
        return rows
    heads, columns = rows.shape[0] // head_rows, rows.shape[1]
    return rows.reshape(heads, head_rows // 2, 2, columns).transpose(1, 2).reshape(rows.shape)


def _bytes_of(tensor: Tensor) -> memoryview:
    import torch

    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")


def same_bytes(one: JoinedTensor, other: JoinedTensor, size: int = 1 << 20) -> bool:
    """Whether two tensors are equal bit for bit. Streams both (their chunks may be cut at different places), up to the first difference."""
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
