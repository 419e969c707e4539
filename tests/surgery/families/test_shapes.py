"""Shapes against configs for every family: checkpoints of transformers pass, a change on either side is detected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from surgery.families.shapes import check_shapes
from surgery.families.table import family_of
from surgery.ingest.cut import spot_of
from tests.checkpoints import CONFIGS, VARIANTS
from zoo.errors import MalformedCheckpoint
from zoo.objects.headers import read_header

NAMES = [*CONFIGS, *VARIANTS]
#: Settings that every family's shapes depend on, with their names in each family.
SIZES = (
    "vocab_size",
    "hidden_size",
    "n_embd",
    "d_model",
    "intermediate_size",
    "ffn_dim",
    "num_attention_heads",
    "num_key_value_heads",
    "num_local_experts",
)
#: Settings that show in no shape: heads of a fused or square projection, and the inner width that Bloom and Falcon do
#: not read.
INVISIBLE = {
    *(("gpt_neox", "num_attention_heads"), ("opt", "num_attention_heads"), ("bloom", "num_attention_heads")),
    *(("falcon", "intermediate_size"), ("gpt2", "num_attention_heads")),
}


def _read(folder: Path) -> tuple[dict, dict[str, tuple[int, ...]]]:
    shapes = {entry.key: entry.shape for entry in read_header(folder / "model.safetensors").entries}
    return json.loads((folder / "config.json").read_text()), shapes


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_without_one_of_its_matrices_is_noticed(made, name):
    config, shapes = _read(made(name))
    check_shapes(config, shapes)
    family = family_of(config)
    spots = {key: spot_of(family, key) for key in shapes}
    inner = {spot.name for key, spot in spots.items() if spot and spot.layer is not None and len(shapes[key]) == 2}
    assert len(inner) >= 4
    for lost in inner:
        rest = {key: shape for key, shape in shapes.items() if spots[key] is None or spots[key].name != lost}
        with pytest.raises(MalformedCheckpoint, match="has no"):
            check_shapes(config, rest)
        one = next(key for key, spot in spots.items() if spot and spot.name == lost)
        with pytest.raises(MalformedCheckpoint, match="layer"):
            check_shapes(config, {**shapes, one: (7, 7)})


@pytest.mark.parametrize("name", NAMES)
def test_a_config_of_other_sizes_is_noticed(made, name):
    config, shapes = _read(made(name))
    checked = 0
    for key in SIZES:
        if isinstance(config.get(key), int) and (config["model_type"], key) not in INVISIBLE:
            with pytest.raises(MalformedCheckpoint):
                check_shapes({**config, key: 2 * config[key]}, shapes)
            checked += 1
    assert checked >= 2


def test_what_a_config_leaves_open_is_not_checked(made):
    config, shapes = _read(made("llama"))
    del config["hidden_size"]
    check_shapes(config, shapes)
