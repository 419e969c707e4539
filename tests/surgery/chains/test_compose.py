"""Composed chains take no bytes, compute what their slices compute, and load, export and reload.

Impossible compositions are refused.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from pathlib import Path

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from surgery.chains import plan as chains
from surgery.chains.compose import compose
from surgery.chains.composition import parse, read_composition
from surgery.chains.plan import stitch_spec
from surgery.families.table import FAMILIES
from surgery.modules.stack import open_stack
from tests import checkpoints
from tests.adapters import KINDS
from tests.bottlenecks import make_bottleneck
from tests.chains import put_stitch
from tests.surgery.helpers import spans
from zoo import Zoo
from zoo.errors import Incomparable, InputError, NameTaken, NotFound

IDS = torch.randint(3, checkpoints.VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def slices(*parts: tuple[str, int, int], **extra):
    return parse(
        {"slices": [{"sources": [{"model": model, "layer_range": [lo, hi]}]} for model, lo, hi in parts], **extra}
    )


@pytest.fixture
def zoo(tmp_path):
    with Zoo(tmp_path / "store") as zoo:
        for name, seed in (("a", 0), ("b", 1)):
            zoo.ingest(checkpoints.make("llama", tmp_path / name, seed=seed, num_hidden_layers=4), name=name)
        yield zoo


def spliced(tmp_path: Path, layers: list[tuple[str, int]], head: str) -> torch.nn.Module:
    """Return the oracle: transformers' own model with the layers' weights copied into it."""
    parents = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "ab"}
    model = checkpoints.build("llama", num_hidden_layers=len(layers))
    model.model.embed_tokens.load_state_dict(parents[layers[0][0]].model.embed_tokens.state_dict())
    for at, (name, layer) in enumerate(layers):
        model.model.layers[at].load_state_dict(parents[name].model.layers[layer].state_dict())
    model.model.norm.load_state_dict(parents[head].model.norm.state_dict())
    model.lm_head.load_state_dict(parents[head].lm_head.state_dict())
    return model.eval()


@torch.inference_mode()
def test_a_plain_composition_costs_nothing_and_is_a_checkpoint(zoo, tmp_path):
    before = set(zoo.store.objects.digests())
    report = compose(zoo.store, slices(("a", 0, 3), ("b", 1, 2), ("a", 2, 4)), "c")
    assert (report.exportable, report.reason, report.family, report.bytes_new) == (True, None, "llama", 0)
    assert set(zoo.store.objects.digests()) == before
    expected = spliced(tmp_path, [("a", 0), ("a", 1), ("a", 2), ("b", 1), ("a", 2), ("a", 3)], "a")(IDS).logits
    assert torch.equal(zoo.model("c").load()(IDS).logits, expected)
    zoo.model("c").export(tmp_path / "out")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()(IDS).logits, expected)
    assert not zoo.verify().damaged


ORDER = (2, 0, 1, 2)


def permuted(folder: Path) -> torch.nn.Module:
    """Return the oracle: transformers' own model with its layers in another order, one of them twice.

    Each layer keeps the properties that depend on its index.
    """
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    stem = model.get_submodule(FAMILIES[model.config.model_type].prefix.rstrip("."))
    name = FAMILIES[model.config.model_type].stack
    layers = getattr(stem, name)
    setattr(stem, name, torch.nn.ModuleList([layers[at] for at in ORDER]))
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[at] for at in ORDER]
    model.config.num_hidden_layers = len(ORDER)
    return model


def unnumbered(folder: Path) -> set[str]:
    """Return the weights' keys of a checkpoint without numbers."""
    keys = {key for file in folder.glob("*.safetensors") for key in load_file(file)}
    return {re.sub(r"\d+", "", key) for key in keys}


