"""What was derived from which tensor: a quantised model's own record, and the index over all of them.

    {"scheme": "int8", "version": 1, "tensors": {source digest: {"weight_packed": digest, "weight_scale": digest, …}}}

The record is a side file of the quantised model that is not exported. It names only tensors that this model
references, so an entry of the index exists exactly as long as what it leads to: nothing is to be kept in step, and
collecting garbage needs no further rule.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surgery.quantize.schemes import VERSION
from zoo.catalog import Reader
from zoo.manifest import ModelManifest, SideFile, TensorMeta
from zoo.store import Store

#: Path of the record among a model's side files.
RECORD = "blockzoo_quantized.json"

#: End of a name (`weight_scale`) -> tensor.
DerivedTensors = Mapping[str, TensorMeta]


@dataclass(frozen=True, slots=True)
class DerivedRecord:
    """The record of one model: its scheme, and what was derived from each source digest."""

    scheme: str
    tensors: Mapping[str, DerivedTensors]

    def put(self, store: Store) -> SideFile:
        """Store the record and return it as a side file. Call within `store.ingesting()`."""
        named = {
            source: {end: meta.digest for end, meta in sorted(made.items())}
            for source, made in sorted(self.tensors.items())
        }
        document = {"scheme": self.scheme, "version": VERSION, "tensors": named}
        data = (json.dumps(document, indent=1) + "\n").encode()
        return SideFile(RECORD, store.blobs.put(data), len(data), inherited=True)


class DerivedIndex:
    """The tensors that stored models derived with one scheme, by the digest of their source."""

    def __init__(self, scheme: str, known: Mapping[str, DerivedTensors] | None = None) -> None:
        self.scheme = scheme
        self._known: dict[str, DerivedTensors] = dict(known or {})

    @classmethod
    def read(cls, store: Store, reader: Reader, scheme: str) -> DerivedIndex:
        """Return the index over a store's models. Hold the store's lock until what is found in it is referenced."""
        index = cls(scheme)
        for entry in reader.entries():
            if entry.kind == "quantized":
                index._add(store, reader.model(entry.name))
        return index

    def find(self, source: str) -> DerivedTensors | None:
        """Return what was derived from a tensor, None if nothing was."""
        return self._known.get(source)

    def record(self, source: str, made: DerivedTensors) -> None:
        """Add what was derived from a tensor just now."""
        self._known[source] = made

    def record_of(self, sources: Iterable[str]) -> DerivedRecord:
        """Return the record of a model that was made of these sources. Raises KeyError for one that is not known."""
        return DerivedRecord(self.scheme, {source: self._known[source] for source in sources})

    def _add(self, store: Store, model: ModelManifest) -> None:
        side = next((side for side in model.side_files if side.path == RECORD), None)
        if side is None:
            return
        document = json.loads(store.read_blob(side.blob))
        if document["scheme"] != self.scheme or document["version"] != VERSION:
            return
        metas = {tensor.digest: tensor for tensor in model.tensors}
        for source, named in document["tensors"].items():
            made = {end: metas[digest] for end, digest in named.items() if digest in metas}
            if len(made) == len(named) and all(store.objects.has(meta.digest) for meta in made.values()):
                self._known.setdefault(source, made)
