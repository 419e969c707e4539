"""All models of the catalogue, in a fixed number of queries for any number of models.

`entries` reads the table of models only, `configs` two rows more per model. `summaries` adds sizes, as `zoo ls` shows
them, from the rows of components: a component that many models share is read once, its tensors not once per model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import Connection, and_, func, select
from sqlalchemy.orm import aliased

from zoo.catalog import schema as t
from zoo.catalog.parameters import quantized_parameters
from zoo.manifest import ModelKind


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model's name and origin. `base`: name of the model that it was made from; `created`: when it was put (UTC)."""

    name: str
    kind: ModelKind
    base: str | None
    family: str
    source: str
    created: datetime


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """What tells models of different sizes apart before their manifests are read.

    Fields:
        blob: Digest of its `config.json`; None if it has none.
        dtype: Dtype of its first tensor; None if it has none.
    """

    family: str
    blob: str | None
    dtype: str | None


@dataclass(frozen=True, slots=True)
class ModelSummary(ModelEntry):
    """A model's name, origin and sizes.

    Fields:
        params: Parameters over the distinct tensors of its components: elements, or codes that they hold.
        bytes: Bytes over all distinct tensors that it references.
        bytes_own: Bytes over the tensors that no other model references: what removing the model would free.
    """

    params: int
    blocks: int
    bytes: int
    bytes_own: int


def entries(connection: Connection) -> list[ModelEntry]:
    """Return all models, sorted by name."""
    return [entry for _, entry in _numbered(connection)]


def configs(connection: Connection) -> Mapping[str, ModelConfig]:
    """Return name -> what a model's config is, of all models."""
    config = and_(t.SideFileRow.model == t.Model.id, t.SideFileRow.path == "config.json")
    first = and_(t.ModelTensor.model == t.Model.id, t.ModelTensor.position == 0)
    query = (
        select(t.Model.name, t.Model.family, t.SideFileRow.blob, t.Tensor.dtype)
        .outerjoin(t.SideFileRow, config)
        .outerjoin(t.ModelTensor, first)
        .outerjoin(t.Tensor, t.Tensor.digest == t.ModelTensor.tensor)
    )
    return {row.name: ModelConfig(row.family, row.blob, row.dtype) for row in connection.execute(query)}


def summaries(connection: Connection) -> list[ModelSummary]:
    """Return all models with their sizes, sorted by name."""
    sizes, blocks = _sizes(connection), block_counts(connection)
    return [
        ModelSummary(
            name=entry.name,
            kind=entry.kind,
            base=entry.base,
            family=entry.family,
            source=entry.source,
            created=entry.created,
            params=sizes[model].params,
            blocks=blocks.get(model, 0),
            bytes=sizes[model].bytes,
            bytes_own=sizes[model].bytes_own,
        )
        for model, entry in _numbered(connection)
    ]


def _numbered(connection: Connection) -> list[tuple[int, ModelEntry]]:
    """Return (id, entry) of all models, sorted by name."""
    base = aliased(t.Model)
    query = select(t.Model.__table__, base.name.label("base_name")).outerjoin(base, base.id == t.Model.base)
    found = [
        (
            row.id,
            ModelEntry(
                name=row.name,
                kind=cast(ModelKind, row.kind),
                base=row.base_name,
                family=row.family,
                source=row.source,
                created=row.created.replace(tzinfo=UTC),
            ),
        )
        for row in connection.execute(query)
    ]
    return sorted(found, key=lambda each: each[1].name)


def _counts(connection: Connection, query: Any) -> Mapping[int, int]:
    """Return model id -> count. (PostgreSQL sums big integers as decimals.)"""
    return {model: int(count) for model, count in connection.execute(query)}


def block_counts(connection: Connection) -> Mapping[int, int]:
    """Return model id -> number of its blocks."""
    return _counts(connection, select(t.ModelBlock.model, func.count()).group_by(t.ModelBlock.model))


@dataclass(frozen=True, slots=True)
class _Sizes:
    params: int = 0
    bytes: int = 0
    bytes_own: int = 0


def _sizes(connection: Connection) -> Mapping[int, _Sizes]:
    """Return model id -> its sizes.

    Grouping the rows of `model_tensors` by tensor in the database takes ten times as long as these sets.
    """
    elements: dict[str, int] = {}
    nbytes: dict[str, int] = {}
    # `all` fetches rows in one call; row by row takes twice as long.
    for digest, count, size in connection.execute(select(t.Tensor.digest, t.Tensor.elements, t.Tensor.nbytes)).all():
        elements[digest], nbytes[digest] = count, size
    elements.update(quantized_parameters(connection))
    placed, held = _placed_tensors(connection), {}
    for model, count in _counts(
        connection, select(t.ModelTensor.model, func.count()).group_by(t.ModelTensor.model)
    ).items():
        tensors = placed.get(model, frozenset())
        # A model refers to all tensors of its components. One that refers to more has some in its files only.
        held[model] = tensors if len(tensors) == count else _tensors_of(connection, model)
    shared = _in_several(held.values())
    return defaultdict(
        _Sizes,
        {
            model: _Sizes(
                params=sum(map(elements.__getitem__, placed.get(model, ()))),
                bytes=sum(map(nbytes.__getitem__, tensors)),
                bytes_own=sum(map(nbytes.__getitem__, tensors - shared)),
            )
            for model, tensors in held.items()
        },
    )


def _placed_tensors(connection: Connection) -> Mapping[int, frozenset[str]]:
    """Return model id -> the tensors of its components."""
    parts: dict[str, list[str]] = defaultdict(list)
    for component, tensor in connection.execute(select(t.ComponentTensor.component, t.ComponentTensor.tensor)).all():
        parts[component].append(tensor)
    placed: dict[int, list[list[str]]] = defaultdict(list)
    for model, component in connection.execute(select(t.ModelComponent.model, t.ModelComponent.component)).all():
        placed[model].append(parts[component])
    return {model: frozenset().union(*tensors) for model, tensors in placed.items()}


def _tensors_of(connection: Connection, model: int) -> frozenset[str]:
    return frozenset(connection.execute(select(t.ModelTensor.tensor).where(t.ModelTensor.model == model)).scalars())


def _in_several(sets: Iterable[frozenset[str]]) -> set[str]:
    """Return the members of more than one of the sets."""
    seen: set[str] = set()
    several: set[str] = set()
    for each in sets:
        several |= seen & each
        seen |= each
    return several
