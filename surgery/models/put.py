"""Add a model that was made here to the zoo: a chain of stored components and new tensors, stored like any other model.

If it can be written as a checkpoint of its family, it gets that family's `config.json` and key names; otherwise a
chain's config (`surgery.chains.plan`) and keys `parts.<i>.<name>`. Either way its weight files are headers over tensors
that are stored already, so it costs only its new tensors, and is listed, verified, exported and collected like all
models. Call it within `store.ingesting()`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from surgery.adapters.lowrank import is_low_rank
from surgery.chains.files import part_key
from surgery.chains.plan import CHAIN, ChainPlan, config_for
from surgery.families.settings import context_length
from surgery.families.specs import spec_of
from surgery.families.table import FAMILIES, Family, family_of, is_tied
from surgery.ingest.cut import disk_key
from surgery.partition.regroup import regroup
from zoo.catalog.names import check_name
from zoo.errors import InputError
from zoo.manifest import ModelKind, ModelManifest, Placed, SideFile, TensorMeta, WeightFile, canonical_json
from zoo.objects.headers import make_header
from zoo.records import Equivalence
from zoo.store import Store

#: Maximum bytes of tensors per weight file, as the hub's tools cut them.
SHARD_BYTES = 5_000_000_000
_PLAIN_PREFIX = "model"


@dataclass(frozen=True)
class MadeModel:
    """A model to add.

    Fields:
        source: Description of how it was made.
        plan: The origin of each component's modules.
        components: Layers are numbered along the chain.
        tensors: digest -> every tensor that the components reference.
        sides: A parent's files to include (tokenizer, generation config).
        hidden: Files that are kept, but not exported.
        extra: Further files by path.
        extra_config: Settings for `config.json` beside the computed ones.
        pairs: Scored pairs to store with it.
    """

    name: str
    kind: ModelKind
    base: str | None
    source: str
    plan: ChainPlan
    components: tuple[Placed, ...]
    tensors: Mapping[str, TensorMeta]
    sides: tuple[SideFile, ...] = ()
    hidden: tuple[SideFile, ...] = ()
    extra: Mapping[str, bytes] = field(default_factory=dict)
    extra_config: Mapping[str, Any] = field(default_factory=dict)
    pairs: tuple[Equivalence, ...] = ()


@dataclass(frozen=True, slots=True)
class MadeReport:
    """Result of `put_made`.

    Fields:
        exportable: It has weight files.
        reason: Why no stock checkpoint exists for it; None if one does.
        bytes_new: Bytes of tensors that the store's models did not have.
    """

    model: str
    family: str
    blocks: int
    exportable: bool
    reason: str | None
    bytes_new: int


def put_made(store: Store, made: MadeModel) -> MadeReport:
    """Write the new parts of a model and add it, in one transaction with the chains that share with it.

    Raises:
        NameTaken: Another model has the name.
        NotFound: The base does not exist.
        InputError: The name is invalid, or the chain is neither a checkpoint nor fits a chain's config.
        ValueError: The components reference tensors that `tensors` lacks.
    """
    check_name(made.name)
    plain = plain_config(made.plan, made.components)
    reason = None if plain is not None else why_not_plain(made.plan, made.components)
    config = {**(plain or _own_config(made, reason or "")), **made.extra_config}
    files, index = _weight_files(store, made, plain is not None)
    extra = {**index, **made.extra, "config.json": _json(config)}
    sides = tuple(SideFile(path, store.blobs.put(data), len(data)) for path, data in extra.items())
    # The model's own, also where the parent derived them from a GGUF file.
    carried = tuple(SideFile(side.path, side.blob, side.nbytes) for side in made.sides if side.path not in extra)
    manifest = ModelManifest(
        name=made.name,
        kind=made.kind,
        base=made.base,
        family=family_of(config).name if plain is not None else CHAIN,
        source=made.source,
        components=made.components,
        weight_files=files,
        side_files=(*sides, *carried, *made.hidden),
        tensors=tuple(made.tensors[digest] for digest in _named(made.components)),
    )
    with store.catalog.writing() as writer:
        known = writer.users_of([tensor.digest for tensor in manifest.tensors])
        writer.put_model(manifest)
        regroup(writer, writer.sharing_group([placed.component.digest for placed in manifest.components]))
        writer.put_equivalences(made.pairs)
        blocks = len(writer.chain(made.name))
    new = sum(tensor.nbytes for tensor in manifest.tensors if tensor.digest not in known)
    return MadeReport(made.name, manifest.family, blocks, bool(files), reason, new)


def _named(components: Iterable[Placed]) -> list[str]:
    """Return the tensor digests that components reference, each once, adapters' included."""
    found: dict[str, None] = {}
    for placed in components:
        adapter = placed.component.adapter
        for _, digest in (*placed.component.tensors, *(adapter.tensors if adapter else ())):
            found.setdefault(digest)
    return list(found)


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


