"""All models of the catalogue, in a fixed number of queries for any number of models.

`entries` reads the table of models only, `configs` two rows more per model. `summaries` adds sizes, as `zoo ls` shows
them, and for these reads a row per tensor of every model: seconds for a thousand models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import Connection, and_, func, select
from sqlalchemy.orm import aliased

from zoo.catalog import schema as t
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
        params: Elements over the distinct tensors of its components.
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
    params, blocks = _params(connection), _blocks(connection)
    total, own = _bytes(connection), _bytes_own(connection)
    return [
        ModelSummary(
            name=entry.name,
            kind=entry.kind,
            base=entry.base,
            family=entry.family,
            source=entry.source,
            created=entry.created,
            params=params.get(model, 0),
            blocks=blocks.get(model, 0),
            bytes=total.get(model, 0),
            bytes_own=own.get(model, 0),
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


def _params(connection: Connection) -> Mapping[int, int]:
    named = (
        select(t.ModelComponent.model, t.ComponentTensor.tensor)
        .join(t.ComponentTensor, t.ComponentTensor.component == t.ModelComponent.component)
        .distinct()
        .subquery()
    )
    query = select(named.c.model, func.sum(t.Tensor.elements)).join(t.Tensor, t.Tensor.digest == named.c.tensor)
    return _counts(connection, query.group_by(named.c.model))


def _blocks(connection: Connection) -> Mapping[int, int]:
    return _counts(connection, select(t.ModelBlock.model, func.count()).group_by(t.ModelBlock.model))


def _bytes(connection: Connection) -> Mapping[int, int]:
    query = select(t.ModelTensor.model, func.sum(t.Tensor.nbytes)).join(
        t.Tensor, t.Tensor.digest == t.ModelTensor.tensor
    )
    return _counts(connection, query.group_by(t.ModelTensor.model))


def _bytes_own(connection: Connection) -> Mapping[int, int]:
    single = (
        select(t.ModelTensor.tensor, func.min(t.ModelTensor.model).label("model"))
        .group_by(t.ModelTensor.tensor)
        .having(func.count() == 1)
        .subquery()
    )
    query = select(single.c.model, func.sum(t.Tensor.nbytes)).join(t.Tensor, t.Tensor.digest == single.c.tensor)
    return _counts(connection, query.group_by(single.c.model))
