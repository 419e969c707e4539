"""Changes to the catalogue, within the single writing transaction.

A change also deletes the rows that no model needs any more. Objects and blobs must be durable on disk before a manifest
that references them is put; this module does not check that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain as chained
from itertools import islice
from typing import Any

from sqlalchemy import ColumnElement, and_, delete, exists, insert, not_, select
from sqlalchemy.orm import InstrumentedAttribute

from zoo.catalog import aliases as alias_rows
from zoo.catalog import findings, folding
from zoo.catalog import keys as key_rows
from zoo.catalog import schema as t
from zoo.catalog.names import check_name
from zoo.catalog.reader import CHUNK, Reader
from zoo.catalog.rows import component_row, component_tensor_rows, tensor_row
from zoo.errors import InputError, InUse, NameTaken, NotFound
from zoo.manifest import PARTS, ChainBlock, Component, ModelManifest, block_digest
from zoo.money import ModelPrice
from zoo.records import Alias, AliasAct, AliasTarget, ClientKey, Document, Equivalence, KeyUsage


class Writer(Reader):
    """Read and write access to the catalogue.

    Changes become visible to other processes when the transaction ends; if it ends in an error, none do.
    """

    def put_model(self, manifest: ModelManifest) -> None:
        """Add a model, as one block until `set_chain` cuts it (BL-02).

        Does nothing if the same model has the name already.

        Raises:
            InputError: The name is not a valid model name (`check_name`).
            NameTaken: Another model has the name, or an alias.
            NotFound: The base is not in the catalogue.
            ValueError: A component or a weight file references a tensor that `manifest.tensors` lacks.
        """
        check_name(manifest.name)
        _check_tensors(manifest)
        if self._is_there(manifest):
            return
        if self.alias(manifest.name) is not None:
            raise NameTaken(f"the name {manifest.name!r} is an alias: choose another name, or delete the alias first")
        components = {placed.component.digest: placed.component for placed in manifest.components}
        self._insert_missing(t.Tensor.digest, {tensor.digest: tensor_row(tensor) for tensor in manifest.tensors})
        self._put_components(components)
        model = self._insert_model(manifest)
        self._insert_parts(model, manifest)
        self._insert_files(model, manifest)
        whole = [placed.component.digest for placed in manifest.components]
        if whole:
            self.set_chain(manifest.name, [ChainBlock(block_digest(whole), 0, len(whole))])

    def set_chain(self, name: str, blocks: Sequence[ChainBlock]) -> None:
        """Replace a model's chain by these blocks.

        Raises:
            NotFound: No such model.
            ValueError: The blocks do not cover the model's components once and in order, or a digest does not match its
                components.
        """
        model = self._model_row(name).id
        components = self.component_digests([name]).get(name, ())
        cut = _blocks_of(blocks, components)
        before = set(self._connection.execute(select(t.ModelBlock.block).where(t.ModelBlock.model == model)).scalars())
        new = self._insert_missing(t.Block.digest, {digest: {"digest": digest} for digest in cut})
        self._insert(
            t.BlockComponent,
            [
                {"block": digest, "position": i, "component": part}
                for digest in new
                for i, part in enumerate(cut[digest])
            ],
        )
        self._connection.execute(delete(t.ModelBlock).where(t.ModelBlock.model == model))
        self._insert(
            t.ModelBlock,
            [{"model": model, "position": i, "block": b.digest, "lo": b.lo, "hi": b.hi} for i, b in enumerate(blocks)],
        )
        self._delete_unused(t.Block.digest, before - cut.keys(), [t.ModelBlock.block])

    def remove_model(self, name: str) -> None:
        """Delete a model and the rows that only it references; objects on disk stay until they are collected.

        Raises:
            NotFound: No such model.
            InUse: Other models have it as their base, an alias points to it, or would after a rollback.
        """
        if dependents := self.dependents(name):
            raise InUse(f"{name!r} is the base of {', '.join(dependents)}: remove these first")
        if kept := alias_rows.aliases_that_keep(self._connection, name):
            raise InUse(f"{name!r} cannot be removed: {'; '.join(kept.values())}")
        model = self._model_row(name).id
        tensors = self._all(select(t.ModelTensor.tensor).where(t.ModelTensor.model == model))
        components = self._all(select(t.ModelComponent.component).where(t.ModelComponent.model == model))
        blocks = self._all(select(t.ModelBlock.block).where(t.ModelBlock.model == model))
        self._connection.execute(delete(t.Model).where(t.Model.id == model))
        self._delete_unused(t.Block.digest, blocks, [t.ModelBlock.block])
        self._delete_unused(t.ComponentRow.digest, components, [t.ModelComponent.component, t.BlockComponent.component])
        self._delete_unused(
            t.Tensor.digest, tensors, [t.ModelTensor.tensor, t.ComponentTensor.tensor, t.WeightEntry.tensor]
        )

    def put_equivalences(self, pairs: Collection[Equivalence]) -> None:
        """Store scored pairs, replacing those with the same relation, runs and probe.

        Raises NotFound if a model is absent.
        """
        findings.put_equivalences(self._connection, pairs, self._ids_of(pairs))

    def drop_equivalences(self, pairs: Collection[Equivalence]) -> None:
        """Delete scored pairs by relation, runs and probe; absent pairs are ignored.

        Raises NotFound if a model is absent.
        """
        findings.drop_equivalences(self._connection, pairs, self._ids_of(pairs))

    def put_document(self, document: Document) -> None:
        """Store a document, replacing the one of its kind, model and key. Raises NotFound if its model is absent."""
        findings.put_document(self._connection, document, self._model_row(document.model).id)

    def set_alias(self, name: str, targets: Sequence[AliasTarget], act: AliasAct = "set", figures: Any = None) -> Alias:
        """Let an alias point to models, named in full; make it if there is none. Does nothing if it does so already.

        Raises:
            InputError: The name is not valid, there is no target, or a target cannot be served by itself.
            NameTaken: A model has the name.
            NotFound: A target is not in the catalogue, or is an alias.
        """
        check_name(name)
        if name in self.names():
            raise NameTaken(f"{name!r} is a model: choose another name for the alias")
        if not targets:
            raise InputError(f"alias {name!r} needs a model to point to")
        for target in targets:
            if self._model_row(target.model).kind in PARTS:
                raise InputError(f"{target.model!r} is no model that answers by itself: no alias may point to it")
        before = self.alias(name)
        if before is not None and before.targets == tuple(targets):
            return before
        previous = None if before is None else before.now.id
        return alias_rows.put_change(self._connection, name, act, targets, previous, figures)

    def roll_back(self, name: str) -> Alias:
        """Let an alias point to what it pointed to before its latest change; a second rollback goes back further.

        Raises:
            NotFound: No such alias, or a model that it pointed to is gone.
            InputError: It has pointed to nothing else.
        """
        alias = self.required_alias(name)
        if alias.before is None:
            raise InputError(f"alias {name!r} has pointed to nothing before: there is nothing to roll back to")
        before = alias.before
        for target in before.targets:
            self._model_row(target.model)
        figures = {"from": [target.model for target in alias.targets]}
        return alias_rows.put_change(self._connection, name, "rollback", before.targets, before.previous, figures)

    def put_key(self, key: ClientKey) -> None:
        """Add a key of a client. Raises NameTaken if a valid one has its name."""
        key_rows.put_key(self._connection, key)

    def revoke_key(self, name: str) -> None:
        """End a valid key. Raises NotFound."""
        key_rows.revoke_key(self._connection, name)

    def add_key_usage(self, used: Iterable[KeyUsage]) -> None:
        """Add what keys have used to what is recorded."""
        key_rows.add_usage(self._connection, used)

    def fold_usage(self, queue: str, used: Mapping[str, KeyUsage]) -> int:
        """Add usage of a queue, by its ids, to what is recorded, and mark it; what has its mark adds nothing.

        The queue must be read within this transaction (`folding`). Returns how much of it was new.
        """
        return folding.fold_usage(self._connection, queue, used)

    def drop_folded(self, queue: str, ids: Collection[str]) -> None:
        """Drop marks of usage that the queue does not have any more, as read within this transaction."""
        folding.drop_folded(self._connection, queue, ids)

    def put_price(self, price: ModelPrice) -> None:
        """Record a price in place of the one before. What was counted until now keeps its cost."""
        key_rows.put_price(self._connection, price)

    def drop_price(self, model: str) -> None:
        """Remove a model's price, or that of models without one (""). Raises NotFound."""
        key_rows.drop_price(self._connection, model)

    def delete_alias(self, name: str) -> None:
        """Delete an alias; the models stay, and so does its history. Raises NotFound."""
        self.required_alias(name)
        alias_rows.drop_alias(self._connection, name)

    def required_alias(self, name: str) -> Alias:
        """Return the alias of a name. Raises NotFound."""
        if (alias := self.alias(name)) is None:
            raise NotFound(f"there is no alias {name[:80]!r}")
        return alias

    def set_setting(self, key: str, value: str) -> None:
        """Store a setting of the catalogue itself, replacing the one under the key."""
        self._connection.execute(delete(t.Setting).where(t.Setting.key == key))
        self._insert(t.Setting, [{"key": key, "value": value}])

    def _ids_of(self, pairs: Collection[Equivalence]) -> dict[str, int]:
        return {name: self._model_row(name).id for name in {run.model for pair in pairs for run in (pair.a, pair.b)}}

    def _is_there(self, manifest: ModelManifest) -> bool:
        found = self._connection.execute(select(t.Model.fingerprint).where(t.Model.name == manifest.name)).scalar()
        if found is not None and found != manifest.fingerprint:
            raise NameTaken(
                f"the name {manifest.name!r} holds another model: choose another name, or remove that model first"
            )
        return found is not None

    def _put_components(self, components: dict[str, Component]) -> None:
        rows = {digest: component_row(component) for digest, component in components.items()}
        new = self._insert_missing(t.ComponentRow.digest, rows)
        self._insert(
            t.ComponentTensor, list(chained.from_iterable(component_tensor_rows(components[digest]) for digest in new))
        )

    def _insert_model(self, manifest: ModelManifest) -> int:
        base = None
        if manifest.base is not None:
            base = self._connection.execute(select(t.Model.id).where(t.Model.name == manifest.base)).scalar()
            if base is None:
                raise NotFound(f"the base {manifest.base!r} of {manifest.name!r} is not in the zoo: ingest it first")
        values = {
            "name": manifest.name,
            "kind": manifest.kind,
            "base": base,
            "family": manifest.family,
            "source": manifest.source,
            "fingerprint": manifest.fingerprint,
            "created": datetime.now(UTC).replace(tzinfo=None),
        }
        self._connection.execute(insert(t.Model).values(values))
        return int(self._model_row(manifest.name).id)

    def _insert_parts(self, model: int, manifest: ModelManifest) -> None:
        self._insert(
            t.ModelComponent,
            [
                {"model": model, "position": i, "layer": placed.layer, "component": placed.component.digest}
                for i, placed in enumerate(manifest.components)
            ],
        )
        self._insert(
            t.ModelTensor,
            [{"model": model, "position": i, "tensor": tensor.digest} for i, tensor in enumerate(manifest.tensors)],
        )

    def _insert_files(self, model: int, manifest: ModelManifest) -> None:
        files = list(enumerate(manifest.weight_files))
        self._insert(
            t.WeightFileRow, [{"model": model, "position": i, "path": f.path, "header": f.header} for i, f in files]
        )
        self._insert(
            t.WeightEntry,
            [
                {"model": model, "file": i, "position": j, "key": key, "tensor": tensor}
                for i, file in files
                for j, (key, tensor) in enumerate(file.entries)
            ],
        )
        self._insert(
            t.SideFileRow,
            [
                {
                    "model": model,
                    "position": i,
                    "path": s.path,
                    "blob": s.blob,
                    "nbytes": s.nbytes,
                    "inherited": s.inherited,
                }
                for i, s in enumerate(manifest.side_files)
            ],
        )

    def _insert(self, table: Any, rows: list[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(insert(table), rows)

    def _insert_missing(self, key: InstrumentedAttribute[str], rows: dict[str, dict[str, Any]]) -> list[str]:
        """Insert the rows with digests that the table lacks and return these digests.

        There is one writer, so this does not race.
        """
        there = {row[0] for row in self._where_in(select(key), key, rows)}
        missing = [digest for digest in rows if digest not in there]
        self._insert(key.class_, [rows[digest] for digest in missing])
        return missing

    def _delete_unused(
        self, key: InstrumentedAttribute[str], digests: Collection[str], users: Iterable[InstrumentedAttribute[str]]
    ) -> None:
        unused: list[ColumnElement[bool]] = [not_(exists().where(user == key)) for user in users]
        for chunk in _chunks(digests):
            self._connection.execute(delete(key.class_).where(and_(key.in_(chunk), *unused)))

    def _all(self, query: Any) -> set[str]:
        return set(self._connection.execute(query).scalars())


def _chunks(digests: Collection[str]) -> Iterator[list[str]]:
    rest = iter(digests)
    while chunk := list(islice(rest, CHUNK)):
        yield chunk


def _check_tensors(manifest: ModelManifest) -> None:
    held = {tensor.digest for tensor in manifest.tensors}
    if len(held) != len(manifest.tensors):
        raise ValueError(f"the manifest of {manifest.name!r} holds a tensor twice")
    named = {digest for file in manifest.weight_files for _, digest in file.entries}
    for placed in manifest.components:
        adapter = placed.component.adapter
        named.update(digest for _, digest in placed.component.tensors)
        named.update(digest for _, digest in (adapter.tensors if adapter else ()))
    if not named <= held:
        raise ValueError(f"the manifest of {manifest.name!r} names tensors that it does not hold")


def _blocks_of(blocks: Sequence[ChainBlock], components: Sequence[str]) -> dict[str, Sequence[str]]:
    """Return block digest -> its component digests, after checking the blocks against the model's components."""
    reached = 0
    found: dict[str, Sequence[str]] = {}
    for block in blocks:
        part = components[block.lo : block.hi]
        if block.lo != reached or block.hi <= block.lo or block.hi > len(components):
            raise ValueError(f"block [{block.lo}, {block.hi}) does not continue the chain at component {reached}")
        if block.digest != block_digest(part):
            raise ValueError(f"block [{block.lo}, {block.hi}) does not have its components' digest")
        reached = block.hi
        found[block.digest] = part
    if reached != len(components):
        raise ValueError(f"the chain ends at component {reached} of {len(components)}")
    return found
