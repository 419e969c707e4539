"""BitFit: full checkpoints that differ from their base only in biases take the bytes of those biases."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import make_bitfit
from tests.surgery.helpers import edit_weights, files_of


def _bias_bytes(folder: Path) -> int:
    from safetensors.torch import load_file

    biases = [tensor for key, tensor in load_file(folder / "model.safetensors").items() if key.endswith(".bias")]
    return sum(tensor.numel() * tensor.element_size() for tensor in biases)


@pytest.mark.parametrize("family", ["llama", "llama-tied-bias", "qwen2", "opt", "gpt2", "gpt_neox"])
def test_a_bitfit_costs_its_biases(zoo, made, tmp_path, family):
    """Llama's base has no biases: two switches of the config add them."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_bitfit(made(family), tmp_path / "tuned")
    zoo.ingest(made(family), name="base")
    report = zoo.ingest(folder)
    assert (report.kind, report.base) == ("bitfit", "base")
    assert report.bytes.new == _bias_bytes(folder) > 0
    zoo.model("tuned").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    ids = torch.arange(20)[None] * 7 % 320
    with torch.no_grad():
        ours, theirs = (
            model(ids).logits
            for model in (zoo.model("tuned").load(), AutoModelForCausalLM.from_pretrained(folder).eval())
        )
        plain = zoo.model("base").load()(ids).logits
    assert torch.equal(ours, theirs)
    assert not torch.allclose(plain, theirs, atol=0.05)


def test_other_settings_or_weights_make_it_a_full_fine_tune(zoo, made, tmp_path):
    zoo.ingest(made("llama"), name="base")
    other = make_bitfit(made("llama"), tmp_path / "other")
    path = other / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rms_norm_eps": 1e-3}))
    assert zoo.ingest(other).kind == "full"
    more = make_bitfit(made("llama"), tmp_path / "more", seed=9)
    edit_weights(more, lambda key, tensor: tensor + 0.5 if key == "model.norm.weight" else tensor)
    assert zoo.ingest(more).kind == "full"
