"""The interface of all kinds of source that an ingest reads.

A source is parsed and checked on construction; the tensors' bytes are read later, as a stream. Keys, dtypes and shapes
are as in the files; the store, families and adapters play no part here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zoo.errors import MalformedCheckpoint


class SourceTensor(Protocol):
    """A tensor of a source: a `zoo.objects.sources.ByteSource` with its key on disk. `dtype` is safetensors' name."""

    @property
    def key(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        """Yield all bytes in order, at most `size` at a time; each call starts again and gives the same bytes."""
        ...


@dataclass(frozen=True, slots=True)
class SourceWeights:
    """One weight file. `header` is its first bytes verbatim: header + tensors in file order = the file."""

    path: str
    header: bytes
    tensors: tuple[SourceTensor, ...]


@dataclass(frozen=True, slots=True)
class SourceSide:
    """A file beside the weights, whole. `path` is relative to the folder, with forward slashes.

    Fields:
        derived: Made of what the weight file holds (GGUF's metadata): used, but not part of the checkpoint.
    """

    path: str
    data: bytes
    derived: bool = False


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed checkpoint. At least one of `config` and `adapter` is present.

    Fields:
        origin: Where it came from: a hub id, `id@revision`, or an absolute path.
        config: `config.json`.
        adapter: `adapter_config.json`.
        weights: The files as they came; an export writes them again.
        notes: What was left out or changed when reading.
        decoded: The model's tensors, where the files hold them in another form (GGUF's blocks); None where these are
            the files' own.
    """

    origin: str
    config: Mapping[str, Any] | None
    adapter: Mapping[str, Any] | None
    weights: tuple[SourceWeights, ...]
    sides: tuple[SourceSide, ...]
    notes: tuple[str, ...] = ()
    decoded: tuple[SourceTensor, ...] | None = None

    def file_tensors(self) -> Iterator[SourceTensor]:
        """Yield every tensor of every weight file as it lies there, in file order."""
        for weights in self.weights:
            yield from weights.tensors

    def tensors(self) -> Iterator[SourceTensor]:
        """Yield every tensor of the model, under its key in transformers' checkpoints."""
        yield from self.file_tensors() if self.decoded is None else self.decoded

    def side(self, path: str) -> bytes | None:
        """Return the bytes of one side file; None if absent."""
        return next((side.data for side in self.sides if side.path == path), None)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor stored verbatim in a file, from byte `begin` on."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    path: Path
    begin: int

    def chunks(self, size: int) -> Iterator[bytes]:
        """Yield the bytes. Raises MalformedCheckpoint if the file is unreadable, or shorter than when parsed."""
        left = self.nbytes
        try:
            with self.path.open("rb", buffering=0) as file:
                file.seek(self.begin)
                while left:
                    chunk = file.read(min(size, left))
                    if not chunk:
                        raise MalformedCheckpoint(f"{self.path.name} ends inside tensor {self.key!r}")
                    left -= len(chunk)
                    yield chunk
        except OSError as error:
            raise MalformedCheckpoint(f"{self.path} cannot be read: {error.strerror or error}") from error
