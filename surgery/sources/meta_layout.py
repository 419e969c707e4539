"""Plan the join of Meta's shards: Meta's tensor names, how each is cut, and the Hugging Face key of each joined tensor.

A pure function of params.json and of the shards' names, dtypes and shapes. The cut is that of fairscale's layers, as
transformers' `convert_llama_weights_to_hf.py` undoes it:

- wq, wk, wv, w1, w3 and output are split along rows, wo and w2 along columns.
- Norms are in every shard; the first one's is used, as there.
- The embedding is split along columns (Llama 1 and 2) or rows (Llama 3), as its shapes show.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surgery.sources.meta_params import MetaParams
from surgery.sources.meta_shards import Axis, JoinedTensor, ShardPart, Stored
from zoo.errors import MalformedCheckpoint

Cut = Literal["rows", "columns", "whole"]


@dataclass(frozen=True, slots=True)
class Shard:
    """One `consolidated.NN.pth` and its tensors."""

    path: Path
    tensors: Mapping[str, Stored]


@dataclass(frozen=True, slots=True)
class _Place:
    """One row of the plan: Meta's name, Hugging Face's key, the joined shape and how the shards cut it."""

    name: str
    key: str
    shape: tuple[int, ...]
    cut: Cut
    rotary: bool = False


def plan(params: MetaParams, shards: Sequence[Shard]) -> tuple[JoinedTensor, ...]:
    """Return every tensor of the Hugging Face checkpoint, in the order of its state dict.

    `lm_head` is absent if the shards lack it.

    Raises:
        MalformedCheckpoint: The shards disagree with each other or with params.json.
    """
    names = _agreed_names(shards)
    vocab = _vocab_rows(params, shards)
    places = [place for place in _places(params, vocab) if place.name != "output.weight" or place.name in names]
    # Frequencies (in the files of Llama 1 and 2 only) are recomputed from params.json.
    extra = sorted(names - {place.name for place in places} - {"rope.freqs"})
    if extra:
        raise MalformedCheckpoint(
            f"tensor {extra[0]!r} has no place in the {params.layers} layers that params.json promises"
        )
    return tuple(_join(params, place, shards) for place in places)


def _agreed_names(shards: Sequence[Shard]) -> set[str]:
    names = set(shards[0].tensors)
    for shard in shards[1:]:
        odd = sorted(names ^ set(shard.tensors))
        if odd:
            raise MalformedCheckpoint(
                f"{shards[0].path.name} and {shard.path.name} disagree: only one of them holds {odd[0]!r}"
            )
    return names


def _vocab_rows(params: MetaParams, shards: Sequence[Shard]) -> int:
    """Return the rows of the embedding in the shards, checked against params.json if it gives them."""
    parts = [_held(shard, "tok_embeddings.weight").shape for shard in shards]
    if any(len(shape) != 2 for shape in parts):
        raise MalformedCheckpoint("tok_embeddings.weight is not a matrix")
    rows = sum(shape[0] for shape in parts) if _embedding_cut(params, shards) == "rows" else parts[0][0]
    if params.vocab_size is not None and params.vocab_size != rows:
        raise MalformedCheckpoint(f"the embedding has {rows} rows, but params.json promises {params.vocab_size}")
    return rows


def _embedding_cut(params: MetaParams, shards: Sequence[Shard]) -> Cut:
    return "rows" if _held(shards[0], "tok_embeddings.weight").shape[1:] == (params.dim,) else "columns"


def _places(params: MetaParams, vocab: int) -> Iterator[_Place]:
    """Yield the state dict in order. `_join` determines the embedding's cut."""
    dim, wide, keys = params.dim, params.intermediate, params.kv_heads * params.head_dim
    yield _Place("tok_embeddings.weight", "model.embed_tokens.weight", (vocab, dim), "rows")
    for layer in range(params.layers):
        ours, theirs = f"model.layers.{layer}.", f"layers.{layer}."
        yield _Place(theirs + "attention.wq.weight", ours + "self_attn.q_proj.weight", (dim, dim), "rows", rotary=True)
        yield _Place(theirs + "attention.wk.weight", ours + "self_attn.k_proj.weight", (keys, dim), "rows", rotary=True)
        yield _Place(theirs + "attention.wv.weight", ours + "self_attn.v_proj.weight", (keys, dim), "rows")
        yield _Place(theirs + "attention.wo.weight", ours + "self_attn.o_proj.weight", (dim, dim), "columns")
        yield _Place(theirs + "feed_forward.w1.weight", ours + "mlp.gate_proj.weight", (wide, dim), "rows")
        yield _Place(theirs + "feed_forward.w3.weight", ours + "mlp.up_proj.weight", (wide, dim), "rows")
        yield _Place(theirs + "feed_forward.w2.weight", ours + "mlp.down_proj.weight", (dim, wide), "columns")
        yield _Place(theirs + "attention_norm.weight", ours + "input_layernorm.weight", (dim,), "whole")
        yield _Place(theirs + "ffn_norm.weight", ours + "post_attention_layernorm.weight", (dim,), "whole")
    yield _Place("norm.weight", "model.norm.weight", (dim,), "whole")
    yield _Place("output.weight", "lm_head.weight", (vocab, dim), "rows")


def _join(params: MetaParams, place: _Place, shards: Sequence[Shard]) -> JoinedTensor:
    cut = _embedding_cut(params, shards) if place.name == "tok_embeddings.weight" else place.cut
    held = [_held(shard, place.name) for shard in shards]
    if cut == "whole":
        held, shards = held[:1], shards[:1]
    head_rows = params.head_dim if place.rotary else 0
    _check_parts(place, cut, held, head_rows)
    axis: Axis = "columns" if cut == "columns" else "rows"
    parts = tuple(_part(shard, stored) for shard, stored in zip(shards, held, strict=True))
    return JoinedTensor(place.key, held[0].dtype, place.shape, parts, axis, head_rows)


def _part(shard: Shard, stored: Stored) -> ShardPart:
    columns = stored.shape[1] if len(stored.shape) == 2 else 1
    return ShardPart(shard.path, stored.begin, stored.shape[0], columns)


def _held(shard: Shard, name: str) -> Stored:
    stored = shard.tensors.get(name)
    if stored is None:
        raise MalformedCheckpoint(f"{shard.path.name} lacks {name!r}, which params.json promises")
    return stored


def _check_parts(place: _Place, cut: Cut, held: Sequence[Stored], head_rows: int) -> None:
    """Check that parts have one dtype, join to the expected shape, and never cut through a head."""
    if len({part.dtype for part in held}) > 1:
        raise MalformedCheckpoint(f"the shards disagree on the dtype of {place.name!r}")
    if any(len(part.shape) != len(place.shape) for part in held):
        raise MalformedCheckpoint(f"{place.name!r} has {len(held[0].shape)} dimensions instead of {len(place.shape)}")
    axis = 1 if cut == "columns" else 0
    rest = {part.shape[:axis] + part.shape[axis + 1 :] for part in held}
    joined = sum(part.shape[axis] for part in held)
    if rest != {place.shape[:axis] + place.shape[axis + 1 :]} or joined != place.shape[axis]:
        parts = " + ".join(str(list(part.shape)) for part in held)
        raise MalformedCheckpoint(
            f"{place.name!r}: the shards hold {parts}, but params.json promises {list(place.shape)}"
        )
    if head_rows and any(part.shape[0] % head_rows for part in held):
        raise MalformedCheckpoint(f"{place.name!r}: a shard ends inside an attention head")
