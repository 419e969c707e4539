"""Ingest a checkpoint: check everything, write the bytes, then reference them in one transaction (BL-12).

Until the catalogue commits, only unreferenced objects of a model exist; the store removes them if an ingest fails. Peak
memory does not grow with the model. This module does not depend on torch or on where a source came from.
"""

from __future__ import annotations

import dataclasses
import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from surgery.chains.plan import CHAIN
from surgery.ingest.base_model import Descent, descent
from surgery.ingest.draft import Draft, draft
from surgery.partition.regroup import regroup
from surgery.sources.base import Source, SourceWeights
from zoo.catalog import Reader, Writer
from zoo.catalog.names import check_name
from zoo.errors import NameTaken, WrongBase
from zoo.manifest import ModelKind, ModelManifest, Placed, SideFile, TensorMeta, WeightFile
from zoo.objects.objects import Put
from zoo.store import Store

#: Called with (bytes done, bytes in all) as tensors are stored.
Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class IngestCounts:
    """Amount in the weight files, with equal tensors counted once, and the part that the store did not have."""

    total: int
    new: int


@dataclass(frozen=True, slots=True)
class IngestReport:
    """Result of an ingest; the fields of `zoo ingest --json`.

    Fields:
        bytes: Bytes of tensors, without headers and side files.
    """

    model: str
    kind: ModelKind
    base: str | None
    family: str
    components: int
    blocks: int
    tensors: IngestCounts
    bytes: IngestCounts
    seconds: float
    peak_rss_bytes: int
    notes: tuple[str, ...]


@dataclass(frozen=True)
class _Written:
    """A source's content in the store.

    Fields:
        digests: Key -> tensor digest, of the model's tensors. Keys are unique over all files.
    """

    weight_files: tuple[WeightFile, ...]
    side_files: tuple[SideFile, ...]
    puts: Mapping[str, Put]
    digests: Mapping[str, str]


def ingest(
    store: Store,
    source: Source,
    name: str | None = None,
    base: str | None = None,
    progress: Progress | None = None,
    kind: ModelKind | None = None,
) -> IngestReport:
    """Add a checkpoint to the zoo. Repeating it changes nothing and succeeds.

    Args:
        source: An opened source; its tensors are read here, as a stream.
        name: Name of the model; by default the hub id or the folder's name.
        base: The model it was made from (name or unique ending). When None, an adapter's base is found by its config, a
            full checkpoint's by shared weights; a composed chain has none.
        kind: Kind to record for an adapter that was made here; None for the kind found.

    Raises:
        zoo.errors.InputError: The source cannot be used. Nothing was written.
        NotFound, AmbiguousName: The base is not in the zoo, or could be several.
        NameTaken: Another model has the name.
        StoreError: The store is full, busy or damaged.
    """
    started = time.monotonic()
    called = check_name(name if name is not None else default_name(source.origin))
    parent = _resolved(store, base)
    plan = draft(store, source, parent)
    _check_name_is_free(store, called, source)
    with store.ingesting():
        written = _write(store, source, progress)
        manifest = _manifest(called, source, plan, written)
        if kind is not None:
            manifest = dataclasses.replace(manifest, kind=kind)
        with store.catalog.writing() as writer:
            manifest = _commit(writer, manifest, plan, parent)
            blocks = len(writer.chain(called))
    return IngestReport(
        model=called,
        kind=manifest.kind,
        base=manifest.base,
        family=manifest.family,
        components=len(manifest.components),
        blocks=blocks,
        tensors=IngestCounts(len(written.puts), sum(put.new for put in written.puts.values())),
        bytes=IngestCounts(_nbytes(written.puts.values()), _nbytes(put for put in written.puts.values() if put.new)),
        seconds=time.monotonic() - started,
        peak_rss_bytes=_peak_rss(),
        notes=plan.notes,
    )


def default_name(origin: str) -> str:
    """Return the hub id without a revision, or the name of the folder or the GGUF file.

    For a folder of the hub cache it is its hub id.
    """
    path = Path(origin)
    if not path.is_absolute():
        return origin.split("@")[0]
    if path.suffix.lower() == ".gguf":
        return path.stem
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/")
    return path.name


def _resolved(store: Store, base: str | None) -> str | None:
    if base is None:
        return None
    with store.catalog.reading() as reader:
        return reader.resolve(base)


def _check_name_is_free(store: Store, name: str, source: Source) -> None:
    """Raise NameTaken early, before gigabytes are read, if a model with other weight files has the name."""
    with store.catalog.reading() as reader:
        if name not in reader.names():
            return
        known = {(file.path, file.header) for file in reader.model(name).weight_files}
    if known != {(weights.path, blake3(weights.header).hexdigest()) for weights in source.weights}:
        raise _taken(name)


