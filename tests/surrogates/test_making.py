"""Surrogates as users see them: stored at the bytes of the pruned part, loaded, exported, recorded, removed."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

import cli.app
from surgery.chains import hf_model as chain_model
from surgery.chains.compose import compose
from surgery.chains.composition import parse
from surrogates import make_from, make_surrogate, plan_surrogate
from surrogates.cheaper import proportional
from tests import checkpoints
from zoo.errors import InputError, InUse, NameTaken, NotFound
from zoo.records import ScoredRun

IDS = torch.randint(3, checkpoints.VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def pairs(zoo, name: str):
    with zoo.store.catalog.reading() as reader:
        return [pair for pair in reader.equivalences([name]) if pair.relation == "surrogate"]


def cosines(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cosine_similarity(a.softmax(-1), b.softmax(-1), dim=-1)


def same_with_and_without_cache(model) -> bool:
    settings = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    return torch.equal(
        model.generate(IDS, use_cache=True, **settings), model.generate(IDS, use_cache=False, **settings)
    )


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("llama", "layer"),
        ("qwen2", "attention"),
        ("gemma2", "layer"),
        ("phi3", "layer"),
        ("gpt2", "ffn"),
        ("gpt_neox", "ffn"),
    ],
)
@torch.inference_mode()
def test_a_surrogate_is_a_model_that_costs_what_is_pruned(zoo, stored, options, tmp_path, family, part):
    parent = stored(family)
    before = set(zoo.store.objects.digests())
    with torch.inference_mode(False):
        report = make_surrogate(zoo, parent, (1, 1), options(part=part, name="s"))
    assert 0.3 < report.removed_ratio < 0.7 and report.plan is not None
    assert 0.0 < report.similarity <= 1.0 and report.exportable
    new = set(zoo.store.objects.digests()) - before
    assert report.bytes_new == sum(tensor.nbytes for tensor in zoo.model("s").manifest.tensors if tensor.digest in new)
    assert report.bytes_new <= 4 * (report.plan.parameters - report.plan.removed)
    model = zoo.model("s").load()
    expected = model(IDS).logits
    assert same_with_and_without_cache(model)
    zoo.model("s").export(tmp_path / "out")
    chain_model.register()
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(again(IDS).logits, expected)
    again.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved").eval()(IDS).logits, expected)
    sizes = {name: sum(tensor.elements for tensor in zoo.model(name).manifest.tensors) for name in ("s", parent)}
    assert sizes["s"] == sizes[parent] - report.plan.removed
    assert not zoo.verify().damaged


def test_scores_are_those_of_the_stored_models(zoo, stored, options):
    """Recomputes the recorded figures with transformers alone: head on hidden states, distributions, cosines."""
    from surgery.text.text import read_text

    chosen = options(part="layer", name="s")
    report = make_surrogate(zoo, stored("llama"), (2, 2), chosen)
    held = read_text(chosen.text).tokens(None, chosen.length, chosen.held_out, part="held_out", seed=chosen.seed)
    exact, given = zoo.model("llama").load(), zoo.model("s").load()
    with torch.no_grad():
        p, q = exact(held).logits, given(held).logits
    # The block is the last layer, so that only the head follows it and both figures are equal.
    assert report.similarity == pytest.approx(float(cosines(p, q).mean()), abs=1e-5)
    assert report.agreement.end == pytest.approx(report.similarity, abs=1e-6)
    assert report.agreement.loss_exact == pytest.approx(float(exact(held, labels=held).loss.detach()), rel=1e-4)
    assert report.agreement.loss == pytest.approx(float(given(held, labels=held).loss.detach()), rel=1e-4)
    (pair,) = pairs(zoo, "s")
    assert (pair.a, pair.b) == (ScoredRun("llama", 5, 7), ScoredRun("s", 5, 7))
    assert (pair.similarity, pair.probe, pair.control) == (report.similarity, report.probe, None)
    assert pair.metrics["removed_ratio"] == report.removed_ratio and pair.metrics["speedup"] == report.speedup


def test_all_layers_pruned_alike_are_a_plain_checkpoint(zoo, stored, options, tmp_path):
    parent = stored("llama")
    report = make_surrogate(zoo, parent, (0, 2), options(part="layer", name="half"))
    assert report.reason is None and zoo.model("half").family == "llama"
    zoo.model("half").export(tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert (loaded.config.num_attention_heads, loaded.config.num_key_value_heads, loaded.config.intermediate_size) == (
        2,
        1,
        48,
    )
    with torch.no_grad():
        assert torch.equal(loaded(IDS).logits, zoo.model("half").load()(IDS).logits)
    embedding = dict(zoo.model("half").manifest.components[0].component.tensors)
    assert embedding == dict(zoo.model(parent).manifest.components[0].component.tensors)


def test_recovery_helps_and_closed_form_helps_from_outside(zoo, stored, options):
    parent = stored("llama")
    bare = make_surrogate(zoo, parent, (1, 2), options(refit=False, name="bare"))
    fitted = make_surrogate(zoo, parent, (1, 2), options(name="fitted"))
    trained = make_surrogate(zoo, parent, (1, 2), options(steps=40, name="trained"))
    assert bare.similarity < fitted.similarity < trained.similarity
    assert trained.recovery is not None and trained.recovery.kept


def test_the_same_again_gives_the_same_model(zoo, stored, options):
    parent = stored("llama")
    make_surrogate(zoo, parent, (1, 1), options(steps=3, name="one"))
    make_surrogate(zoo, parent, (1, 1), options(steps=3, name="two"))
    one, two = (zoo.model(name).manifest for name in ("one", "two"))
    assert [placed.component.digest for placed in one.components] == [
        placed.component.digest for placed in two.components
    ]


def test_half_precision_stays_finite_and_stays_half(zoo, stored, options):
    parent = stored("llama", dtype="bfloat16")
    report = make_surrogate(zoo, parent, (1, 2), options(steps=10, name="s"))
    assert {tensor.dtype for tensor in zoo.model("s").manifest.tensors} == {"BF16"}
    assert 0.0 < report.similarity <= 1.0
    with torch.no_grad():
        assert bool(zoo.model("s").load()(IDS).logits.isfinite().all())


def test_a_surrogate_can_be_pruned_further_and_composed(zoo, stored, options):
    parent = stored("llama")
    make_surrogate(zoo, parent, (1, 1), options(part="attention", name="one"))
    make_surrogate(zoo, "one", (1, 2), options(part="ffn", name="two"))
    compose(zoo.store, parse({"slices": [{"sources": [{"model": "two", "layer_range": [0, 2]}]}]}), "three")
    with torch.no_grad():
        for name in ("two", "three"):
            assert same_with_and_without_cache(zoo.model(name).load())
    with pytest.raises(InputError, match="several shapes"):
        make_surrogate(zoo, "one", (0, 1), options(part="attention"))


def test_it_stands_for_its_parent_and_goes_first(zoo, stored, options):
    parent = stored("llama")
    make_surrogate(zoo, parent, (1, 1), options(name="s"))
    assert (zoo.model("s").kind, zoo.model("s").base) == ("surrogate", parent)
    with pytest.raises(InUse):
        zoo.remove(parent)
    zoo.remove("s")
    assert pairs(zoo, parent) == []
    zoo.gc()
    assert not zoo.verify().damaged
    zoo.remove(parent)


def test_what_cannot_be_is_refused_and_leaves_nothing(zoo, stored, options, tmp_path):
    parent = stored("llama")
    checkpoints.make_lora(tmp_path / "checkpoint-llama", tmp_path / "lora")
    zoo.ingest(tmp_path / "lora", name="l", base=parent)
    objects = set(zoo.store.objects.digests())
    for ratio in (0.0, 1.0):
        with pytest.raises(InputError, match="between 0 and 1"):
            make_surrogate(zoo, parent, (1, 1), options(ratio=ratio))
    with pytest.raises(InputError, match="0-2"):
        make_surrogate(zoo, parent, (2, 3), options())
    with pytest.raises(InputError, match="adapter"):
        make_surrogate(zoo, "l", (1, 1), options())
    with pytest.raises(NotFound):
        make_surrogate(zoo, "nobody", (1, 1), options())
    with pytest.raises(NameTaken):
        make_surrogate(zoo, parent, (1, 1), options(name="l"))
    with pytest.raises(InputError, match="without a tokenizer"):
        make_surrogate(zoo, parent, (1, 1), replace(options(), text=None))
    outside = tmp_path / "outside.jsonl"
    outside.write_text("\n".join(json.dumps({"token_ids": [5000 + at] * 200}) for at in range(40)))
    with pytest.raises(InputError, match="vocabulary"):
        make_surrogate(zoo, parent, (1, 1), options(text=str(outside)))
    assert set(zoo.store.objects.digests()) == objects and {model.name for model in zoo.models()} == {parent, "l"}


def test_what_an_adapter_leaves_alone_can_be_pruned(zoo, stored, options, tmp_path):
    parent = stored("llama")
    checkpoints.make_lora(tmp_path / "checkpoint-llama", tmp_path / "lora")
    zoo.ingest(tmp_path / "lora", name="l", base=parent)
    report = make_surrogate(zoo, "l", (0, 2), options(part="ffn", name="s"))
    assert not report.exportable and "adapters" in (report.reason or "")
    with torch.no_grad():
        assert same_with_and_without_cache(zoo.model("s").load())


def test_layers_of_two_models_keep_their_own_settings(zoo, stored, options):
    """The models differ only in rotary frequencies: the settings of one must not reach the other's layers."""
    a, b = (
        stored("llama", "a"),
        stored("llama", "b", seed=1, rope_parameters={"rope_type": "default", "rope_theta": 100.0}),
    )
    slices = [{"sources": [{"model": name, "layer_range": bounds}]} for name, bounds in ((a, [0, 2]), (b, [2, 3]))]
    compose(zoo.store, parse({"slices": slices}), "c")
    make_surrogate(zoo, "c", (1, 2), options(name="s"))
    specs = [
        json.loads(placed.component.spec)
        for placed in zoo.model("s").manifest.components
        if placed.component.kind == "attention"
    ]
    assert [spec["rope"]["rope_theta"] for spec in specs] == [10000.0, 10000.0, 100.0]
    assert [spec["num_attention_heads"] for spec in specs] == [4, 2, 2]
    with torch.no_grad():
        assert same_with_and_without_cache(zoo.model("s").load())


