"""Tensors of a GGUF file, dequantised by the `gguf` package as transformers does, in runs of bounded size.

    blocks of the file --gguf--> float32 --order of rotary dimensions, norms - 1--> --cast--> bytes

Dequantisation works on each block alone, so any run of blocks gives the same bits as the whole tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from surgery.sources.base import FileTensor
from surgery.sources.gguf.header import GgufEntry
from zoo.errors import InputError, MalformedCheckpoint
from zoo.manifest import DTYPE_BYTES

if TYPE_CHECKING:
    import numpy as np

StoredDtype = Literal["F32", "F16", "BF16"]

#: Bytes of float32 that one run gives, about. Dequantisation takes several times that in passing, so a run that fits in
#: the processor's cache is also the fastest.
RUN_BYTES = 1 << 18


def check_package() -> None:
    """Raise InputError if the package that dequantises is not installed."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise InputError("reading a GGUF file needs the package gguf: pip install 'blockzoo[gguf]'") from None


def span_tensor(entry: GgufEntry, path: Path) -> FileTensor:
    """Return a tensor's bytes as they lie in the file, with the padding behind them.

    Plain elements without padding keep dtype and shape, so that they are stored once with a model's equal tensors.
    """
    if entry.block.dtype is not None and entry.span == entry.nbytes:
        return FileTensor(entry.name, entry.block.dtype, entry.shape, entry.nbytes, path, entry.begin)
    return FileTensor(entry.name, "U8", (entry.span,), entry.span, path, entry.begin)


@dataclass(frozen=True, slots=True)
class DequantisedTensor:
    """A tensor of the model: a `SourceTensor` with elements of `dtype`.

    Fields:
        heads: Heads in which the rows of pairs become halves (q and k of llama); 0 for none.
        lowered: Subtract 1 (gemma's norms).
    """

    key: str
    dtype: StoredDtype
    entry: GgufEntry
    path: Path
    heads: int = 0
    lowered: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def nbytes(self) -> int:
        return self._elements * DTYPE_BYTES[self.dtype]

    @property
    def _elements(self) -> int:
        return self.entry.nbytes // self.entry.block.nbytes * self.entry.block.elements

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        """Yield all bytes in order, at most `size` at a time. Holds one run, never the whole tensor.

        Raises MalformedCheckpoint if the file has become shorter, or the rows do not divide into heads.
        """
        if self.entry.block.dtype == self.dtype and not self.heads and not self.lowered:
            yield from FileTensor(self.key, self.dtype, self.shape, self.nbytes, self.path, self.entry.begin).chunks(
                size
            )
            return
        for run in self._runs():
            data = _cast(self._dequantised(run), self.dtype).reshape(-1).view("u1").data
            for begin in range(0, len(data), size):
                yield data[begin : begin + size]

    def _runs(self) -> Iterator[bytes]:
        """Yield the blocks of the file in the order of the model's rows."""
        with self.path.open("rb", buffering=0) as file:
            if self.heads:
                yield from self._turned_rows(file.fileno())
                return
            block = self.entry.block
            most = max(1, RUN_BYTES // (4 * block.elements)) * block.nbytes
            for begin in range(0, self.entry.nbytes, most):
                yield _read_at(file.fileno(), self.entry.begin + begin, min(most, self.entry.nbytes - begin))

    def _turned_rows(self, descriptor: int) -> Iterator[bytes]:
        """Yield runs of rows; row (head, part, pair) of the model is row (head, pair, part) of the file."""
        rows = self.shape[0]
        if rows % (2 * self.heads):
            raise MalformedCheckpoint(
                f"tensor {self.entry.name!r} has {rows} rows, which do not make {self.heads} heads"
            )
        half = rows // self.heads // 2
        width = self.entry.nbytes // rows
        most = max(1, RUN_BYTES // (4 * self._elements // rows))
        for begin in range(0, rows, most):
            run = bytearray()
            for row in range(begin, min(begin + most, rows)):
                head, within = divmod(row, 2 * half)
                part, pair = divmod(within, half)
                run += _read_at(descriptor, self.entry.begin + (head * 2 * half + 2 * pair + part) * width, width)
            yield bytes(run)

    def _dequantised(self, run: bytes) -> np.ndarray:
        """Return the float32 elements of whole blocks."""
        import numpy as np
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        block = self.entry.block
        data = np.frombuffer(run, np.uint8).reshape(1, -1)  # one row: the package works row by row
        with np.errstate(all="ignore"):  # a file may hold scales that are not finite; so does the model then
            values: np.ndarray = dequantize(data, GGMLQuantizationType[block.name])
            return values - 1 if self.lowered else values


def read_floats(entry: GgufEntry, path: Path, most: int) -> tuple[float, ...]:
    """Return the values of a small tensor of float32. Raises MalformedCheckpoint for any other."""
    import struct

    count = entry.nbytes // 4
    if entry.block.dtype != "F32" or count > most:
        raise MalformedCheckpoint(f"tensor {entry.name!r} is not a short list of float32")
    with path.open("rb", buffering=0) as file:
        return struct.unpack(f"<{count}f", _read_at(file.fileno(), entry.begin, entry.nbytes))


def _read_at(descriptor: int, begin: int, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        part = os.pread(descriptor, count - len(parts), begin + len(parts))
        if not part:
            raise MalformedCheckpoint("the file became shorter while it was read")
        parts += part
    return bytes(parts)


def _cast(values: np.ndarray, dtype: StoredDtype) -> np.ndarray:
    """Return float32 values in another dtype, rounded to the nearest, ties to even, as torch does."""
    import numpy as np

    values = np.ascontiguousarray(values, dtype=np.float32)
    if dtype == "F32":
        return values
    with np.errstate(all="ignore"):
        if dtype == "F16":
            return values.astype(np.float16)
        bits = values.view(np.uint32)
        rounded = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