def _taken(name: str) -> NameTaken:
    return NameTaken(f"the name {name!r} holds another model: choose another with --name, or remove that model first")


def _write(store: Store, source: Source, progress: Progress | None) -> _Written:
    puts: dict[str, Put] = {}
    tensors = [*source.file_tensors(), *(source.decoded or ())]
    total = sum(tensor.nbytes for tensor in tensors)
    done = 0
    digests = []
    for put in store.objects.put_many(tensors):
        digests.append(put.tensor.digest)
        puts.setdefault(put.tensor.digest, put)
        done += put.tensor.nbytes
        if progress is not None:
            progress(done, total)
    in_order = iter(digests)
    files = tuple(_weight_file(store, weights, [next(in_order) for _ in weights.tensors]) for weights in source.weights)
    sides = tuple(
        SideFile(side.path, store.blobs.put(side.data), len(side.data), inherited=side.derived) for side in source.sides
    )
    keys = [tensor.key for tensor in source.tensors()]  # the model's tensors are the last that were put
    return _Written(files, sides, puts, dict(zip(keys, digests[len(digests) - len(keys) :], strict=True)))


def _weight_file(store: Store, weights: SourceWeights, digests: list[str]) -> WeightFile:
    entries = tuple((tensor.key, digest) for tensor, digest in zip(weights.tensors, digests, strict=True))
    return WeightFile(weights.path, store.blobs.put(weights.header), entries)


def _manifest(name: str, source: Source, plan: Draft, written: _Written) -> ModelManifest:
    components = plan.place(written.digests)
    return ModelManifest(
        name=name,
        kind=plan.kind,
        base=None if plan.base is None else plan.base.name,
        family=plan.family,
        source=source.origin,
        components=components,
        weight_files=written.weight_files,
        side_files=(*written.side_files, *plan.inherited),
        tensors=_tensors(components, written, plan.base),
    )


def _tensors(components: Iterable[Placed], written: _Written, base: ModelManifest | None) -> tuple[TensorMeta, ...]:
    """Return every tensor that the model references, once: its files' and those of its components from the base."""
    own = {digest: put.tensor for digest, put in written.puts.items()}
    known = {**({tensor.digest: tensor for tensor in base.tensors} if base else {}), **own}
    used = {digest: None for placed in components for _, digest in placed.component.tensors}
    return tuple(known[digest] for digest in {**dict.fromkeys(own), **used})


def _commit(writer: Writer, manifest: ModelManifest, plan: Draft, base: str | None) -> ModelManifest:
    """Add the model and recut all chains that share with it; return the model as it is in the catalogue."""
    if manifest.name in writer.names():
        return _same_again(writer, manifest, base)
    if plan.base is not None:
        _check_base_unchanged(writer, plan.base)
    elif manifest.family != CHAIN:
        manifest = _descended(manifest, descent(writer, manifest, base))
    elif base is not None:
        manifest = dataclasses.replace(manifest, base=_chain_base(writer, base))
    writer.put_model(manifest)
    regroup(writer, writer.sharing_group([placed.component.digest for placed in manifest.components]))
    return manifest


def _same_again(reader: Reader, manifest: ModelManifest, base: str | None) -> ModelManifest:
    """Return the existing model if it is the same.

    Its kind was decided when it was first added, against the models of that time, and is kept.
    """
    known = reader.model(manifest.name)
    same = dataclasses.replace(
        manifest, kind=known.kind if manifest.kind in ("foundation", "composed") else manifest.kind
    )
    if same.fingerprint != known.fingerprint:
        raise _taken(manifest.name)
    if base is not None and base != known.base:
        raise NameTaken(f"{manifest.name!r} is in the zoo already, with {known.base or 'no model'} as its base")
    return known


def _descended(manifest: ModelManifest, found: Descent) -> ModelManifest:
    return dataclasses.replace(manifest, kind=found.kind, base=found.base)


def _chain_base(reader: Reader, base: str) -> str:
    """Return the given base of a chain, which must be another chain. Raises WrongBase."""
    if reader.model(base).family != CHAIN:
        raise WrongBase(
            f"{base} is no chain of several models: a chain names the blocks that it is made of itself, and needs no "
            "--base"
        )
    return base


def _check_base_unchanged(reader: Reader, base: ModelManifest) -> None:
    if base.name not in reader.names() or reader.model(base.name).fingerprint != base.fingerprint:
        raise WrongBase(f"the base {base.name!r} was removed or replaced in the meantime")


def _nbytes(puts: Iterable[Put]) -> int:
    return sum(put.tensor.nbytes for put in puts)


def _peak_rss() -> int:
    """Return this process's largest resident size so far, in bytes.

    `ru_maxrss` would also count the time before an exec: the parent's size.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
    except (OSError, StopIteration, ValueError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
