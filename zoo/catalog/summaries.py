"""Summaries of all models, as `zoo ls` shows them, in a fixed number of queries for any number of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import Connection, func, select
from sqlalchemy.orm import aliased

from zoo.catalog import schema as t
from zoo.manifest import ModelKind


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """A model's sizes and origin.

    Fields:
        params: Elements over the distinct tensors of its components.
        bytes: Bytes over all distinct tensors that it references.
        bytes_own: Bytes over the tensors that no other model references: what removing the model would free.
    """

    name: str
    kind: ModelKind
    base: str | None
    family: str
    source: str
    params: int
    blocks: int
    bytes: int
    bytes_own: int
    created: datetime


def summaries(connection: Connection) -> list[ModelSummary]:
    """Return all models' summaries, sorted by name."""
    base = aliased(t.Model)
    query = select(t.Model.__table__, base.name.label("base_name")).outerjoin(base, base.id == t.Model.base)
    params, blocks = _params(connection), _blocks(connection)
    total, own = _bytes(connection), _bytes_own(connection)
    found = [
        ModelSummary(
            name=row.name,
            kind=cast(ModelKind, row.kind),
            base=row.base_name,
            family=row.family,
            source=row.source,
            params=params.get(row.id, 0),
            blocks=blocks.get(row.id, 0),
            bytes=total.get(row.id, 0),
            bytes_own=own.get(row.id, 0),
            created=row.created.replace(tzinfo=UTC),
        )
        for row in connection.execute(query)
    ]
    return sorted(found, key=lambda summary: summary.name)


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