@pytest.mark.parametrize("family", [*checkpoints.CONFIGS, *checkpoints.VARIANTS])
@torch.inference_mode()
def test_layers_of_any_family_in_another_order_are_a_checkpoint_where_there_is_one(family, tmp_path):
    """Windows move with their layers.

    A model that depends on a layer's own number is exported as a chain, not a checkpoint.
    """
    ids = torch.randint(
        3, checkpoints.VOCAB, (2, 24), generator=torch.Generator().manual_seed(1)
    )  # longer than any window
    folder = checkpoints.make(family, tmp_path / "m", tokenizer=False)
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, name="m")
        report = compose(zoo.store, slices(("m", 2, 3), ("m", 0, 2), ("m", 2, 3)), "c")
        assert (report.reason is None) == (family != "gpt2-scaled")
        zoo.model("c").export(tmp_path / "out")
    # Keys equal the parent's except for layer numbers: a tied head is written once.
    if report.reason is None:
        assert unnumbered(tmp_path / "out") == unnumbered(folder)
    importlib.import_module("zoo.integrations")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (model.config.model_type == "blockzoo_chain") == (family == "gpt2-scaled")
    assert torch.equal(model(ids).logits, permuted(folder)(ids, use_cache=False).logits)
    settings = dict(max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0)
    assert torch.equal(
        model.generate(ids, use_cache=True, **settings), model.generate(ids, use_cache=False, **settings)
    )


@torch.inference_mode()
def test_a_stitched_model_brings_its_own_stitch_along(zoo, tmp_path):
    zoo.ingest(checkpoints.make("llama", tmp_path / "w", hidden_size=96), name="w")
    put_stitch(zoo.store, "a", "w")
    compose(zoo.store, slices(("a", 0, 2), ("w", 1, 3)), "s")
    before = set(zoo.store.objects.digests())
    zoo.remove("a-w")
    compose(zoo.store, slices(("s", 0, 3), ("s", 3, 4)), "again")
    assert [placed.component.digest for placed in zoo.model("again").manifest.components] == [
        placed.component.digest for placed in zoo.model("s").manifest.components
    ]
    assert set(zoo.store.objects.digests()) == before
    assert torch.equal(zoo.model("again").load()(IDS).logits, zoo.model("s").load()(IDS).logits)
    with pytest.raises(NotFound, match="zoo stitch --a s --b w"):
        compose(zoo.store, slices(("s", 0, 2), ("w", 2, 3)), "other")


def test_the_newest_stitch_is_taken_for_the_place_where_slices_meet(zoo, tmp_path):
    """The stitch lies behind layer 1 of one model and before layer 2 of the other (from 0): position 3 (BL-09)."""
    zoo.ingest(checkpoints.make("llama", tmp_path / "w", hidden_size=96), name="w")
    for name in ("older", "newer"):
        put_stitch(zoo.store, "a", "w", seed=len(name) + (name == "newer"), name=name)
    compose(zoo.store, slices(("a", 0, 2), ("w", 2, 3)), "s")
    (stitch,) = [placed.component for placed in zoo.model("s").manifest.components if placed.component.kind == "stitch"]
    assert stitch.tensors == zoo.model("newer").manifest.components[0].component.tensors
    assert stitch_spec(stitch).position == 3.0


def test_a_chain_has_its_parents_files_least_context_and_blocks(zoo, tmp_path):
    zoo.ingest(checkpoints.make("llama", tmp_path / "s", seed=5, max_position_embeddings=32), name="s")
    zoo.ingest(
        checkpoints.make("llama", tmp_path / "n", seed=6, max_position_embeddings=64, intermediate_size=48), name="n"
    )
    for name, parent, context in (("plain", "s", 32), ("own", "n", 64)):
        report = compose(zoo.store, slices(("a", 0, 2), (parent, 2, 3)), name)
        assert (report.reason is None) == (name == "plain")
        made = zoo.model(name)
        assert made.config["max_position_embeddings"] == context
        assert len(made.tokenizer()) == checkpoints.VOCAB
        assert set(made.chain[0].shared_with) >= {"a"} and spans(zoo, name)[0] == spans(zoo, "a")[0] == (0, 5)


@torch.inference_mode()
def test_a_composed_model_may_be_composed_from_again(zoo, tmp_path):
    compose(zoo.store, slices(("a", 0, 2), ("b", 2, 4)), "c")
    compose(zoo.store, slices(("c", 1, 4), ("c", 0, 1), head="b"), "d")
    expected = spliced(tmp_path, [("a", 1), ("b", 2), ("b", 3), ("a", 0)], "b")
    expected.model.embed_tokens.load_state_dict(
        AutoModelForCausalLM.from_pretrained(tmp_path / "a").model.embed_tokens.state_dict()
    )
    assert torch.equal(zoo.model("d").load()(IDS).logits, expected(IDS).logits)