# -- configs -----------------------------------------------------------------------------------------------------------


def plain_config(plan: ChainPlan, components: Sequence[Placed]) -> dict[str, Any] | None:
    """Return the `config.json` of a checkpoint that computes exactly this chain, or None if the family has none.

    A config is used only if it gives every component, at its place, the settings that the component was stored with.
    """
    if not _has_plain_form(components):
        return None
    first = dict(plan.sources[0])
    family = family_of(first)
    layers = max(placed.layer for placed in components if placed.layer is not None) + 1
    counts = [key for key in ("num_hidden_layers", "n_layer", "num_layers") if key in first] or ["num_hidden_layers"]
    base: dict[str, Any] = {**first, **dict.fromkeys(counts, layers), **_least_contexts(plan)}
    base["tie_word_embeddings"] = is_tied(first, family) and _shares_table(family, components)
    typed = {**base, "layer_types": _layer_types(components)}
    for candidate in (
        (typed,) if first.get("layer_types") else (base, typed)
    ):  # layer_types of the source may have another length
        if _describes(candidate, family, components):
            return candidate
    return None


def _least_contexts(plan: ChainPlan) -> dict[str, int]:
    """Return the first source's settings of the context length, each with the least value among the sources."""
    first = plan.sources[0]
    spelled = [
        key
        for key in ("max_position_embeddings", "n_positions", "n_ctx", "seq_length")
        if isinstance(first.get(key), int)
    ]
    return {key: min(int(source.get(key, first[key])) for source in plan.sources) for key in spelled}