def test_a_block_with_a_stitch_inside_is_refused(zoo, stored, options):
    wide, narrow = (
        stored("llama", "wide", num_hidden_layers=4, hidden_size=96),
        stored("llama", "narrow", hidden_size=32),
    )
    put_stitch(zoo, "there", narrow, wide, 32, 96)
    slices = [
        {"sources": [{"model": name, "layer_range": bounds}]} for name, bounds in ((narrow, [0, 1]), (wide, [2, 4]))
    ]
    compose(zoo.store, parse({"slices": slices}), "c")
    with pytest.raises(InputError, match="stitch"):
        make_surrogate(zoo, "c", (0, 1), options())
    assert make_surrogate(zoo, "c", (1, 2), options(name="s")).removed_ratio > 0.3
    with pytest.raises(InputError, match="is a stitch"):
        make_surrogate(zoo, "there", (0, 0), options())


def test_a_model_that_gives_nan_is_refused(zoo, options, tmp_path):
    from tests.surgery.helpers import edit_weights

    folder = checkpoints.make("llama", tmp_path / "nan", tokenizer=False)
    edit_weights(folder, lambda key, tensor: tensor * float("nan") if "layers.0.mlp.down" in key else tensor)
    zoo.ingest(folder, name="nan")
    with pytest.raises(InputError, match="not finite"):
        make_surrogate(zoo, "nan", (1, 1), options())


