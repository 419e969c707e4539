"""Queries on the catalogue, over one connection and therefore one snapshot.

Names are exact here; `resolve` completes what a user typed. Digests that the catalogue lacks are left out of results.
This module writes nothing and does not depend on files on disk.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any, cast

from sqlalchemy import Connection, func, select, union
from sqlalchemy.orm import InstrumentedAttribute

from zoo.catalog import aliases as alias_rows
from zoo.catalog import folding
from zoo.catalog import keys as key_rows
from zoo.catalog import names as naming
from zoo.catalog import schema as t
from zoo.catalog.findings import documents, equivalences
from zoo.catalog.rows import Parts, component_of, tensor_of
from zoo.catalog.summaries import ModelConfig, ModelEntry, ModelSummary, block_counts, configs, entries, summaries
from zoo.manifest import ChainBlock, Component, ModelKind, ModelManifest, Placed, SideFile, TensorMeta, WeightFile
from zoo.money import ModelPrice
from zoo.records import Alias, AliasChange, ClientKey, Document, Equivalence, KeyUsage

#: Digests per query: far below both databases' limit on parameters.
CHUNK = 500


class Reader:
    """Read access to the catalogue; all results of one reader are from the same snapshot."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def names(self) -> list[str]:
        """Return all model names, sorted."""
        return sorted(self._connection.execute(select(t.Model.name)).scalars())

    def resolve(self, name: str) -> str:
        """Return the model with a name, the one that an alias stands for, or the one with a unique ending.

        Raises NotFound, AmbiguousName.
        """
        names = self.names()
        alias = None if name in names else self.alias(name)
        return naming.resolve(name, names) if alias is None else alias_rows.only_target(alias)

    def aliases(self) -> list[Alias]:
        """Return all aliases, sorted by name."""
        return alias_rows.all_aliases(self._connection)

    def alias(self, name: str) -> Alias | None:
        """Return the alias of a name, None if there is none."""
        return alias_rows.find_alias(self._connection, name)

    def alias_changes(self, name: str, most: int = 1000) -> list[AliasChange]:
        """Return the latest changes of an alias, newest first; also of one that is deleted."""
        return alias_rows.alias_changes(self._connection, name, most)

    def alias_changes_of(self, model: str, most: int = 100) -> list[AliasChange]:
        """Return the latest changes that let an alias point to a model, newest first."""
        return alias_rows.changes_of_model(self._connection, model, most)

    def keys(self) -> list[ClientKey]:
        """Return all keys of clients, revoked ones too, in order of creation."""
        return key_rows.all_keys(self._connection)

    def key_usage(self, day: str) -> list[KeyUsage]:
        """Return what keys have used from a day on (UTC, as 2026-01-31), in order of days, names and models."""
        return key_rows.usage_since(self._connection, day)

    def key_usage_of_day(self, day: str) -> list[KeyUsage]:
        """Return what each key has used on a day, of all models together."""
        return key_rows.usage_of_day(self._connection, day)

    def key_usage_of_month(self, month: str) -> list[KeyUsage]:
        """Return what each valid key with bounds for months has used in a month (UTC, as 2026-01), of all models
        together.
        """
        return key_rows.usage_of_month(self._connection, month)

    def folded_usage(self, queue: str) -> set[str]:
        """Return the ids of a queue's usage that is added and that the queue may still have (`folding`)."""
        return folding.folded_ids(self._connection, queue)

    def prices(self) -> list[ModelPrice]:
        """Return all prices, in order of the models' names; that of models without one has the name ""."""
        return key_rows.all_prices(self._connection)

    def latest_alias_change(self) -> int:
        """Return the number of the latest change of any alias, 0 without one."""
        return alias_rows.latest_change(self._connection)

    def model(self, name: str) -> ModelManifest:
        """Return a model's manifest, equal to the one that was put. Raises NotFound."""
        row = self._model_row(name)
        return ModelManifest(
            name=row.name,
            kind=cast(ModelKind, row.kind),
            base=self._connection.execute(select(t.Model.name).where(t.Model.id == row.base)).scalar(),
            family=row.family,
            source=row.source,
            components=self._placed(row.id),
            weight_files=self._weight_files(row.id),
            side_files=self._side_files(row.id),
            tensors=self._tensors(row.id),
        )

    def entries(self) -> list[ModelEntry]:
        """Return all models, sorted by name, without their sizes: one query of the table of models."""
        return entries(self._connection)

    def configs(self) -> Mapping[str, ModelConfig]:
        """Return name -> what a model's config is, of all models, in one query."""
        return configs(self._connection)

    def models(self) -> list[ModelSummary]:
        """Return one summary per model, sorted by name. Sizes take a row per tensor; see `entries`."""
        return summaries(self._connection)

    def block_counts(self) -> Mapping[int, int]:
        """Return model id -> number of its blocks, of all models."""
        return block_counts(self._connection)

    def created(self, name: str) -> datetime:
        """Return when the model was put (UTC). Raises NotFound."""
        moment: datetime = self._model_row(name).created
        return moment.replace(tzinfo=UTC)

    def fingerprints(self) -> dict[str, str]:
        """Return name -> the fingerprint that the model was put with."""
        return {
            row.name: row.fingerprint for row in self._connection.execute(select(t.Model.name, t.Model.fingerprint))
        }

    def chain(self, name: str) -> tuple[ChainBlock, ...]:
        """Return the model's blocks, in order; a predictor of lengths has none. Raises NotFound."""
        self._model_row(name)
        return self.chains([name]).get(name, ())

    def chains(self, names: Collection[str]) -> dict[str, tuple[ChainBlock, ...]]:
        """Return name -> the model's blocks, in order."""
        query = (
            select(t.Model.name, t.ModelBlock.block, t.ModelBlock.lo, t.ModelBlock.hi)
            .join(t.ModelBlock, t.ModelBlock.model == t.Model.id)
            .order_by(t.Model.id, t.ModelBlock.position)
        )
        found: dict[str, list[ChainBlock]] = defaultdict(list)
        for row in self._where_in(query, t.Model.name, names):
            found[row.name].append(ChainBlock(row.block, row.lo, row.hi))
        return {name: tuple(blocks) for name, blocks in found.items()}

    def component_digests(self, names: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return name -> the digests of the model's components, in order."""
        query = (
            select(t.Model.name, t.ModelComponent.component)
            .join(t.ModelComponent, t.ModelComponent.model == t.Model.id)
            .order_by(t.Model.id, t.ModelComponent.position)
        )
        found: dict[str, list[str]] = defaultdict(list)
        for row in self._where_in(query, t.Model.name, names):
            found[row.name].append(row.component)
        return {name: tuple(digests) for name, digests in found.items()}

    def sharing_group(self, components: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return every model connected to these components by sharing: name -> its component digests in order.

        A model belongs to the group if it shares a component with the given ones, or with another model of the group.
        When a model with these components is added, lazy partitioning may cut the chains of this group anew.
        """
        group: dict[str, tuple[str, ...]] = {}
        seen: set[str] = set()
        fresh = set(components)
        while fresh:
            seen |= fresh
            query = select(t.Model.name).join(t.ModelComponent, t.ModelComponent.model == t.Model.id).distinct()
            models = {row.name for row in self._where_in(query, t.ModelComponent.component, fresh)}
            found = self.component_digests(models - group.keys())
            group |= found
            fresh = {digest for digests in found.values() for digest in digests} - seen
        return group

    def block_models(self, blocks: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return block digest -> names of the models with that block in their chain, sorted."""
        query = select(t.ModelBlock.block, t.Model.name).join(t.Model, t.Model.id == t.ModelBlock.model)
        return _grouped(self._where_in(query, t.ModelBlock.block, blocks))

    def component_models(self, components: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return component digest -> names of the models with that component, sorted."""
        query = select(t.ModelComponent.component, t.ModelComponent.model)
        found: dict[str, set[int]] = defaultdict(set)
        for component, model in self._where_in(query, t.ModelComponent.component, components):
            found[component].add(model)
        # Components of one chain are mostly in the same models: each set of them is named once.
        names = {row.id: row.name for row in self._connection.execute(select(t.Model.id, t.Model.name))}
        named = {each: tuple(sorted(names[model] for model in each)) for each in map(frozenset, found.values())}
        return {component: named[frozenset(each)] for component, each in found.items()}

    def tensor_bytes(self) -> int:
        """Return the bytes of all distinct tensors that models reference."""
        return int(self._connection.execute(select(func.coalesce(func.sum(t.Tensor.nbytes), 0))).scalar_one())

    def tensor(self, digest: str) -> TensorMeta | None:
        row = self._connection.execute(select(t.Tensor).where(t.Tensor.digest == digest)).one_or_none()
        return None if row is None else tensor_of(row)

    def live_tensors(self) -> set[str]:
        """Return the digests of all tensors that any row references, recomputed from those rows."""
        named = union(select(t.ModelTensor.tensor), select(t.ComponentTensor.tensor), select(t.WeightEntry.tensor))
        return set(self._connection.execute(named).scalars())

    def live_blobs(self) -> set[str]:
        """Return the digests of all side files and weight file headers that any row references."""
        named = union(select(t.SideFileRow.blob), select(t.WeightFileRow.header))
        return set(self._connection.execute(named).scalars())

    def users_of(self, digests: Collection[str]) -> dict[str, tuple[str, ...]]:
        """Return digest of a tensor or a blob -> names of the models that need it, sorted."""
        rows: set[tuple[str, str]] = set()
        columns: tuple[InstrumentedAttribute[str], ...] = (
            t.ModelTensor.tensor,
            t.SideFileRow.blob,
            t.WeightFileRow.header,
        )
        for column in columns:
            query = select(column, t.Model.name).join(t.Model, t.Model.id == column.class_.model)
            rows.update((digest, name) for digest, name in self._where_in(query, column, digests))
        return _grouped(rows)

    def dependents(self, name: str) -> tuple[str, ...]:
        """Return the names of the models that have this one as their base, sorted. Raises NotFound."""
        row = self._model_row(name)
        return tuple(sorted(self._connection.execute(select(t.Model.name).where(t.Model.base == row.id)).scalars()))

    def equivalences(self, models: Collection[str] | None = None) -> list[Equivalence]:
        """Return the scored pairs with at least one side in these models (None: all pairs), oldest first."""
        return equivalences(self._connection, models)

    def documents(self, kind: str | None = None, model: str | None = None) -> list[Document]:
        """Return the documents of a kind (None: any) and of a model (None: any), oldest first."""
        return documents(self._connection, kind, model)

    def setting(self, key: str) -> str | None:
        """Return a setting of the catalogue itself; None if absent."""
        return self._connection.execute(select(t.Setting.value).where(t.Setting.key == key)).scalar()

    def _model_row(self, name: str) -> Any:
        row = self._connection.execute(select(*t.Model.__table__.columns).where(t.Model.name == name)).one_or_none()
        if row is None:
            raise naming.not_found(name, self.names())
        return row

    def _where_in(self, query: Any, column: InstrumentedAttribute[str], values: Collection[str]) -> Iterator[Any]:
        """Run the query for any number of values, in chunks, and yield its rows."""
        rest = iter(values)
        while chunk := list(islice(rest, CHUNK)):
            yield from self._connection.execute(query.where(column.in_(chunk))).all()

    def _placed(self, model: int) -> tuple[Placed, ...]:
        query = (
            select(t.ModelComponent.layer, *t.ComponentRow.__table__.columns)
            .join(t.ComponentRow, t.ComponentRow.digest == t.ModelComponent.component)
            .where(t.ModelComponent.model == model)
            .order_by(t.ModelComponent.position)
        )
        parts = self._component_tensors(model)
        built: dict[str, Component] = {}
        placed = []
        for row in self._connection.execute(query):
            if row.digest not in built:
                built[row.digest] = component_of(row, parts)
            placed.append(Placed(row.layer, built[row.digest]))
        return tuple(placed)

    def _component_tensors(self, model: int) -> Parts:
        mine = select(t.ModelComponent.component).where(t.ModelComponent.model == model)
        query = (
            select(
                t.ComponentTensor.component, t.ComponentTensor.adapter, t.ComponentTensor.name, t.ComponentTensor.tensor
            )
            .where(t.ComponentTensor.component.in_(mine))
            .order_by(t.ComponentTensor.component, t.ComponentTensor.adapter, t.ComponentTensor.position)
        )
        found: dict[tuple[str, bool], list[tuple[str, str]]] = defaultdict(list)
        for row in self._connection.execute(query):
            found[row.component, row.adapter].append((row.name, row.tensor))
        return found

    def _weight_files(self, model: int) -> tuple[WeightFile, ...]:
        entries: dict[int, list[tuple[str, str]]] = defaultdict(list)
        query = select(t.WeightEntry.file, t.WeightEntry.key, t.WeightEntry.tensor).where(t.WeightEntry.model == model)
        for row in self._connection.execute(query.order_by(t.WeightEntry.file, t.WeightEntry.position)):
            entries[row.file].append((row.key, row.tensor))
        files = select(t.WeightFileRow).where(t.WeightFileRow.model == model).order_by(t.WeightFileRow.position)
        return tuple(
            WeightFile(row.path, row.header, tuple(entries[row.position])) for row in self._connection.execute(files)
        )

    def _side_files(self, model: int) -> tuple[SideFile, ...]:
        query = select(t.SideFileRow).where(t.SideFileRow.model == model).order_by(t.SideFileRow.position)
        return tuple(SideFile(row.path, row.blob, row.nbytes, row.inherited) for row in self._connection.execute(query))

    def _tensors(self, model: int) -> tuple[TensorMeta, ...]:
        query = (
            select(t.Tensor.digest, t.Tensor.dtype, t.Tensor.shape)
            .join(t.ModelTensor, t.ModelTensor.tensor == t.Tensor.digest)
            .where(t.ModelTensor.model == model)
            .order_by(t.ModelTensor.position)
        )
        return tuple(tensor_of(row) for row in self._connection.execute(query))


def _grouped(pairs: Iterator[Any] | Collection[tuple[str, str]]) -> dict[str, tuple[str, ...]]:
    """Group (key, name) pairs: key -> its distinct names, sorted."""
    found: dict[str, set[str]] = defaultdict(set)
    for key, name in pairs:
        found[key].add(name)
    return {key: tuple(sorted(names)) for key, names in found.items()}
