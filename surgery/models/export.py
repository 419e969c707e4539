"""Export a model's own files, byte for byte as ingested. An adapter is exported as its PEFT folder.

A weight file is its stored header followed by the tensors in file order, so it equals the ingested file (for pickled
and Meta checkpoints: the safetensors files that represent them). This module does not depend on torch or families.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path, PurePosixPath

from blake3 import blake3

from zoo.errors import DamagedObject, InputError, MalformedCheckpoint, StoreFull
from zoo.manifest import ModelManifest, WeightFile
from zoo.store import Store


@dataclass(frozen=True, slots=True)
class ExportReport:
    """Result of an export; the fields of `zoo export --json`.

    Fields:
        files: Sorted paths below the folder.
        bytes: Their sizes together.
    """

    model: str
    files: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file of an export: its path below the folder, size in bytes and BLAKE3 in hex."""

    path: str
    nbytes: int
    blake3: str


def export(
    store: Store, name: str, folder: Path, card: Callable[[Sequence[WrittenFile]], str] | None = None
) -> ExportReport:
    """Write a model's files into a new or empty folder. The folder appears whole or not at all.

    Args:
        name: The model's name or a unique ending of it.
        card: Makes a model card from the files written. It is written as README.md, or as ZOO_CARD.md if the model has
            a README.md: the model's own files are never replaced.

    Raises:
        NotFound, AmbiguousName: No such model, or several.
        InputError: The folder is not empty or cannot be made, or the model is a chain that no files can hold.
        DamagedObject: Stored bytes do not match their digest; the message names the affected models.
        StoreFull: No space is left where the folder is.
    """
    target = folder.expanduser().absolute()
    with store.keeping():
        with store.catalog.reading() as reader:
            manifest = reader.model(reader.resolve(name))
        if not manifest.weight_files:
            raise InputError(
                f"{manifest.name} exists as a chain only, not as files: its blocks have adapters; merge these first"
            )
        with appearing(target) as made:
            sizes = {path: write_file(made / path, chunks) for path, chunks in _files(store, manifest)}
            if card is not None:
                path = _card_path(sizes)
                sizes[path] = write_file(made / path, [card([_written(made, file) for file in sorted(sizes)]).encode()])
    return ExportReport(manifest.name, tuple(sorted(sizes)), sum(sizes.values()))


def _card_path(taken: Iterable[str]) -> str:
    """Return the card's path. Names are compared without case, since file systems may not distinguish it."""
    folded = {path.casefold() for path in taken}
    names = chain(["README.md", "ZOO_CARD.md"], (f"ZOO_CARD_{number}.md" for number in count(2)))
    return next(name for name in names if name.casefold() not in folded)


def _files(store: Store, manifest: ModelManifest) -> Iterator[tuple[str, Iterable[bytes]]]:
    """Yield path and content of each file, without inherited ones."""
    for side in manifest.side_files:
        if not side.inherited:
            yield checked_path(side.path), [store.read_blob(side.blob)]
    for weights in manifest.weight_files:
        yield checked_path(weights.path), _weight_chunks(store, weights)


def _weight_chunks(store: Store, weights: WeightFile) -> Iterator[bytes]:
    yield store.read_blob(weights.header)
    for _, digest in weights.entries:
        try:
            yield from store.objects.read(digest)
        except DamagedObject as error:
            raise store.blamed(digest, error) from error


def checked_path(path: str) -> str:
    """Return a path from the catalogue if it stays inside the folder. Raises MalformedCheckpoint otherwise."""
    parts = PurePosixPath(path).parts
    if (
        not parts
        or path.startswith("/")
        or "\\" in path
        or "\0" in path
        or any(part in ("..", ".") for part in path.split("/"))
    ):
        raise MalformedCheckpoint(f"the catalogue holds the path {path[:100]!r}, which leaves the folder")
    return path


@contextmanager
def appearing(target: Path) -> Iterator[Path]:
    """Create a folder beside the target that replaces it on success and is removed on failure."""
    _check_empty(target)
    made = target.parent / f".{target.name}.{secrets.token_hex(6)}.part"
    try:
        try:
            made.mkdir(parents=True)
            yield made
            made.replace(target)
        except OSError as error:
            raise _explained(error, target) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _check_empty(target: Path) -> None:
    try:
        taken = target.is_symlink() or (target.exists() and (not target.is_dir() or any(target.iterdir())))
    except OSError as error:
        raise _explained(error, target) from error
    if taken:
        raise InputError(f"{target} is there already and not an empty folder: exports go to a folder of their own")


def _explained(error: OSError, target: Path) -> InputError | StoreFull:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return StoreFull(f"no space left to export to {target}")
    return InputError(f"cannot export to {target}: {error.strerror or error}")


def write_file(path: Path, chunks: Iterable[bytes]) -> int:
    """Write one file durably and return its size."""
    path.parent.mkdir(parents=True, exist_ok=True)
    size = 0
    with path.open("xb") as file:
        for chunk in chunks:
            size += file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return size


def _written(folder: Path, path: str) -> WrittenFile:
    """Return the description of a file on disk, read again."""
    return WrittenFile(path, (folder / path).stat().st_size, blake3().update_mmap(folder / path).hexdigest())
