"""Exported chains are ingested as the same model, byte for byte, with or without the parents; or refused if broken."""

from __future__ import annotations

import json
import shutil

import pytest
import torch

from tests import checkpoints
from tests.chains import put_chain, put_stitch
from tests.surgery.helpers import edit_weights, files_of
from zoo import Zoo
from zoo.errors import MalformedCheckpoint, NameTaken, UnknownFamily, WrongBase

IDS = torch.randint(3, checkpoints.VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with `zoo`, which holds a chain `c` and its parents, and `out`, the chain's export.

    Parents: a and n of one width, x of another width and family behind a stitch.
    """
    root = tmp_path_factory.mktemp("chains")
    with Zoo(root / "zoo") as zoo:
        zoo.ingest(checkpoints.make("qwen2", root / "a"), name="a")
        zoo.ingest(checkpoints.make("llama", root / "n", num_key_value_heads=1, intermediate_size=48), name="n")
        zoo.ingest(checkpoints.make("gpt_neox", root / "x", hidden_size=96), name="x")
        put_stitch(zoo.store, "n", "x")
        put_chain(zoo.store, "c", ("a", 0, 3), ("n", 1, 3), ("x", 1, 3), ("x", 1, 2))
        zoo.model("c").export(root / "out")
    return root


@pytest.fixture
def out(root, tmp_path):
    """A copy of the export, for tests that damage it."""
    return shutil.copytree(root / "out", tmp_path / "chain")


def changed(folder, change):
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("parents", [False, True])
@torch.inference_mode()
def test_an_export_comes_back_as_the_same_model(root, tmp_path, parents):
    with Zoo(root / "zoo") as zoo:
        expected = zoo.model("c")
        logits = expected.load()(IDS).logits
    with Zoo(tmp_path / "store") as zoo:
        for name in "anx" if parents else "":
            zoo.ingest(root / name, name=name)
        report = zoo.ingest(root / "out", name="c")
        assert (report.kind, report.base, report.family) == ("composed", None, "blockzoo_chain")
        # Only the stitch's weight and bias are new.
        assert report.tensors.new == (2 if parents else report.tensors.total)
        assert zoo.model("c").manifest.components == expected.manifest.components
        assert zoo.model("c").manifest.fingerprint == expected.manifest.fingerprint
        assert torch.equal(zoo.model("c").load()(IDS).logits, logits)
        zoo.model("c").export(tmp_path / "again")
        assert zoo.ingest(root / "out", name="c").bytes.new == 0
        if parents:
            assert any("a" in block.shared_with for block in zoo.model("c").chain)
        assert not zoo.verify().damaged
    assert files_of(tmp_path / "again") == files_of(root / "out")


def test_the_zoo_that_made_it_takes_it_again_and_other_weights_not(root, out):
    with Zoo(root / "zoo") as zoo:
        assert zoo.ingest(root / "out", name="c").tensors.new == 0
        with pytest.raises(WrongBase, match="needs no --base"):
            zoo.ingest(root / "out", name="d", base="a")
        edit_weights(out, lambda key, tensor: tensor + 1 if key.startswith("parts.1.") else tensor)
        with pytest.raises(NameTaken):
            zoo.ingest(out, name="c")
        assert zoo.ingest(out, name="tuned", base="c").base == "c"
        zoo.remove("tuned")


BROKEN = {
    "a source of no family": (lambda c: c["sources"][0].update(model_type="mamba"), UnknownFamily, "mamba"),
    "a chain in a chain": (
        lambda c: c["sources"][0].update(model_type="blockzoo_chain"),
        UnknownFamily,
        "blockzoo_chain",
    ),
    "a quantized source": (
        lambda c: c["sources"][0].update(quantization_config={"quant_method": "gptq"}),
        UnknownFamily,
        "gptq",
    ),
    "no sources": (lambda c: c.pop("sources"), MalformedCheckpoint, "sources"),
    "too many layers": (
        lambda c: c["sources"][0].update(num_hidden_layers=20_000),
        MalformedCheckpoint,
        "more than 10,000 layers",
    ),
    "sizes beyond reason": (
        lambda c: c["sources"].append({**c["sources"][0], "head_dim": 1 << 31}),
        MalformedCheckpoint,
        "sizes beyond",
    ),
    "a place beyond": (lambda c: c["chain"][1].update(layer=7), MalformedCheckpoint, "component 1 .* names no layer"),
    "no head": (lambda c: c["chain"].pop(), MalformedCheckpoint, "no place in a chain of"),
    "a part too many": (
        lambda c: c["chain"].append(dict(c["chain"][-1])),
        MalformedCheckpoint,
        "hold nothing of component",
    ),
    "another width": (lambda c: c["sources"][0].update(hidden_size=32), MalformedCheckpoint, "values a token"),
    "another table": (lambda c: c["sources"][0].update(vocab_size=300), MalformedCheckpoint, "component 0"),
    "another ffn": (lambda c: c["sources"][1].update(intermediate_size=64), MalformedCheckpoint, "gate_proj"),
    "a stitch to nowhere": (lambda c: _stitch(c).update(out=64), MalformedCheckpoint, "values a token"),
    "a stitch of no size": (lambda c: _stitch(c).update({"in": "64"}), MalformedCheckpoint, "without widths"),
    "a stitch at no place": (lambda c: _stitch(c).update(position=None), MalformedCheckpoint, "without a position"),
    "a head first": (lambda c: c["chain"][0].update(kind="lm_head"), MalformedCheckpoint, "one embedding to one head"),
    "a kind of another family": (
        lambda c: c["chain"][1].update(kind="layer"),
        MalformedCheckpoint,
        "qwen2 models do not have",
    ),
}


def _stitch(config):
    return next(each for each in config["chain"] if each["kind"] == "stitch")


@pytest.mark.parametrize("what", BROKEN)
def test_a_config_that_does_not_fit_is_refused_before_anything_is_written(what, out, tmp_path):
    change, error, reason = BROKEN[what]
    changed(out, change)
    with Zoo(tmp_path / "store") as zoo:
        with pytest.raises(error, match=reason):
            zoo.ingest(out, name="c")
        assert not list(zoo.models()) and not list(zoo.store.objects.digests())


def test_keys_without_a_place_are_refused(out, tmp_path):
    from safetensors.torch import load_file, save_file

    whole = load_file(out / "model.safetensors")
    with Zoo(tmp_path / "store") as zoo:
        for key in ("parts.99.weight", "parts.٣.weight", "parts.01.weight", "parts.1", "model.embed_tokens.weight"):
            save_file({**whole, key: torch.zeros(1)}, out / "model.safetensors")
            with pytest.raises(MalformedCheckpoint, match="has no place"):
                zoo.ingest(out, name="c")
        save_file({key: tensor for key, tensor in whole.items() if "lm_head" not in key}, out / "model.safetensors")
        with pytest.raises(MalformedCheckpoint, match="lm_head"):
            zoo.ingest(out, name="c")
