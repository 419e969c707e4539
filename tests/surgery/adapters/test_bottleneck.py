"""Bottleneck adapters of the `adapters` library: stored at their own bytes, exported unchanged, computed as there."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.bottlenecks import CONFIGS, DOUBLE_SEQ_BN, SEQ_BN, make_bottleneck, with_bottleneck
from tests.surgery.helpers import files_of, stored
from zoo.errors import MalformedCheckpoint, UnsafeCheckpoint, UnsupportedAdapter, WrongBase


@pytest.mark.parametrize("base", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_of_the_library(zoo, made, tmp_path, base, config):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = make_bottleneck(made(base), tmp_path / "pe", **CONFIGS[config])
    zoo.ingest(made(base), name="base")
    before = stored(zoo.store)["objects"]
    report = zoo.ingest(folder)  # the base is found by the library's model_name
    assert (report.kind, report.base) == ("adapter", "base")
    own = {
        (tuple(tensor.shape), tensor.numpy().tobytes()) for tensor in load_file(folder / "adapter.safetensors").values()
    }
    assert report.bytes.new == sum(len(data) for _, data in own)
    assert len(stored(zoo.store)["objects"] - before) == report.tensors.new == len(own)
    zoo.model("pe").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    mine, theirs = (zoo.model(name).manifest.components for name in ("pe", "base"))
    assert [p.component.base_digest for p in mine] == [p.component.base_digest for p in theirs]
    ids = torch.arange(40).reshape(2, 20) * 7 % 320
    with torch.no_grad():
        wanted = with_bottleneck(AutoModelForCausalLM.from_pretrained(made(base)).eval(), folder)(ids).logits
        ours = zoo.model("pe").load()(ids).logits
        plain = zoo.model("base").load()(ids).logits
    torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(plain, wanted, atol=0.05)


def test_it_generates_as_the_library_would(zoo, made, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_bottleneck(made("llama"), tmp_path / "pe", **DOUBLE_SEQ_BN)
    zoo.ingest(made("llama"), name="base")
    zoo.ingest(folder)
    ids = torch.tensor([[5, 9, 77, 30]])
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    wanted = with_bottleneck(AutoModelForCausalLM.from_pretrained(made("llama")).eval(), folder).generate(
        ids, **options
    )
    assert torch.equal(zoo.model("pe").load().generate(ids, **options), wanted)


def test_a_pickled_one_needs_the_switch_and_means_the_same(zoo, made, tmp_path):
    zoo.ingest(made("llama"), name="base")
    zoo.ingest(make_bottleneck(made("llama"), tmp_path / "safe"))
    pickled = make_bottleneck(made("llama"), tmp_path / "pickled", pickled=True)
    with pytest.raises(UnsafeCheckpoint, match="--allow-pickle"):
        zoo.ingest(pickled)
    assert zoo.ingest(pickled, allow_pickle=True).tensors.new == 0
    assert zoo.model("pickled").manifest.components == zoo.model("safe").manifest.components


@pytest.mark.parametrize("base", ["llama", "llama-tied-bias"])
def test_a_head_that_was_saved_beside_it_takes_the_bases_place(zoo, made, tmp_path, base):
    """The library saves a causal model's head by default; a tied head is the embedding too."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    folder = make_bottleneck(made(base), tmp_path / "pe")
    reference = AutoModelForCausalLM.from_pretrained(made(base)).eval()
    head = reference.lm_head.weight.detach() * 1.5
    save_file({"lm_head.weight": head}, folder / "model_head.safetensors")
    zoo.ingest(made(base), name="base")
    zoo.ingest(folder)
    zoo.model("pe").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    ids = torch.arange(20)[None] * 7 % 320
    with torch.no_grad():
        reference.lm_head.weight.copy_(head)
        torch.testing.assert_close(
            zoo.model("pe").load()(ids).logits, with_bottleneck(reference, folder)(ids).logits, rtol=1e-5, atol=1e-5
        )


