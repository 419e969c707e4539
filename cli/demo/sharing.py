"""Put the family into a store and compute from the catalogue what its members share and save.

All sizes are bytes of tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.demo.family import Trained
from zoo.errors import NameTaken, NotFound
from zoo.manifest import ModelManifest, TensorMeta

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo


@dataclass(frozen=True, slots=True)
class Cell:
    """A component of a model.

    Fields:
        owner: The first model of the family with these weights.
        adapted: Whether an adapter is applied to it.
        block: Digest of its block.
    """

    kind: str
    layer: int | None
    owner: str
    adapted: bool
    block: str


@dataclass(frozen=True, slots=True)
class Shared:
    """One model in the store. Sizes in bytes.

    Fields:
        blocks: Number of its blocks.
        complete: Size when served alone, with an adapter merged into its base.
        files: Size of the tensors in its own files.
        added: Size it added to the store after the members before it.
    """

    name: str
    kind: str
    base: str | None
    blocks: int
    complete: int
    files: int
    added: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True, slots=True)
class Sharing:
    """The family in the store, in the order of ingest."""

    models: tuple[Shared, ...]

    @property
    def complete(self) -> int:
        return sum(model.complete for model in self.models)

    @property
    def files(self) -> int:
        return sum(model.files for model in self.models)

    @property
    def stored(self) -> int:
        return sum(model.added for model in self.models)


def ingest_family(zoo: Zoo, family: Sequence[Trained]) -> Sharing:
    """Ingest every member under its name and return what they share.

    Models ingested from the same folders in an earlier run are replaced.

    Raises:
        NameTaken: The store has a model of that name from elsewhere.
        InUse: Another model depends on an outdated member.
    """
    try:
        _ingest(zoo, family)
    except NameTaken:
        _remove_outdated(zoo, family)
        _ingest(zoo, family)
    return sharing_of(zoo, [trained.name for trained in family])


def sharing_of(zoo: Zoo, names: Sequence[str]) -> Sharing:
    """Return what models of a store share, each compared with those before it."""
    return _sharing([zoo.model(name) for name in names])


def _ingest(zoo: Zoo, family: Sequence[Trained]) -> None:
    for trained in family:
        zoo.ingest(Path(trained.folder).resolve(), name=trained.name, base=trained.base)


def _remove_outdated(zoo: Zoo, family: Sequence[Trained]) -> None:
    """Remove the family, fine-tunes before their bases. Raises NameTaken before anything is removed."""
    known = {model.name: model.source for model in zoo.entries()}
    for trained in family:
        source = known.get(trained.name)
        if source is not None and Path(source) != Path(trained.folder).resolve():
            raise NameTaken(
                f"the store holds another {trained.name!r}, from {source}: use another --store, or `zoo rm "
                f"{trained.name}`"
            )
    for trained in reversed(family):
        if trained.name in known:
            _remove(zoo, trained.name)
    zoo.gc()


def _remove(zoo: Zoo, name: str) -> None:
    try:
        zoo.remove(name)
    except NotFound:  # gone in the meantime
        return


def _sharing(handles: Sequence[ModelHandle]) -> Sharing:
    owners: dict[str, str] = {}
    stored: set[str] = set()
    models = []
    for handle in handles:
        models.append(_shared(handle, owners, stored))
        stored.update(tensor.digest for tensor in handle.manifest.tensors)
    return Sharing(tuple(models))


def _shared(handle: ModelHandle, owners: dict[str, str], stored: set[str]) -> Shared:
    """Return one member. `owners` maps a component's base digest to the first model that has it, and is updated."""
    manifest, chain = handle.manifest, handle.chain
    own = {digest for file in manifest.weight_files for _, digest in file.entries}
    adapter = {
        digest
        for placed in manifest.components
        if placed.component.adapter
        for _, digest in placed.component.adapter.tensors
    }
    cells = tuple(
        Cell(
            kind=each.component.kind,
            layer=each.layer,
            owner=owners.setdefault(each.component.base_digest, manifest.name),
            adapted=each.component.adapter is not None,
            block=block.digest,
        )
        for block in chain
        for each in block.components
    )
    return Shared(
        name=manifest.name,
        kind=manifest.kind,
        base=manifest.base,
        blocks=len(chain),
        complete=_bytes(tensor for tensor in _read(manifest) if tensor.digest not in adapter),
        files=_bytes(tensor for tensor in manifest.tensors if tensor.digest in own),
        added=_bytes(tensor for tensor in manifest.tensors if tensor.digest not in stored),
        cells=cells,
    )


def _read(manifest: ModelManifest) -> list[TensorMeta]:
    """Return the tensors that the model computes with."""
    used = {digest for placed in manifest.components for _, digest in placed.component.tensors}
    return [tensor for tensor in manifest.tensors if tensor.digest in used]


def _bytes(tensors: Iterable[TensorMeta]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
