"""Origins of checkpoints: local folders, Meta's original layout, the hub. `open_source` selects the reader.

Each kind has its own module behind the interface of `surgery.sources.base`.
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from surgery.sources.base import Source
from zoo.errors import MalformedCheckpoint, NotFound

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def open_source(text: str, revision: str | None = None, allow_pickle: bool = False) -> Source:
    """Open the source that a user names: an existing folder, else a repository on the hub.

    Args:
        text: A folder's path or a hub id such as `meta-llama/Llama-2-7b`.
        revision: Branch, tag or commit; for hub ids only.
        allow_pickle: Read pickled weights through torch's restricted loader.

    Raises:
        NotFound: Neither a folder nor a possible hub id.
        zoo.errors.InputError: See `surgery.sources.local.open_local`.
    """
    folder = Path(text).expanduser()
    if folder.is_dir():
        if revision is not None:
            raise NotFound(f"--revision is for hub ids, and {text!r} is a folder here")
        return _open_folder(folder, allow_pickle)
    if folder.exists():
        raise MalformedCheckpoint(f"{text} is a file; give the folder that it lies in")
    if not _HUB_ID.fullmatch(text):
        raise NotFound(f"no folder {text!r}, and it cannot be a hub id either")
    from surgery.sources.hub import fetch

    fetched = _open_folder(fetch(text, revision, allow_pickle), allow_pickle)
    return dataclasses.replace(fetched, origin=text if revision is None else f"{text}@{revision}")


def _open_folder(folder: Path, allow_pickle: bool) -> Source:
    if _is_meta_only(folder):
        from surgery.sources.meta import open_meta

        return open_meta(folder)
    from surgery.sources.local import open_local

    return open_local(folder, allow_pickle)


def _is_meta_only(folder: Path) -> bool:
    """Return whether the folder has Meta's files, and no safetensors or adapter that would take precedence."""
    others = ("adapter_config.json", "model.safetensors", "model.safetensors.index.json")
    if not (folder / "params.json").exists() or any((folder / name).exists() for name in others):
        return False
    return not (folder / "config.json").exists() or any(folder.glob("consolidated.*.pth"))
