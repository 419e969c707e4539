"""Settings that serving reads from a model's side files: config, context length, end-of-sequence ids.

Uses the manifest and the blobs, not torch. Values are read as transformers reads them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from surgery.chains.plan import is_chain, parse_chain
from surgery.families.table import family_of, rope_of
from zoo.errors import MalformedCheckpoint
from zoo.manifest import ModelManifest
from zoo.store import Store

#: Rotary types with tables that depend on the longest sequence of a batch: beyond the original length no mixed batch is
#: exact.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su", "yarn_dynamic"})


def side_json(store: Store, manifest: ModelManifest, path: str) -> dict[str, Any] | None:
    """Return a JSON side file of a model (inherited ones too), or None. Raises MalformedCheckpoint if no object."""
    for side in manifest.side_files:
        if side.path == path:
            value = json.loads(store.blobs.get(side.blob))
            if not isinstance(value, dict):
                raise MalformedCheckpoint(f"{manifest.name}: {path} is not a JSON object")
            return value
    return None


def config_of(store: Store, manifest: ModelManifest) -> dict[str, Any]:
    """Return the model's `config.json`. Raises MalformedCheckpoint if it has none."""
    config = side_json(store, manifest, "config.json")
    if config is None:
        raise MalformedCheckpoint(f"{manifest.name} has no config.json")
    return config


def context_length(config: Mapping[str, Any]) -> int:
    """Return the maximum number of tokens of a sequence.

    Batch-dependent rotary types are served up to their original length, where they are exact. A composed chain has the
    length in its config, but at most the least of its sources.
    """
    if is_chain(config):
        least = min(context_length(source) for source in parse_chain(config).sources)
        own = config.get("max_position_embeddings")
        return min(least, own) if isinstance(own, int) and own > 0 else least
    for key in ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "seq_length"):
        value = config.get(key)
        if isinstance(value, int) and value > 0:
            length = value
            break
    else:
        length = 2048
    rope = rope_of(config, family_of(config)) or {}
    if rope.get("rope_type") in _BATCH_DEPENDENT_ROPE:
        original = (
            config.get("original_max_position_embeddings") or rope.get("original_max_position_embeddings") or length
        )
        return min(length, int(original))
    return length


def hidden_width(config: Mapping[str, Any]) -> int:
    """Return the width of a config's hidden states, given or by default."""
    for key in ("hidden_size", "n_embd", "n_embed"):
        if isinstance(config.get(key), int):
            return int(config[key])
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return int(CONFIG_MAPPING[family_of(config).name].from_dict(dict(config)).hidden_size)


def eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Return the ids that end an answer: the generation config's if it has any, else the config's, as in `generate`."""
    for source in (generation or {}, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return ()
