"""One model as its view shows it, read from the catalogue."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from runtime.server.page.drawing.strip import StripPart, coloured
from zoo.catalog import Reader
from zoo.manifest import Component, ModelManifest
from zoo.records import Alias, AliasChange, Document
from zoo.views.blocks import BlockView, chain_of


@dataclass(frozen=True)
class ModelView:
    """A model's facts.

    Fields:
        sharing: Colour -> the models that share the components of that colour; without the model's own (0).
        made_from_it: Names of the models that have it as their base.
        aliases: The aliases that point to it now.
        changes: The latest changes that let an alias point to it, newest first.
    """

    manifest: ModelManifest
    created: datetime
    parts: Sequence[StripPart]
    sharing: dict[int, tuple[str, ...]]
    blocks: Sequence[BlockView]
    made_from_it: Sequence[str]
    documents: Sequence[Document]
    aliases: Sequence[Alias]
    changes: Sequence[AliasChange]

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.manifest.tensors)


def model_view(reader: Reader, name: str) -> ModelView:
    """Return a model's facts. Raises NotFound, AmbiguousName."""
    manifest = reader.model(reader.resolve(name))
    return ModelView(
        manifest=manifest,
        created=reader.created(manifest.name),
        parts=(parts := strip_parts(reader, manifest)),
        sharing={part.colour: part.users for part in parts if part.colour},
        blocks=chain_of(reader, manifest),
        made_from_it=reader.dependents(manifest.name),
        documents=reader.documents(model=manifest.name),
        aliases=[each for each in reader.aliases() if any(one.model == manifest.name for one in each.targets)],
        changes=reader.alias_changes_of(manifest.name),
    )


def aliases_by_model(reader: Reader) -> Mapping[str, Sequence[str]]:
    """Return model -> names of the aliases that point to it, sorted; nothing for a model without one."""
    found: dict[str, list[str]] = defaultdict(list)
    for alias in reader.aliases():
        for target in alias.targets:
            found[target.model].append(alias.name)
    return found


def strip_parts(reader: Reader, manifest: ModelManifest) -> list[StripPart]:
    """Return a model's components with their users, sizes and colours, in order."""
    digests = [placed.component.digest for placed in manifest.components]
    users = reader.component_models(digests)
    sets = [users.get(digest, ()) for digest in digests]
    nbytes = {tensor.digest: tensor.nbytes for tensor in manifest.tensors}
    return [
        StripPart(position, placed, each, sum(nbytes[tensor] for tensor in _tensors(placed.component)), colour)
        for position, (placed, each, colour) in enumerate(zip(manifest.components, sets, coloured(sets), strict=True))
    ]


def _tensors(component: Component) -> set[str]:
    adapter = () if component.adapter is None else component.adapter.tensors
    return {digest for _, digest in (*component.tensors, *adapter)}
