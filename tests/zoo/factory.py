"""Tensors as bytes and manifests over them, for the store's tests, without torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from zoo.manifest import Adapter, Component, ModelKind, ModelManifest, Placed, SideFile, TensorMeta, WeightFile
from zoo.store import Store


@dataclass(frozen=True)
class Bytes:
    """A tensor source that holds its bytes; a U8 vector by default."""

    data: bytes
    dtype: str = "U8"
    dims: tuple[int, ...] | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.data),) if self.dims is None else self.dims

    @property
    def nbytes(self) -> int:
        return len(self.data)

    def chunks(self, size: int) -> Iterator[bytes | memoryview]:
        view = memoryview(self.data)
        for begin in range(0, len(self.data), size):
            yield view[begin : begin + size]


@dataclass(frozen=True)
class Constant:
    """A large tensor source of one repeated byte, which needs little memory."""

    nbytes: int
    value: int = 0
    dtype: str = "U8"

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.nbytes,)

    def chunks(self, size: int) -> Iterator[bytes]:
        for begin in range(0, self.nbytes, size):
            yield bytes([self.value]) * min(size, self.nbytes - begin)


def some_bytes(seed: int, size: int = 100) -> Bytes:
    return Bytes(random.Random(seed).randbytes(size))


def manifest_of(
    name: str,
    tensors: Sequence[TensorMeta],
    kind: ModelKind = "foundation",
    base: str | None = None,
    header: str = "0" * 64,
    side: str = "1" * 64,
) -> ModelManifest:
    """Return a manifest with one component per tensor, alternating attention and FFN, and one file of each kind."""
    placed = tuple(
        Placed(i // 2, Component("ffn" if i % 2 else "attention", "llama", "{}", (("weight", tensor.digest),)))
        for i, tensor in enumerate(tensors)
    )
    entries = tuple((f"layers.{i}.weight", tensor.digest) for i, tensor in enumerate(tensors))
    return ModelManifest(
        name=name,
        kind=kind,
        base=base,
        family="llama",
        source=f"/checkpoints/{name}",
        components=placed,
        weight_files=(WeightFile("model.safetensors", header, entries),),
        side_files=(SideFile("config.json", side, 2),),
        tensors=tuple(dict.fromkeys(tensors)),
    )


def with_adapter(placed: Placed, tensors: Sequence[tuple[str, str]]) -> Placed:
    old = placed.component
    adapter = Adapter("lora", '{"r":4}', tuple(tensors))
    return Placed(placed.layer, Component(old.kind, old.family, old.spec, old.tensors, adapter))


def ingest(store: Store, name: str, seeds: Sequence[int], size: int = 100) -> ModelManifest:
    """Put one tensor per seed, two blobs and a model of them, as an ingest does. Equal seeds give shared tensors."""
    with store.ingesting():
        tensors = [put.tensor for put in store.objects.put_many(some_bytes(seed, size) for seed in seeds)]
        header, side = store.blobs.put(f"header of {name}".encode()), store.blobs.put(b"{}")
        manifest = manifest_of(name, tensors, header=header, side=side)
        with store.catalog.writing() as writer:
            writer.put_model(manifest)
    return manifest


def files_under(root: Path) -> list[str]:
    """Return all objects, blobs and temporary files of a store."""
    return sorted(
        str(path.relative_to(root))
        for part in ("objects", "files")
        for path in (root / part).rglob("*")
        if path.is_file()
    )


def flip_byte(path: Path, at: int) -> None:
    """Damage a file, read-only or not. A negative `at` counts from the end."""
    data = bytearray(path.read_bytes())
    data[at] ^= 0x40
    path.chmod(0o644)
    path.write_bytes(data)