@torch.inference_mode()
def test_a_chain_of_two_shapes_loads_generates_and_comes_back_from_its_export(zoo, tmp_path):
    """Equal width, other heads and FFN: no config of the family describes both."""
    zoo.ingest(checkpoints.make("llama", tmp_path / "n", num_key_value_heads=1, intermediate_size=48), name="n")
    report = compose(zoo.store, slices(("a", 0, 2), ("n", 1, 3), ("a", 3, 4)), "c")
    assert report.exportable and "shapes" in (report.reason or "")
    model = zoo.model("c").load()
    stacks = {name: open_stack(zoo.store, zoo.model(name).manifest) for name in ("a", "n")}
    hidden = IDS
    for name, lo, hi in (("a", 0, 5), ("n", 3, 7), ("a", 7, 10)):
        hidden = stacks[name].run(hidden, stacks[name].course(IDS), lo, hi)
    assert torch.equal(model(IDS).logits, hidden)
    prompt = IDS[:1]
    tokens = model.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=True, eos_token_id=-1)
    without = model.generate(prompt, max_new_tokens=12, do_sample=False, use_cache=False, eos_token_id=-1)
    assert torch.equal(tokens, without)
    zoo.model("c").export(tmp_path / "out")
    importlib.import_module("zoo.integrations")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert torch.equal(loaded(IDS).logits, hidden)
    loaded.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(IDS).logits, hidden)


@torch.inference_mode()
def test_repeated_layers_keep_caches_of_their_own(zoo, tmp_path):
    zoo.ingest(checkpoints.make("gpt_neox", tmp_path / "neox"), name="neox")
    compose(zoo.store, slices(("neox", 0, 2), ("neox", 1, 3), ("a", 1, 3)), "r")
    model = zoo.model("r").load()
    tokens = model.generate(IDS[:1], max_new_tokens=12, do_sample=False, use_cache=True, eos_token_id=-1)
    without = model.generate(IDS[:1], max_new_tokens=12, do_sample=False, use_cache=False, eos_token_id=-1)
    assert torch.equal(tokens, without)


@torch.inference_mode()
def test_blocks_with_a_lora_are_taken_along(zoo, tmp_path):
    checkpoints.make_lora(tmp_path / "a", tmp_path / "lora")
    zoo.ingest(tmp_path / "lora", name="l", base="a")
    report = compose(zoo.store, slices(("l", 0, 2), ("b", 2, 4)), "c")
    assert not report.exportable and "adapters" in (report.reason or "")
    lora, b = (open_stack(zoo.store, zoo.model(name).manifest) for name in "lb")
    hidden = b.run(lora.run(IDS, lora.course(IDS), 0, 5), b.course(IDS), 5, 10)
    torch.testing.assert_close(zoo.model("c").load()(IDS).logits, hidden, atol=1e-6, rtol=1e-6)
    with pytest.raises(InputError, match="adapters"):
        zoo.model("c").export(tmp_path / "out")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "where"),
    [
        ("ia3", "attention of layer 0"),
        ("prompt", "embedding"),
        ("prefix", "attention of layer 0"),
        ("adapter", "ffn"),
        ("lora", "attention of layer 0"),
    ],
)
def test_blocks_with_any_other_adapter_are_refused_by_kind(zoo, tmp_path, kind, where):
    if kind == "adapter":
        make_bottleneck(tmp_path / "a", tmp_path / "pe")
    elif kind == "lora":
        checkpoints.make_lora(tmp_path / "a", tmp_path / "pe", use_dora=True)
    else:
        checkpoints.make_peft(tmp_path / "a", tmp_path / "pe", KINDS[kind]("llama"))
    zoo.ingest(tmp_path / "pe", name="pe", base="a")
    with pytest.raises(InputError, match=f"the {where}.* of kind {kind} .*only plain LoRA"):
        compose(zoo.store, slices(("pe", 0, 2), ("b", 2, 4)), "c")
    assert {handle.name for handle in zoo.models()} == {"a", "b", "pe"}


def test_the_parents_may_go_and_the_chain_stays_whole(zoo):
    compose(zoo.store, slices(("a", 0, 2), ("b", 2, 4)), "c")
    expected = zoo.model("c").load()(IDS).logits
    zoo.remove("a")
    zoo.remove("b")
    zoo.gc()
    assert not zoo.verify().damaged
    assert torch.equal(zoo.model("c").load()(IDS).logits, expected)


