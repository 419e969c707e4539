"""Scored pairs and documents: queries and changes on their two tables, over the caller's connection and transaction."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from typing import Any, cast

from sqlalchemy import Connection, delete, insert, or_, select
from sqlalchemy.orm import aliased

from zoo.catalog import schema as t
from zoo.manifest import canonical_json
from zoo.records import Document, Equivalence, Relation, ScoredRun


def equivalences(connection: Connection, models: Collection[str] | None) -> list[Equivalence]:
    """Return the pairs with at least one side in these models (None: all pairs), oldest first."""
    a, b = aliased(t.Model), aliased(t.Model)
    query = (
        select(t.EquivalenceRow.__table__, a.name.label("a_name"), b.name.label("b_name"))
        .join(a, a.id == t.EquivalenceRow.a_model)
        .join(b, b.id == t.EquivalenceRow.b_model)
        .order_by(t.EquivalenceRow.id)
    )
    if models is not None:
        names = list(models)
        query = query.where(or_(a.name.in_(names), b.name.in_(names)))
    return [_equivalence(row) for row in connection.execute(query)]


def _equivalence(row: Any) -> Equivalence:
    return Equivalence(
        relation=cast(Relation, row.relation),
        a=ScoredRun(row.a_name, row.a_lo, row.a_hi),
        b=ScoredRun(row.b_name, row.b_lo, row.b_hi),
        probe=row.probe,
        similarity=row.similarity,
        control=row.control,
        metrics=json.loads(row.metrics),
    )


def put_equivalences(connection: Connection, pairs: Collection[Equivalence], ids: Mapping[str, int]) -> None:
    """Store pairs, replacing those with the same relation, runs and probe. `ids`: model name -> row id."""
    for pair in pairs:
        key = _pair_columns(pair, ids)
        connection.execute(delete(t.EquivalenceRow).filter_by(**key))
        values = {
            "similarity": pair.similarity,
            "control": pair.control,
            "metrics": canonical_json(dict(pair.metrics)),
            "created": _now(),
        }
        connection.execute(insert(t.EquivalenceRow).values(**key, **values))


def drop_equivalences(connection: Connection, pairs: Collection[Equivalence], ids: Mapping[str, int]) -> None:
    """Delete the pairs with these relations, runs and probes."""
    for pair in pairs:
        connection.execute(delete(t.EquivalenceRow).filter_by(**_pair_columns(pair, ids)))


def _pair_columns(pair: Equivalence, ids: Mapping[str, int]) -> dict[str, Any]:
    """Return the columns that identify a pair."""
    return {
        "relation": pair.relation,
        "probe": pair.probe,
        **_run_columns("a", pair.a, ids),
        **_run_columns("b", pair.b, ids),
    }


def _run_columns(side: str, run: ScoredRun, ids: Mapping[str, int]) -> dict[str, int]:
    return {f"{side}_model": ids[run.model], f"{side}_lo": run.lo, f"{side}_hi": run.hi}


def documents(connection: Connection, kind: str | None, model: str | None) -> list[Document]:
    """Return the documents of a kind (None: any) and of a model (None: any), oldest first."""
    query = (
        select(t.DocumentRow.kind, t.DocumentRow.key, t.DocumentRow.value, t.Model.name)
        .join(t.Model, t.Model.id == t.DocumentRow.model)
        .order_by(t.DocumentRow.id)
    )
    if kind is not None:
        query = query.where(t.DocumentRow.kind == kind)
    if model is not None:
        query = query.where(t.Model.name == model)
    return [Document(row.kind, row.name, row.key, json.loads(row.value)) for row in connection.execute(query)]


def put_document(connection: Connection, document: Document, model: int) -> None:
    """Store a document, replacing the one with the same kind, model and key. `model`: the model's row id."""
    same = {"kind": document.kind, "model": model, "key": document.key}
    connection.execute(delete(t.DocumentRow).filter_by(**same))
    connection.execute(insert(t.DocumentRow).values(**same, value=canonical_json(document.value), created=_now()))


def _now() -> datetime:
    return datetime.now(UTC).replace(tzinfo=None)