def _has_plain_form(components: Sequence[Placed]) -> bool:
    """Return whether the chain is embedding, whole layers of one family, head; no stitches, no adapters."""
    families = {placed.component.family for placed in components}
    kinds = [placed.component.kind for placed in components]
    if len(families) != 1 or "stitch" in kinds or any(placed.component.adapter is not None for placed in components):
        return False
    inner = kinds[1:-1]
    whole = all(kind == "layer" for kind in inner) or inner == ["attention", "ffn"] * (len(inner) // 2)
    return bool(inner) and kinds[0] == "embedding" and kinds[-1] == "lm_head" and whole


def _describes(config: Mapping[str, Any], family: Family, components: Sequence[Placed]) -> bool:
    return all(
        canonical_json(spec_of(config, family, placed.component.kind, placed.layer)) == placed.component.spec
        for placed in components
    )


def _layer_types(components: Sequence[Placed]) -> list[str]:
    """Return one type per layer, as stored with the attention components."""
    attention = [placed.component for placed in components if placed.component.kind in ("attention", "layer")]
    return [json.loads(component.spec).get("layer_type", "full_attention") for component in attention]


def _shares_table(family: Family, components: Sequence[Placed]) -> bool:
    table = dict(components[0].component.tensors).get(f"{family.embedding[0]}.weight")
    return dict(components[-1].component.tensors).get("lm_head.weight") == table


def why_not_plain(plan: ChainPlan, components: Sequence[Placed]) -> str:
    """Return the reason why no architecture of transformers can represent this chain, for the user."""
    families = sorted({placed.component.family for placed in components} - {"stitch"})
    kinds = {placed.component.kind for placed in components}
    if any(placed.component.adapter is not None for placed in components):
        return "blocks with adapters: a checkpoint holds whole weights only"
    if "stitch" in kinds:
        return "stitching blocks: no architecture of transformers has them"
    if len(families) > 1:
        return f"blocks of several families ({', '.join(families)})"
    if not _has_plain_form(components):
        return "layers without attention or without ffn"
    return "layers of different shapes or settings: the family's config has one for all"


def _own_config(made: MadeModel, reason: str) -> dict[str, Any]:
    """Return a chain's config: tokens of the embedding's model, and the least context of all sources.

    Raises InputError for a family with blocks that run in models of their own architecture only, and for more than a
    chain can hold.
    """
    used = {link.source for link in made.plan.links if link.source is not None}
    for family in (family_of(made.plan.sources[source]) for source in sorted(used)):
        if family.masked:
            raise InputError(
                f"{family.name} blocks run in plain {family.name} checkpoints only, and this chain is none: {reason}"
            )
    first = made.plan.sources[made.plan.links[0].source or 0]
    tokens = {key: first[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in first}
    context = min(context_length(made.plan.sources[source]) for source in used)
    extra = {"vocab_size": first.get("vocab_size"), "max_position_embeddings": context, **tokens}
    return config_for(made.plan, made.components, extra)


# -- files -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Entry:
    key: str
    tensor: TensorMeta


def _weight_files(store: Store, made: MadeModel, plain: bool) -> tuple[tuple[WeightFile, ...], dict[str, bytes]]:
    """Return the files that an export writes, and their index if there are several.

    Empty for chains with adapters, which have no such files.
    """
    if any(placed.component.adapter is not None for placed in made.components):
        return (), {}
    entries = list(_entries(made, plain))
    shards = list(_shards(entries))
    names = [_shard_name(at, len(shards)) for at in range(len(shards))]
    files = tuple(_weight_file(store, name, shard) for name, shard in zip(names, shards, strict=True))
    if len(shards) == 1:
        return files, {}
    weight_map = {entry.key: name for name, shard in zip(names, shards, strict=True) for entry in shard}
    total = sum(entry.tensor.nbytes for entry in entries)
    return files, {"model.safetensors.index.json": _json({"metadata": {"total_size": total}, "weight_map": weight_map})}


def _entries(made: MadeModel, plain: bool) -> Iterator[_Entry]:
    """Yield key and tensor of all weights, in chain order; a tied head is not written twice."""
    family = FAMILIES[made.components[0].component.family] if plain else None
    tied = family is not None and _shares_table(family, made.components) and is_tied(made.plan.sources[0], family)
    for at, placed in enumerate(made.components):
        for name, digest in placed.component.tensors:
            if tied and name == "lm_head.weight":
                continue
            key = part_key(at, name) if family is None else disk_key(family, placed.layer, name)
            yield _Entry(key, made.tensors[digest])


def _shards(entries: Sequence[_Entry]) -> Iterator[list[_Entry]]:
    shard: list[_Entry] = []
    size = 0
    for entry in entries:
        if shard and size + entry.tensor.nbytes > SHARD_BYTES:
            yield shard
            shard, size = [], 0
        shard.append(entry)
        size += entry.tensor.nbytes
    yield shard


def _shard_name(at: int, count: int) -> str:
    return f"{_PLAIN_PREFIX}.safetensors" if count == 1 else f"{_PLAIN_PREFIX}-{at + 1:05d}-of-{count:05d}.safetensors"


def _weight_file(store: Store, name: str, entries: Sequence[_Entry]) -> WeightFile:
    header = make_header([(entry.key, entry.tensor.dtype, entry.tensor.shape) for entry in entries], {"format": "pt"})
    return WeightFile(name, store.blobs.put(header), tuple((entry.key, entry.tensor.digest) for entry in entries))


def check_adapters(components: Iterable[Placed]) -> None:
    """Raise InputError for a component with an adapter that cannot be part of a chain of several models."""
    for placed in components:
        adapter = placed.component.adapter
        if adapter is not None and not is_low_rank(adapter):
            where = (
                placed.component.kind if placed.layer is None else f"{placed.component.kind} of layer {placed.layer}"
            )
            raise InputError(
                f"the {where} has an adapter of kind {adapter.kind} that a chain cannot take along: "
                "only plain LoRA on linear layers can be part of one; merge it into a checkpoint first"
            )
