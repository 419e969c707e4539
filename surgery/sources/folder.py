"""Read a checkpoint's folder without leaving it: which files exist, belong to the checkpoint, and may be followed.

Symbolic links may point anywhere inside the folder, and inside the hub cache's own layout
(`models--x/snapshots/<revision>/file -> ../../blobs/<hash>`) to that repository's blobs; nowhere else. The files'
content plays no part here.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from surgery.sources.base import SourceSide
from zoo.errors import MalformedCheckpoint, UnsafeCheckpoint

#: Maximum bytes of one side file, and of all of them together: they are held in memory.
SIDE_LIMIT = 256 << 20
SIDES_LIMIT = 512 << 20
FILES_LIMIT = 2000
DEPTH_LIMIT = 3

#: Weights in other formats, and files that training leaves: not part of an ingested checkpoint.
_OTHER_SUFFIXES = frozenset(
    [
        *(
            ".safetensors",
            ".bin",
            ".pt",
            ".pth",
            ".pkl",
            ".pickle",
            ".ckpt",
            ".h5",
            ".msgpack",
            ".onnx",
            ".onnx_data",
            ".ot",
        ),
        *(
            ".gguf",
            ".ggml",
            ".npz",
            ".npy",
            ".tflite",
            ".mlmodel",
            ".mlpackage",
            ".nemo",
            ".tar",
            ".gz",
            ".zip",
            ".tmp",
        ),
        *(".lock", ".incomplete", ".log"),
    ]
)
_OTHER_NAMES = ("events.out.tfevents.", "optimizer.", "scheduler.", "rng_state", "training_args.", "trainer_state.")
_OTHER_FOLDERS = frozenset(
    {"runs", "wandb", "logs", "original", "onnx", "openvino", "coreml", "gguf", "metal", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder with its files, listed once.

    Fields:
        files: Relative paths with forward slashes, sorted.
        left_out: Files that do not belong to the checkpoint, likewise.
    """

    root: Path
    files: tuple[str, ...]
    left_out: tuple[str, ...]

    def has(self, path: str) -> bool:
        """Return whether a regular file of this name was found, belonging to the checkpoint or not."""
        return path in self.files or path in self.left_out

    def locate(self, path: str) -> Path:
        """Return the real path of a file in the folder.

        Raises:
            MalformedCheckpoint: There is no such regular file.
            UnsafeCheckpoint: It lies outside.
        """
        return real_file(self.root, path)

    def read(self, path: str, limit: int = SIDE_LIMIT) -> bytes:
        """Return a whole file. Raises MalformedCheckpoint if it has more than `limit` bytes."""
        with self.locate(path).open("rb") as file:
            data = file.read(limit + 1)
        if len(data) > limit:
            raise MalformedCheckpoint(f"{path} is too large: at most {limit:,} bytes are read")
        return data

    def sides(self, skip: frozenset[str]) -> tuple[SourceSide, ...]:
        """Return every file that belongs to the checkpoint, except those in `skip`.

        Raises MalformedCheckpoint if they exceed the limits.
        """
        found: list[SourceSide] = []
        total = 0
        for path in self.files:
            if path not in skip:
                found.append(SourceSide(path, self.read(path)))
                total += len(found[-1].data)
                if total > SIDES_LIMIT:
                    raise MalformedCheckpoint(
                        f"the files beside the weights have more than {SIDES_LIMIT:,} bytes together"
                    )
        return tuple(found)


def look(folder: Path) -> Folder:
    """List a folder.

    Raises:
        MalformedCheckpoint: It cannot be read, or holds too many files.
        UnsafeCheckpoint: A link leads out of it.
    """
    root = folder.resolve()
    files: list[str] = []
    left_out: list[str] = []
    try:
        for path, belongs in _walk(root, PurePosixPath()):
            (files if belongs else left_out).append(path)
            if len(files) + len(left_out) > FILES_LIMIT:
                raise MalformedCheckpoint(
                    f"the folder holds more than {FILES_LIMIT} files; give the checkpoint's own folder"
                )
    except OSError as error:
        raise MalformedCheckpoint(f"cannot read {folder}: {error.strerror}") from None
    return Folder(root, tuple(sorted(files)), tuple(sorted(left_out)))


def plain_name(name: object) -> str:
    """Return a file name from an index if it has no folder part. Raises UnsafeCheckpoint for anything else."""
    if (
        not isinstance(name, str)
        or not name
        or name in (".", "..")
        or any(char in name for char in "/\\\0")
        or not name.isprintable()
    ):
        raise UnsafeCheckpoint(
            f"the index names {str(name)[:100]!r}, which is not a plain file name in the checkpoint's folder"
        )
    return name


def real_file(root: Path, path: str) -> Path:
    """Return `root / path` with links followed, if it is a regular file that may be read.

    Args:
        root: Resolved already.

    Raises:
        MalformedCheckpoint: The file is missing.
        UnsafeCheckpoint: It lies outside, or is not a regular file.
    """
    try:
        real = (root / path).resolve(strict=True)
        regular = stat.S_ISREG(real.stat().st_mode)
    except (OSError, RuntimeError):
        raise MalformedCheckpoint(f"{path} is missing") from None
    if not any(real.is_relative_to(allowed) for allowed in _allowed_roots(root)):
        raise UnsafeCheckpoint(f"{path} is a link that leaves the checkpoint's folder")
    if not regular:
        raise UnsafeCheckpoint(f"{path} is not a regular file")
    return real


def _allowed_roots(root: Path) -> tuple[Path, ...]:
    """Return the folder itself and, below the hub cache's `snapshots/<revision>`, the repository's blobs."""
    for parent in (root, *root.parents[:DEPTH_LIMIT]):
        repository = parent.parent.parent
        if parent.parent.name == "snapshots" and repository.name.startswith("models--"):
            return (root, repository / "blobs")
    return (root,)


def _walk(root: Path, below: PurePosixPath) -> Iterator[tuple[str, bool]]:
    """Yield relative paths of regular files and whether they belong to the checkpoint. Hidden folders are skipped."""
    with os.scandir(root / below) as entries:
        listed = sorted(entries, key=lambda entry: entry.name)
    for entry in listed:
        path = below / entry.name
        if entry.is_dir(follow_symlinks=False):
            if _enters(path):
                yield from _walk(root, path)
        elif entry.is_symlink() and (root / path).is_dir():
            if not (root / path).resolve().is_relative_to(root):
                raise UnsafeCheckpoint(f"{path} is a link that leaves the checkpoint's folder")
        else:
            real_file(root, str(path))
            yield str(path), _belongs(entry.name)


def _enters(path: PurePosixPath) -> bool:
    name = path.name
    return (
        len(path.parts) <= DEPTH_LIMIT
        and not name.startswith((".", "checkpoint-"))
        and name.lower() not in _OTHER_FOLDERS
    )


def _belongs(name: str) -> bool:
    return PurePosixPath(name).suffix.lower() not in _OTHER_SUFFIXES and not name.startswith(_OTHER_NAMES)
