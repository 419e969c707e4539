"""What serving reads from a model's side files: its config, how long its context is, and when it stops.

Knows the manifest and the blobs; nothing of torch. Values are read as transformers reads them.
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

#: Rotary types whose tables depend on the longest sequence of a batch: beyond the original length no mixed batch can be
#: exact.
_BATCH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope", "su", "yarn_dynamic"})


def side_json(store: Store, manifest: ModelManifest, path: str) -> dict[str, Any] | None:
    """A JSON side file of a model (inherited ones too), or None. Raises MalformedCheckpoint when it is no object."""
    for side in manifest.side_files:
        if side.path == path:
            value = json.loads(store.blobs.get(side.blob))
            if not isinstance(value, dict):
                raise MalformedCheckpoint(f"{manifest.name}: {path} is not a JSON object")
            return value
    return None


def config_of(store: Store, manifest: ModelManifest) -> dict[str, Any]:
    """The model's `config.json`. Raises MalformedCheckpoint when it has none."""
    config = side_json(store, manifest, "config.json")
    if config is None:
        raise MalformedCheckpoint(f"{manifest.name} has no config.json")
    return config


def context_length(config: Mapping[str, Any]) -> int:
    """Tokens a sequence may have. Batch-dependent rotary types are served up to their original length, where they are
    exact.

    A chain of its own kind has as many as it says, and no more than any of its sources.
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
    """Values a token has between the layers of a config's model, by default too."""
    for key in ("hidden_size", "n_embd", "n_embed"):
        if isinstance(config.get(key), int):
            return int(config[key])
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return int(CONFIG_MAPPING[family_of(config).name].from_dict(dict(config)).hidden_size)


def eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any] | None) -> tuple[int, ...]:
    """Ids that end an answer: the generation config's where it names any, else the config's, as `generate` does."""
    for source in (generation or {}, config):
        value = source.get("eos_token_id")
        if isinstance(value, int):
            return (value,)
        if isinstance(value, list) and value:
            return tuple(int(token) for token in value)
    return ()
