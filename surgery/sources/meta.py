"""Meta's original checkpoints (`params.json`, `consolidated.NN.pth`, `tokenizer.model`) in Hugging Face's layout.

Shards are joined and the rotary layout of q and k is permuted; names, config and tokenizer are those of transformers'
own converter. Tensors keep their dtype and are read lazily.

The files are pickles, read with torch's weights-only loader. Other pickled layouts need `allow_pickle`; this one does
not, since its content is fully defined. torch and transformers are imported by the modules called from here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from surgery.sources.base import Source, SourceSide, SourceWeights
from surgery.sources.folder import Folder, look, real_file
from surgery.sources.local import INDEX, SINGLE, left_out_note
from surgery.sources.meta_layout import Shard, plan
from surgery.sources.meta_params import MetaParams, context_length, hf_config, parse_params
from surgery.sources.meta_shards import JoinedTensor, inventory, same_bytes
from surgery.sources.meta_tokenizer import ConvertedTokenizer, convert_tokenizer, tokenizer_kind
from surgery.sources.strict_json import CONFIG_LIMIT, parse_object
from zoo.errors import MalformedCheckpoint
from zoo.objects.headers import make_header

PARAMS = "params.json"
TOKENIZER = "tokenizer.model"
SHARD_BYTES = 5_000_000_000

_SHARD = re.compile(r"consolidated\.(\d{2})\.pth")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_meta(folder: Path) -> bool:
    """Return whether a folder looks like one of Meta's: it has the settings and at least one shard, sound or not."""
    return (folder / PARAMS).is_file() and any(
        _SHARD.fullmatch(path.name) for path in folder.glob("consolidated.*.pth")
    )


def open_meta(folder: Path, shard_bytes: int = SHARD_BYTES) -> Source:
    """Parse a folder in Meta's layout.

    Args:
        shard_bytes: Maximum size of a weight file that an export will write.

    Raises:
        MalformedCheckpoint: Files are missing or broken, or the shards disagree with each other or with params.json.
        UnsafeCheckpoint: A shard holds more than tensors, or a link leaves the folder.
        InputError: Settings that are not Meta's, or the tokenizer's library is not installed.
    """
    here = look(folder)
    document = here.read(PARAMS, CONFIG_LIMIT)
    params = parse_params(parse_object(document, PARAMS))
    paths = _shard_paths(here)
    tensors = plan(params, [Shard(path, inventory(path)) for path in paths])
    tied = _is_tied(params, tensors)
    if tied:
        tensors = tuple(tensor for tensor in tensors if tensor.key != "lm_head.weight")
    tokenizer = _tokenizer(here, params)
    config = _config(params, tokenizer, tensors, tied)
    weights = split(tensors, shard_bytes)
    made = (*_config_sides(config), *tokenizer.sides, *_index(weights), SourceSide("original/" + PARAMS, document))
    replaced = frozenset({side.path for side in made} | {PARAMS, TOKENIZER})
    shards = frozenset(path for path in here.left_out if _SHARD.fullmatch(path))
    note = (
        f"Meta's layout ({len(paths)} consolidated.*.pth) became Hugging Face's: names, rotary layout, config, "
        "tokenizer"
    )
    return Source(
        str(here.root), config, None, weights, (*here.sides(replaced), *made), (note, *left_out_note(here, shards))
    )


def split(tensors: Sequence[JoinedTensor], limit: int) -> tuple[SourceWeights, ...]:
    """Group tensors into weight files of at most `limit` bytes, named as transformers names them.

    A larger tensor gets its own file.
    """
    groups: list[list[JoinedTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    count = len(groups)
    names = (
        [SINGLE] if count == 1 else [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    )
    return tuple(SourceWeights(name, _header(group), tuple(group)) for name, group in zip(names, groups, strict=True))


def _header(group: Sequence[JoinedTensor]) -> bytes:
    return make_header([(tensor.key, tensor.dtype, tensor.shape) for tensor in group], {"format": "pt"})


def _shard_paths(here: Folder) -> list[Path]:
    """Return the shards in order. Raises MalformedCheckpoint if there is none or a number is missing."""
    names = sorted(path for path in here.left_out if _SHARD.fullmatch(path))
    wanted = [f"consolidated.{number:02d}.pth" for number in range(max(1, len(names)))]
    if names != wanted:
        missing = sorted(set(wanted) - set(names))[0]
        raise MalformedCheckpoint(
            f"{missing} is missing: the shards must be consolidated.00.pth and so on without a hole"
        )
    return [here.locate(name) for name in names]


def _is_tied(params: MetaParams, tensors: Sequence[JoinedTensor]) -> bool:
    """Return whether head and embedding are tied.

    Llama 3.2's text models contain the shared table twice; transformers keeps it once. Older models are never tied.
    """
    by_key = {tensor.key: tensor for tensor in tensors}
    head = by_key.get("lm_head.weight")
    return head is None or (params.scaled_rope and same_bytes(by_key["model.embed_tokens.weight"], head))


def _tokenizer(here: Folder, params: MetaParams) -> ConvertedTokenizer:
    """Convert `tokenizer.model`, which is beside the weights or, for several sizes together, one folder above."""
    data = here.read(TOKENIZER) if here.has(TOKENIZER) else _tokenizer_above(here.root)
    context = context_length(params, tokenizer_kind(data))
    instruct = bool(re.search(r"chat|instruct", checkpoint_name(here.root), re.IGNORECASE))
    return convert_tokenizer(data, scaled_rope=params.scaled_rope, context=context, instruct=instruct)


def _tokenizer_above(root: Path) -> bytes:
    try:
        path = real_file(root.parent, TOKENIZER)
    except MalformedCheckpoint:
        raise MalformedCheckpoint(f"{TOKENIZER} is missing, in the checkpoint's folder and above it") from None
    return Folder(path.parent, (path.name,), ()).read(path.name)


def checkpoint_name(root: Path) -> str:
    """Return the repository's name in the hub cache, else the folder's. The files do not contain the name."""
    if root.parent.name == "snapshots":
        return root.parent.parent.name.rsplit("--", 1)[-1]
    return root.parent.name if root.name == "original" else root.name


def _config(
    params: MetaParams, tokenizer: ConvertedTokenizer, tensors: Sequence[JoinedTensor], tied: bool
) -> dict[str, Any]:
    table = tensors[0]
    rows = table.shape[0]
    if tokenizer.size > rows:
        raise MalformedCheckpoint(f"{TOKENIZER} has {tokenizer.size} tokens, but the embedding has only {rows} rows")
    return hf_config(
        params,
        tokenizer=tokenizer.kind,
        bos=tokenizer.bos,
        eos=tokenizer.eos,
        vocab_size=rows,
        dtype=_DTYPES[table.dtype],
        tied=tied,
    )


def _config_sides(config: dict[str, Any]) -> tuple[SourceSide, ...]:
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id")}
    return (SourceSide("config.json", _json(config)), SourceSide("generation_config.json", _json(ends)))


def _index(weights: Sequence[SourceWeights]) -> tuple[SourceSide, ...]:
    """Return the shard index, if there is more than one file."""
    if len(weights) == 1:
        return ()
    table = {tensor.key: one.path for one in weights for tensor in one.tensors}
    total = sum(tensor.nbytes for one in weights for tensor in one.tensors)
    return (SourceSide(INDEX, _json({"metadata": {"total_size": total}, "weight_map": table})),)


def _json(document: dict[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
