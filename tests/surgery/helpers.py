"""Helpers for tests of the offline path: compare folders, edit weight files, list a store's contents."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from zoo import Zoo
from zoo.store import Store


def files_of(folder: Path) -> dict[str, bytes]:
    """Return relative path -> bytes of every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit_weights(folder: Path, edit: Callable[[str, Any], Any], metadata: dict[str, str] | None = None) -> list[str]:
    """Rewrite a folder's safetensors files; `edit(key, tensor)` gives the new tensor. Returns the keys that changed."""
    import torch
    from safetensors import safe_open
    from safetensors.torch import save_file

    changed = []
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            old = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        new = {key: edit(key, tensor) for key, tensor in old.items()}
        changed += [key for key in old if not torch.equal(old[key], new[key])]
        save_file({key: tensor.contiguous() for key, tensor in new.items()}, path, metadata or {"format": "pt"})
    return changed


def stored(store: Store) -> dict[str, set[str]]:
    """Return everything that a store holds: objects, blobs and models."""
    with store.catalog.reading() as reader:
        names = set(reader.names())
    return {"objects": set(store.objects.digests()), "blobs": set(store.blobs.digests()), "models": names}


def spans(zoo: Zoo, name: str) -> list[tuple[int, int]]:
    """Return the bounds of a model's blocks, in components."""
    with zoo.store.catalog.reading() as reader:
        return [(block.lo, block.hi) for block in reader.chain(name)]