def test_the_engine_serves_it_with_the_tokens_of_its_own_model(zoo, stored, options, text, capsys):
    make_surrogate(zoo, stored("llama", tokenizer=True), (1, 1), options(name="s"))
    model = zoo.model("s")
    ids = model.tokenizer()("def main", return_tensors="pt")["input_ids"]
    expected = model.load().generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :].tolist()
    code, out, _ = run(
        capsys, "generate", "s", "def main", "--max-tokens", "8", "--store", str(zoo.store.root), "--json"
    )
    given = json.loads(out)["token_ids"]
    assert code == 0 and given and given == expected[: len(given)]


# -- blocks of other models --------------------------------------------------------------------------------------------


def test_fewer_layers_stand_for_more_at_no_bytes(zoo, stored, options):
    parent = stored("llama", num_hidden_layers=5)
    report = make_from(zoo, parent, (1, 3), parent, (1, 2), options(name="s"))
    assert report.bytes_new == 0 and report.removed_ratio == pytest.approx(1 / 3)
    assert report.exportable and report.reason is None
    (pair,) = pairs(zoo, "s")
    assert (pair.a, pair.b) == (ScoredRun(parent, 3, 9), ScoredRun("s", 3, 7))
    with torch.no_grad():
        oracle = zoo.model(parent).load()
        del oracle.model.layers[3]
        oracle.config.num_hidden_layers = 4
        assert torch.equal(zoo.model("s").load()(IDS).logits, oracle(IDS, use_cache=False).logits)


