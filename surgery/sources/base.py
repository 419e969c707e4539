"""What an ingest reads, whatever it was on disk: the vocabulary shared by all kinds of source.

A source is parsed and checked when it exists; the tensors' bytes are read later, as a stream. It knows nothing of
the store, of families or of adapters: keys, dtypes and shapes are as the files say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from zoo.errors import MalformedCheckpoint


class SourceTensor(Protocol):
    """A tensor on offer: a `zoo.objects.objects.ByteSource` with its key on disk. `dtype` is safetensors' name for
    it.
    """

    @property
    def key(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def nbytes(self) -> int: ...

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        """All bytes in order, at most `size` at a time; each call starts again and gives the same bytes."""
        ...


@dataclass(frozen=True, slots=True)
class SourceWeights:
    """One weight file. `header` is its first bytes verbatim, so that header + tensors in file order = the file."""

    path: str
    header: bytes
    tensors: tuple[SourceTensor, ...]


@dataclass(frozen=True, slots=True)
class SourceSide:
    """A file beside the weights, whole. `path` is relative to the folder, with forward slashes."""

    path: str
    data: bytes


@dataclass(frozen=True, slots=True)
class Source:
    """A parsed checkpoint.

    `origin` is where it came from: a hub id, `id@revision`, or an absolute path. `config` is `config.json`, `adapter`
    is `adapter_config.json`; at least one is there. `notes` tell what was left out or changed on the way.
    """

    origin: str
    config: Mapping[str, Any] | None
    adapter: Mapping[str, Any] | None
    weights: tuple[SourceWeights, ...]
    sides: tuple[SourceSide, ...]
    notes: tuple[str, ...] = ()

    def tensors(self) -> Iterator[SourceTensor]:
        """Every tensor of every weight file, in file order."""
        for weights in self.weights:
            yield from weights.tensors

    def side(self, path: str) -> bytes | None:
        """The bytes of one side file."""
        return next((side.data for side in self.sides if side.path == path), None)


@dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor that lies as it is in a file, from byte `begin` on."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    path: Path
    begin: int

    def chunks(self, size: int) -> Iterator[bytes]:
        """Raises MalformedCheckpoint when the file cannot be read, or has become shorter since its header was read."""
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
