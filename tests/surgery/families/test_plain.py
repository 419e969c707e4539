"""Plain families are read without transformers, and equal the models of transformers bit for bit."""

from __future__ import annotations

import json

import pytest
import torch

from runtime.config import EngineConfig
from surgery.families.plain import PLAIN_FAMILIES, plain_settings
from surgery.modules import skeleton
from surgery.modules.plain import PlainModel, PlainRotary
from surgery.modules.skeleton import Skeleton
from tests import checkpoints
from tests.runtime.engine.drive import PagedDevice


def config_of(family: str) -> dict:
    """Return a config as `save_pretrained` writes it; for qwen2 without the windows in some of its test layers."""
    without = {"use_sliding_window": False, "layer_types": None} if family == "qwen2" else {}
    return json.loads(checkpoints.config_for(family, **without).to_json_string(use_diff=False))


LLAMA = config_of("llama")


@pytest.mark.parametrize("family", sorted(PLAIN_FAMILIES))
def test_modules_are_those_of_transformers(family):
    config = config_of(family)
    plain = plain_settings(config)
    assert plain is not None
    stock = Skeleton(config)
    with torch.device("meta"):
        made = PlainModel(plain)
    shapes = {name: tuple(value.shape) for name, value in made.state_dict().items()}
    assert shapes == {name: tuple(value.shape) for name, value in stock.model.state_dict().items()}
    attention, theirs = made.model.layers[1].self_attn, stock.layer(1).self_attn
    assert (attention.head_dim, attention.scaling) == (theirs.head_dim, theirs.scaling)
    if family == "mistral":
        assert attention.config.sliding_window == theirs.config.sliding_window
    else:
        assert getattr(theirs, "sliding_window", None) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", sorted(PLAIN_FAMILIES))
def test_norms_and_rotary_tables_are_those_of_transformers(family, dtype):
    config = config_of(family)
    plain, stock = plain_settings(config), Skeleton(config)
    assert plain is not None and stock.rotary is not None
    like, positions = (
        torch.randn(2, 5, plain.hidden_size).to(dtype),
        torch.tensor([[0, 1, 2, 3, 900], [7, 8, 9, 31, 1 << 18]]),
    )
    for mine, theirs in zip(PlainRotary(plain)(like, positions), stock.rotary(like, positions), strict=True):
        assert mine.dtype == theirs.dtype and torch.equal(mine, theirs)
    weight = torch.nn.Parameter(torch.randn(plain.hidden_size).to(dtype))
    theirs, mine = stock.layer(0).input_layernorm, Skeleton.of_parts(plain).layer(0).input_layernorm
    theirs.weight = mine.weight = weight
    assert torch.equal(mine(like), theirs(like))


def test_both_spellings_of_the_angles_base():
    old = {key: value for key, value in LLAMA.items() if key != "rope_parameters"}
    assert plain_settings({**old, "rope_theta": 10000, "rope_scaling": None}) == plain_settings(LLAMA)


@pytest.mark.parametrize(
    "change",
    [
        {"model_type": "gemma2"},
        {"model_type": None},
        {"hidden_act": "gelu"},
        {"num_key_value_heads": None},
        {"num_key_value_heads": 3},
        {"hidden_size": 64.0},
        {"hidden_size": True},
        {"num_attention_heads": 0},
        {"num_attention_heads": 3},
        {"head_dim": 7},
        {"head_dim": "16"},
        {"rms_norm_eps": None},
        {"attention_bias": "yes"},
        {"rope_parameters": None},
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"rope_theta": 1e4},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"quantization_config": {"bits": 4}},
        {"use_sliding_window": True},
        {"model_type": "qwen3", "head_dim": None},
        {"model_type": "qwen2", "layer_types": ["sliding_attention"] * LLAMA["num_hidden_layers"]},
        {"model_type": "qwen2", "layer_types": ["full_attention"]},
        {"model_type": "mistral", "sliding_window": 0},
    ],
)
def test_what_is_not_plain_is_left_to_transformers(change):
    assert plain_settings(LLAMA) is not None
    assert plain_settings({**LLAMA, **change}) is None


def test_mistral_says_its_window_itself():
    config = config_of("mistral")
    assert plain_settings({key: value for key, value in config.items() if key != "sliding_window"}) is None


def test_the_engine_does_without_transformers(tmp_path, monkeypatch):
    """With fused layers a plain model's skeleton is built from parts; with stock layers transformers builds it."""
    from surgery.ingest.ingest import ingest
    from surgery.sources import open_source
    from zoo.store import Store

    def refused(*_: object, **__: object) -> None:
        raise AssertionError("transformers was asked")

    with Store.open(tmp_path / "store") as store:
        ingest(store, open_source(str(checkpoints.make("llama", tmp_path / "hf", tokenizer=False))), name="model")
        monkeypatch.setattr(skeleton.Skeleton, "__init__", refused)
        PagedDevice(store, EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4), ["model"])
        with pytest.raises(AssertionError, match="asked"):
            PagedDevice(store, EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4, layers="stock"), ["model"])
