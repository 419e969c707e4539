"""Component specs against transformers: two configs have equal specs exactly when transformers reads them alike."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from surgery.families.specs import IRRELEVANT, spec_of
from surgery.families.table import family_of, layer_count, rope_of
from surgery.ingest.cut import places
from tests.checkpoints import CONFIGS, VARIANTS, config_for

NAMES = [*CONFIGS, *VARIANTS]
#: Settings with other values than in the tiny checkpoints: defaults or close to them.
OTHER_BASES: list[tuple[str, dict[str, Any]]] = [
    ("mistral", {"sliding_window": None}),
    ("mistral", {"sliding_window": 4096, "num_key_value_heads": 4}),
    ("qwen2", {"use_sliding_window": False, "num_key_value_heads": 4}),
    ("qwen2", {"sliding_window": 4096}),
    ("qwen3", {"num_key_value_heads": 4, "head_dim": 16}),
    ("llama", {"num_key_value_heads": 4}),
    ("phi3", {"sliding_window": None, "num_key_value_heads": 4}),
    ("phi", {"num_key_value_heads": 4}),
    ("gemma2", {"final_logit_softcapping": 30.0, "attn_logit_softcapping": None, "num_key_value_heads": 4}),
    ("mixtral", {"sliding_window": 8, "num_local_experts": 8}),
    ("falcon", {"new_decoder_architecture": False, "num_kv_heads": 4, "parallel_attn": False}),
    ("gpt_neox", {"rope_parameters": {"rope_theta": 500000.0, "partial_rotary_factor": 1.0, "rope_type": "default"}}),
    ("llama", {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "linear", "factor": 2.0}}),
]
#: Read by transformers, but without effect on a component's computation: shapes, counts, positions handled elsewhere.
_ROPE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}


def _written(config: Any) -> dict[str, Any]:
    return json.loads(config.to_json_string())


def _reread(config: dict[str, Any]) -> dict[str, Any] | None:
    """Return a config.json as transformers parses it; None where it is refused."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    try:
        return _written(CONFIG_MAPPING[config["model_type"]].from_dict(copy.deepcopy(config)))
    except Exception:
        return None


def _specs(config: dict[str, Any]) -> list[dict[str, Any]]:
    family = family_of(config)
    return [spec_of(config, family, kind, layer) for kind, layer in places(family, 3)]


def _meaning(config: dict[str, Any]) -> dict[str, Any]:
    kept = {key: value for key, value in config.items() if key not in IRRELEVANT and key not in _ROPE}
    return {**kept, "layer_types": config.get("layer_types"), "rope": rope_of(config, family_of(config))}


@pytest.mark.parametrize("name", NAMES)
def test_a_minimal_config_means_what_transformers_writes_for_it(name):
    family, extra = VARIANTS.get(name, (name, {}))
    minimal = {**CONFIGS[family], **extra, "model_type": family}
    assert _specs(minimal) == _specs(_written(config_for(name)))
    assert layer_count(minimal) == 3


@pytest.mark.parametrize(("name", "extra"), [*[(name, {}) for name in NAMES], *OTHER_BASES])
def test_leaving_a_setting_out_changes_the_spec_exactly_when_transformers_reads_another_model(name, extra):
    written = _written(config_for(name, **extra))
    checked = 0
    for key in written.keys() - {"model_type", "num_hidden_layers", "n_layer", "n_layers", "hidden_size", "d_model"}:
        for changed in ({k: v for k, v in written.items() if k != key}, {**written, key: None}):
            reread = _reread(changed)
            if reread is None or (
                key in changed and reread.get(key) is None and written[key] is not None and key != "sliding_window"
            ):
                continue
            checked += 1
            alike = _meaning(reread) == _meaning(written)
            assert (_specs(changed) == _specs(written)) == alike, (key, written[key], reread.get(key))
    assert checked > 10


def test_a_window_of_none_is_not_the_default_window():
    absent, none = ({**CONFIGS["mistral"], "model_type": "mistral"} for _ in range(2))
    del absent["sliding_window"]
    none["sliding_window"] = None
    assert _specs(absent) != _specs(none)
    assert _specs(absent) == _specs({**none, "sliding_window": 4096})


@pytest.mark.parametrize(
    ("family", "old", "new"),
    [
        ("bloom", {"n_embed": 64, "num_attention_heads": 4}, {"hidden_size": 64, "n_head": 4}),
        ("gpt2", {"hidden_size": 64, "num_attention_heads": 4}, {"n_embd": 64, "n_head": 4}),
        (
            "gpt_neox",
            {"rotary_pct": 0.5, "rotary_emb_base": 20000},
            {"rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 20000.0}},
        ),
        ("llama", {"rope_theta": 20000}, {"rope_parameters": {"rope_type": "default", "rope_theta": 20000.0}}),
        (
            "llama",
            {"rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
        ),
        (
            "phi3",
            {"rope_scaling": {"type": "su", "long_factor": [1]}},
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
        ),
    ],
)
def test_old_and_new_spellings_are_one_setting(family, old, new):
    shared = {"model_type": family, "num_hidden_layers": 3, "max_position_embeddings": 256}
    rest = {} if family in ("bloom", "gpt2") else {"hidden_size": 64, "num_attention_heads": 4}
    assert _specs({**shared, **rest, **old}) == _specs({**shared, **rest, **new})
