"""Origins of checkpoints: local folders, Meta's original layout, GGUF files, the hub. `open_source` selects the reader.

Each kind has its own module behind the interface of `surgery.sources.base`.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path

from surgery.sources.base import Source
from zoo.errors import InputError, MalformedCheckpoint, NotFound

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """What to read of GGUF files.

    Fields:
        file: The file of a folder or repository; None for the only one, if there are no weights in another format.
        dtype: transformers' name of the dtype in which dequantised tensors are stored; None for float32.
    """

    file: str | None = None
    dtype: str | None = None


def open_source(
    text: str, revision: str | None = None, allow_pickle: bool = False, gguf: GgufChoice | None = None
) -> Source:
    """Open the source that a user names: an existing folder or GGUF file, else a repository on the hub.

    Args:
        text: A folder's path, a GGUF file's path or a hub id such as `meta-llama/Llama-2-7b`.
        revision: Branch, tag or commit; for hub ids only.
        allow_pickle: Read pickled weights through torch's restricted loader.

    Raises:
        NotFound: Neither a folder nor a possible hub id.
        InputError: An option that this source does not have.
        zoo.errors.InputError: See `surgery.sources.local.open_local`, `surgery.sources.gguf.source.open_gguf`.
    """
    gguf = gguf or GgufChoice()
    folder = Path(text).expanduser()
    if folder.exists() and revision is not None:
        raise NotFound(f"--revision is for hub ids, and {text!r} is a folder or file here")
    if folder.is_dir():
        return _open_folder(folder, allow_pickle, gguf)
    if folder.exists():
        return _open_file(folder, gguf)
    if not _HUB_ID.fullmatch(text):
        raise NotFound(f"no folder {text!r}, and it cannot be a hub id either")
    from surgery.sources.hub import fetch

    fetched = _open_folder(fetch(text, revision, allow_pickle, gguf.file), allow_pickle, gguf)
    return dataclasses.replace(fetched, origin=text if revision is None else f"{text}@{revision}")


def _open_file(path: Path, gguf: GgufChoice) -> Source:
    if path.suffix.lower() != ".gguf":
        raise MalformedCheckpoint(f"{path} is a file, and not a .gguf; give the folder that it lies in")
    if gguf.file is not None:
        raise InputError(f"--file chooses a file of a folder or repository, and {path} is a file itself")
    from surgery.sources.gguf.source import open_gguf

    return open_gguf(path, gguf.dtype)


def _open_folder(folder: Path, allow_pickle: bool, gguf: GgufChoice) -> Source:
    if gguf.file is not None or _is_gguf_only(folder, allow_pickle):
        from surgery.sources.gguf.source import open_gguf_folder

        return open_gguf_folder(folder, gguf.file, gguf.dtype)
    if gguf.dtype is not None:
        raise InputError("--dtype is for GGUF files: the tensors of other checkpoints are stored as they are")
    if _is_meta_only(folder):
        from surgery.sources.meta import open_meta

        return open_meta(folder)
    from surgery.sources.local import open_local

    return open_local(folder, allow_pickle)


def _is_gguf_only(folder: Path, allow_pickle: bool) -> bool:
    """Return whether the folder has a GGUF file, and no weights in a format that would take precedence."""
    first = ["*.safetensors", "consolidated.*.pth", *(["pytorch_model*.bin", "*adapter*.bin"] if allow_pickle else [])]
    return any(folder.glob("*.gguf")) and not any(any(folder.glob(pattern)) for pattern in first)


def _is_meta_only(folder: Path) -> bool:
    """Return whether the folder has Meta's files, and no safetensors or adapter that would take precedence."""
    others = ("adapter_config.json", "model.safetensors", "model.safetensors.index.json")
    if not (folder / "params.json").exists() or any((folder / name).exists() for name in others):
        return False
    return not (folder / "config.json").exists() or any(folder.glob("consolidated.*.pth"))