#: (what, base, changes of the document, changes of its config, error, what the message names)
REFUSED: list[tuple[str, tuple[str, dict[str, Any]], dict[str, Any], dict[str, Any], type[Exception], str]] = [
    ("another architecture", ("llama", {}), {}, {"architecture": "union"}, UnsupportedAdapter, "union"),
    ("phm", ("llama", {}), {}, {"phm_layer": True}, UnsupportedAdapter, "phm_layer"),
    ("invertible", ("llama", {}), {}, {"inv_adapter": "nice"}, UnsupportedAdapter, "inv_adapter"),
    ("gating", ("llama", {}), {}, {"use_gating": True}, UnsupportedAdapter, "use_gating"),
    ("post_add", ("llama", {}), {}, {"residual_before_ln": "post_add"}, UnsupportedAdapter, "residual_before_ln"),
    ("no residual", ("llama", {}), {}, {"original_ln_after": False}, UnsupportedAdapter, "original_ln_after"),
    ("activation", ("llama", {}), {}, {"non_linearity": "prelu"}, UnsupportedAdapter, "non_linearity"),
    ("not spelt out", ("llama", {}), {"config": "pfeiffer"}, {}, UnsupportedAdapter, "spelling"),
    ("scaling", ("llama", {}), {}, {"scaling": float("inf")}, MalformedCheckpoint, "Infinity|scaling"),
    ("flag", ("llama", {}), {}, {"ln_after": 1}, MalformedCheckpoint, "ln_after"),
    ("factor", ("llama", {}), {}, {"reduction_factor": 0}, MalformedCheckpoint, "reduction_factor"),
    ("long layer", ("llama", {}), {}, {"reduction_factor": {"9" * 5000: 16}}, MalformedCheckpoint, "by layer"),
    ("no factor", ("llama", {}), {}, {"reduction_factor": {"0": 16}}, MalformedCheckpoint, "layer 1"),
    ("another rank", ("llama", {}), {}, {"reduction_factor": 8}, WrongBase, "down.weight"),
    ("missing", ("llama", {}), {}, {"mh_adapter": True}, WrongBase, "attention of layer 0"),
    ("left out", ("llama", {}), {}, {"leave_out": [2]}, MalformedCheckpoint, "layer 2"),
    ("norm", ("llama", {}), {}, {"ln_after": True}, MalformedCheckpoint, "norm_after"),
    ("name", ("llama", {}), {"name": "other"}, {}, MalformedCheckpoint, "other"),
    ("family", ("gpt2", {}), {}, {}, WrongBase, "gpt2"),
    ("unknown family", ("qwen3", {}), {"model_type": "qwen3"}, {}, UnsupportedAdapter, "qwen3"),
    ("width", ("llama", {"hidden_size": 32}), {}, {}, WrongBase, "width"),
    ("fewer layers", ("llama", {"num_hidden_layers": 2}), {}, {}, WrongBase, "layer 2"),
    ("more layers", ("llama", {"num_hidden_layers": 4}), {}, {}, WrongBase, "layer 3"),
]


@pytest.mark.parametrize(
    ("what", "base", "document", "config", "error", "reason"), REFUSED, ids=[each[0] for each in REFUSED]
)
def test_what_cannot_be_run_exactly_is_refused_and_leaves_nothing(
    zoo, made, tmp_path, what, base, document, config, error, reason
):
    folder = make_bottleneck(made("llama"), tmp_path / "pe", **SEQ_BN)
    path = folder / "adapter_config.json"
    whole = json.loads(path.read_text())
    path.write_text(json.dumps({**whole, "config": {**whole["config"], **config}, **document}))
    zoo.ingest(made(base[0], **base[1]), name="base")
    before = stored(zoo.store)
    with pytest.raises(error, match=reason):
        zoo.ingest(folder, base="base")
    assert stored(zoo.store) == before


def test_an_adapter_without_weights_is_refused(zoo, made, tmp_path):
    zoo.ingest(made("llama"), name="base")
    folder = make_bottleneck(made("llama"), tmp_path / "pe")
    (folder / "adapter.safetensors").unlink()
    with pytest.raises(MalformedCheckpoint, match=r"adapter\.safetensors"):
        zoo.ingest(folder)


def test_a_head_that_was_not_given_or_an_unknown_interface_is_refused(zoo, made, tmp_path):
    zoo.ingest(made("llama"), name="base")
    folder = make_bottleneck(made("llama"), tmp_path / "pe")
    (folder / "head_config.json").write_text("{}")
    with pytest.raises(MalformedCheckpoint, match="head_config"):
        zoo.ingest(folder)
    (folder / "head_config.json").rename(folder / "adapter_interface.json")
    with pytest.raises(UnsupportedAdapter, match="adapter_interface"):
        zoo.ingest(folder)