def test_a_narrow_model_stands_in_with_stitches_at_both_ends(zoo, stored, options):
    wide, narrow = (
        stored("llama", "wide", num_hidden_layers=4, hidden_size=96),
        stored("llama", "narrow", hidden_size=32),
    )
    with pytest.raises(NotFound, match="zoo stitch"):
        make_from(zoo, wide, (1, 2), narrow, None, options())
    put_stitch(zoo, "there", "wide", "narrow", 96, 32)
    put_stitch(zoo, "back", "narrow", "wide", 32, 96)
    report = make_from(zoo, wide, (1, 2), narrow, None, options(name="s"))
    kinds = [placed.component.kind for placed in zoo.model("s").manifest.components]
    assert kinds.count("stitch") == 2 and report.removed_ratio > 0.3
    (pair,) = pairs(zoo, "s")
    assert [kinds[pair.b.lo], kinds[pair.b.hi - 1]] == ["stitch", "stitch"]
    with torch.no_grad():
        assert same_with_and_without_cache(zoo.model("s").load())
    with pytest.raises(InputError, match="no cheaper"):
        make_from(zoo, narrow, (1, 1), wide, None, options())


def put_stitch(zoo, name: str, a: str, b: str, width_a: int, width_b: int) -> None:
    """Store a stitch with random weights as `zoo stitch` does."""
    from surgery.chains.plan import StitchSpec, stitch_component
    from surgery.chains.stitches import STITCH_FILE
    from surgery.tensors.store import keep_tensors
    from zoo.manifest import ModelManifest, Placed, SideFile

    generator = torch.Generator().manual_seed(width_a)
    with zoo.store.ingesting():
        tensors = {"weight": torch.randn(width_b, width_a + 1, generator=generator) * 0.1, "bias": torch.zeros(width_b)}
        metas = keep_tensors(zoo.store, tensors)
        component = stitch_component(StitchSpec(width_a, width_b, 0.0), metas["weight"].digest, metas["bias"].digest)
        data = json.dumps({"a": a, "b": b, "dims": [width_a, width_b]}).encode()
        sides = (SideFile(STITCH_FILE, zoo.store.blobs.put(data), len(data)),)
        manifest = ModelManifest(
            name, "stitch", None, "stitch", "test", (Placed(None, component),), (), sides, tuple(metas.values())
        )
        with zoo.store.catalog.writing() as writer:
            writer.put_model(manifest)


def test_runs_at_the_same_depth():
    assert proportional((4, 7), 8, 6) == (3, 5)
    assert proportional((0, 0), 8, 2) == (0, 0)
    assert proportional((7, 7), 8, 2) == (1, 1)
    assert all(0 <= lo <= hi < 5 for a in range(9) for b in range(a, 9) for lo, hi in [proportional((a, b), 9, 5)])


# -- the command -------------------------------------------------------------------------------------------------------


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.app.main(list(arguments))
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_the_command_prints_one_document(zoo, stored, text, capsys):
    parent = stored("llama")
    common = (
        "surrogate",
        parent,
        "--layers",
        "1-2",
        "--store",
        str(zoo.store.root),
        "--text",
        text,
        "--length",
        "16",
        "--windows",
        "32",
    )
    code, out, _ = run(capsys, *common, "--plan-only", "--importance", "magnitude")
    plan = json.loads(out)
    assert code == 0 and plan["part"] == "layer" and [each["layer"] for each in plan["kept"]] == [1, 2]
    code, out, err = run(capsys, *common, "--steps", "3", "--rank", "4", "--json")
    document = json.loads(out)
    assert code == 0 and list(document)[:7] == [
        "surrogate",
        "parent",
        "removed_ratio",
        "similarity",
        "speedup",
        "batch",
        "seconds",
    ]
    assert (
        document["surrogate"] == "llama@surrogate-1-2-layer"
        and document["batch"] == 16
        and document["removed_ratio"] == plan["removed_ratio"]
    )
    code, out, err = run(capsys, *common)
    assert code == 2 and out == "" and "holds a model already" in err and err.count("\n") == 1
    code, out, err = run(capsys, "surrogate", parent, "--layers", "2-1", "--store", str(zoo.store.root))
    assert code == 2 and err.startswith("zoo: ") and err.count("\n") == 1


def test_a_plan_alone_writes_nothing(zoo, stored, options):
    parent = stored("llama")
    before = {str(path) for path in zoo.store.root.rglob("*") if "catalog" not in path.name}
    plan = plan_surrogate(zoo, parent, (0, 2), options())
    assert plan.removed_ratio == pytest.approx(0.5, abs=0.02) and len(plan.kept) == 3
    assert {str(path) for path in zoo.store.root.rglob("*") if "catalog" not in path.name} == before