def test_what_cannot_be_composed_is_refused_and_leaves_nothing(zoo, tmp_path):
    zoo.ingest(checkpoints.make("llama", tmp_path / "w", hidden_size=96), name="w")
    other = checkpoints.make("llama", tmp_path / "other")
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    zoo.ingest(other, name="t")
    before = json.dumps([str(model) for model in zoo.models()])
    with pytest.raises(Incomparable, match="different tokenizers"):
        compose(zoo.store, slices(("a", 0, 2), ("t", 2, 3)), "c")
    with pytest.raises(InputError, match="4 layers"):
        compose(zoo.store, slices(("a", 0, 5)), "c")
    with pytest.raises(NotFound, match="zoo stitch --a a --b w"):
        compose(zoo.store, slices(("a", 0, 2), ("w", 1, 3)), "c")
    with pytest.raises(NotFound, match="nobody"):
        compose(zoo.store, slices(("nobody", 0, 2)), "c")
    with pytest.raises(NameTaken):
        compose(zoo.store, slices(("a", 0, 2)), "b")
    assert json.dumps([str(model) for model in zoo.models()]) == before


@pytest.mark.parametrize(
    ("document", "complaint"),
    [
        ([], "mapping"),
        ({}, "slices"),
        ({"slices": []}, "slices"),
        ({"slices": [{"sources": []}]}, "one source"),
        (
            {"slices": [{"sources": [{"model": "a", "layer_range": [0, 1]}, {"model": "b", "layer_range": [0, 1]}]}]},
            "one source",
        ),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [2, 2]}]}]}, "no layer"),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [True, 2]}]}]}, "layer_range"),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [0, 16**5000]}]}]}, "beyond 10,000"),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [0, 6000]}]}] * 2}, "at most 10,000 layers"),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [0, 2], "parameters": {}}]}]}, "parameters"),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [0, 2]}]}], "merge_method": "ties"}, "mixes weights"),
        ({"slices": [{"sources": [{"model": "a", "layer_range": [0, 2]}]}], "sliecs": 1}, "sliecs"),
    ],
)
def test_documents_that_ask_for_what_cannot_be(document, complaint):
    with pytest.raises(InputError, match=complaint):
        parse(document)


@pytest.mark.parametrize(
    "text", ["[" * 5000, "slices: 2001-99-99", "slices: " + "9" * 5000, "slices: [", "\xff", " " * (2 << 20)]
)
def test_files_that_are_no_compositions_are_refused_in_one_line(text, tmp_path):
    (tmp_path / "c.yaml").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError) as refused:
        read_composition(tmp_path / "c.yaml")
    assert len(str(refused.value).splitlines()) == 1 and len(str(refused.value)) < 400
    with pytest.raises(InputError, match="cannot be read"):
        read_composition(tmp_path)


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_virtual_tokens_belong_to_no_chain(zoo, kind, tmp_path):
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    zoo.ingest(checkpoints.make_peft(tmp_path / "a", tmp_path / "p", config), name="p", base="a")
    with pytest.raises(InputError, match="has an adapter"):
        compose(zoo.store, slices(("p", 0, 2), ("b", 2, 4)), "c")


def test_blocks_that_run_in_their_own_architecture_only(zoo, tmp_path, monkeypatch):
    zoo.ingest(checkpoints.make("llama", tmp_path / "n", intermediate_size=48), name="n")
    monkeypatch.setitem(FAMILIES, "llama", dataclasses.replace(FAMILIES["llama"], masked=True))
    with pytest.raises(InputError, match=r"llama blocks run in plain llama checkpoints only.*different shapes"):
        compose(zoo.store, slices(("a", 0, 2), ("n", 2, 3)), "c")
    compose(zoo.store, slices(("a", 0, 2), ("b", 2, 3)), "plain")
    assert {model.name for model in zoo.models()} == {"a", "b", "n", "plain"}


def test_more_configs_than_a_chain_holds_are_refused(zoo, monkeypatch, tmp_path):
    zoo.ingest(checkpoints.make("llama", tmp_path / "n", intermediate_size=48), name="n")
    monkeypatch.setattr(chains, "_SOURCES_LIMIT", 1)
    with pytest.raises(InputError, match=r"at most .* of 1 configs; this one has 8 of 2"):
        compose(zoo.store, slices(("a", 0, 2), ("n", 1, 2)), "c")
    assert {model.name for model in zoo.models()} == {"a", "b", "n"}
