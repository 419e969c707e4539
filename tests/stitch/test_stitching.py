"""Stitches in the zoo: trained, interrupted, stored, exported, composed into chains that generate; and refusals."""

from __future__ import annotations

import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from stitch import StitchSettings, train_stitch
from stitch.plot import LIKENESS, plot_curve, plot_stitch
from stitch.points import StitchPoint
from surgery.chains.compose import compose
from surgery.chains.composition import parse
from surgery.chains.stitches import stitch_position, stored_stitches
from surgery.modules.stack import open_stack
from tests.checkpoints import VOCAB, build, make, tokenizer_files
from tests.surgery.helpers import edit_weights
from zoo import Zoo
from zoo.errors import Incomparable, InputError, NameTaken, NotFound, TrainingFailed

IDS = torch.randint(3, VOCAB, (1, 9), generator=torch.Generator().manual_seed(1))


def chain(zoo: Zoo, name: str, a_layers: int, b_layer: int):
    slices = [("narrow", 0, a_layers), ("wide", b_layer, 3)]
    return compose(
        zoo.store,
        parse({"slices": [{"sources": [{"model": model, "layer_range": [lo, hi]}]} for model, lo, hi in slices]}),
        name,
    )


@torch.inference_mode()
def check_chains(zoo: Zoo, weights: dict[str, torch.Tensor]) -> None:
    """Check one stitch at three places, at no bytes: chains compute what their parts do, with and without a cache."""
    stacks = {name: open_stack(zoo.store, zoo.model(name).manifest) for name in ("narrow", "wide")}
    for at, (a_layers, b_layer) in enumerate([(1, 1), (2, 2), (2, 1)]):
        assert chain(zoo, f"c{at}", a_layers, b_layer).bytes_new == 0
        model = zoo.model(f"c{at}").load()
        hidden = stacks["narrow"].run(IDS, stacks["narrow"].course(IDS), 0, 1 + 2 * a_layers)
        ones = torch.cat([hidden, torch.full((*IDS.shape, 1), stitch_position(a_layers - 1, b_layer))], -1)
        hidden = torch.nn.functional.linear(ones, weights["weight"], weights["bias"])
        expected = stacks["wide"].run(hidden, stacks["wide"].course(IDS), 1 + 2 * b_layer, 8)
        torch.testing.assert_close(model(IDS).logits, expected, atol=1e-4, rtol=1e-4)
        with_cache, without = (
            model.generate(IDS, max_new_tokens=12, do_sample=False, use_cache=use, eos_token_id=-1)
            for use in (True, False)
        )
        assert torch.equal(with_cache, without)


def test_a_stitch_is_stored_and_serves_several_places(zoo, settings, tmp_path):
    report = train_stitch(zoo, "narrow", "wide", replace(settings, controls=True))
    document = report.document
    assert {
        "stitch",
        "a",
        "b",
        "dims",
        "points",
        "similarity_mean",
        "loss_first",
        "loss_last",
        "seconds",
    } <= document.keys()
    assert (document["stitch"], document["dims"]) == ("narrow-to-wide-stitch", [64, 96])
    assert [(point["a_layer"], point["b_layer"], point["seen"]) for point in document["points"]] == [
        (0, 1, True),
        (1, 2, True),
    ]
    assert all({"similarity", "start", "without_position"} <= point.keys() for point in document["points"])
    with zoo.store.catalog.reading() as reader:
        (stored,) = stored_stitches(zoo.store, reader)
        (kept,) = reader.documents("stitch", "narrow-to-wide-stitch")
    assert kept.value == json.loads(json.dumps(document))
    assert not list((zoo.store.root / "work").iterdir())

    zoo.model("narrow-to-wide-stitch").export(tmp_path / "out")
    weights = load_file(tmp_path / "out" / "stitch.safetensors")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"stitch.safetensors", "stitch.json"}
    assert json.loads((tmp_path / "out" / "stitch.json").read_text()) == document

    check_chains(zoo, weights)
    assert stored.weight.shape == (96, 65)
    assert not zoo.verify().damaged
    again = train_stitch(zoo, "narrow", "wide", replace(settings, controls=True))
    assert again.reused and again.document == document


def test_a_stitch_may_go_and_its_chains_stay(zoo, settings):
    train_stitch(zoo, "narrow", "wide", settings, name="s")
    chain(zoo, "c", 1, 1)
    expected = zoo.model("c").load()(IDS).logits
    zoo.remove("s")
    zoo.gc()
    assert torch.equal(zoo.model("c").load()(IDS).logits, expected)
    zoo.remove("c")
    zoo.gc()
    with pytest.raises(NotFound, match="zoo stitch"):
        chain(zoo, "d", 1, 1)
    assert not zoo.verify().damaged


@pytest.mark.parametrize("part", ["least squares", "training", "control", "measuring"])
def test_ctrl_c_and_a_rerun_end_in_the_same_bits(zoo, stocked, settings, tmp_path, part):
    settings = replace(settings, controls=part == "control")
    shutil.copytree(stocked, tmp_path / "other")
    with Zoo(tmp_path / "other") as other:
        whole = train_stitch(other, "narrow", "wide", settings)

    def stop(what: str, done: int, total: int, remark: str) -> None:
        if what == part and done >= total // 3:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_stitch(zoo, "narrow", "wide", settings, progress=stop)
    assert "narrow-to-wide-stitch" not in [model.name for model in zoo.models()]
    steps: list[int] = []
    document = train_stitch(
        zoo,
        "narrow",
        "wide",
        settings,
        progress=lambda what, done, *_: steps.append(done) if what == "training" else None,
    ).document
    assert steps == {"least squares": list(range(1, 13)), "training": list(range(5, 13))}.get(part, [])
    assert {**document, "seconds": 0} == {**whole.document, "seconds": 0}
    with Zoo(tmp_path / "other") as other:
        assert (
            zoo.model("narrow-to-wide-stitch").manifest.components
            == other.model("narrow-to-wide-stitch").manifest.components
        )


def test_restart_forgets_what_was_kept(zoo, settings):
    def stop(what: str, done: int, total: int, remark: str) -> None:
        if what == "training" and done == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_stitch(zoo, "narrow", "wide", settings, progress=stop)
    seen: list[int] = []
    train_stitch(
        zoo,
        "narrow",
        "wide",
        settings,
        restart=True,
        progress=lambda what, done, *_: seen.append(done) if what == "training" else None,
    )
    assert seen == list(range(1, 13))


def test_a_run_that_stopped_in_the_control_may_do_without_it(zoo, settings):
    def stop(what: str, done: int, total: int, remark: str) -> None:
        if what == "control" and done == 2:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_stitch(zoo, "narrow", "wide", replace(settings, controls=True), progress=stop)
    done: list[str] = []
    document = train_stitch(zoo, "narrow", "wide", settings, progress=lambda what, *_: done.append(what)).document
    assert set(done) == {"measuring"} and "without_position" not in document["points"][0]


def shifting(folder: Path, hidden: int, shift: float, seed: int = 0) -> Path:
    """Save a model with layers that only add a constant, and embeddings that are a linear map of a narrow table."""
    model = build("llama", seed=seed, hidden_size=hidden, mlp_bias=True)
    generator = torch.Generator().manual_seed(5)
    table = torch.randn(VOCAB, 32, generator=generator)
    constant = torch.randn(hidden, generator=generator) * shift
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(table @ torch.randn(32, hidden, generator=generator) / 6)
        model.lm_head.weight.mul_(30.0)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.copy_(constant)
    model.save_pretrained(folder)
    tokenizer_files(folder)
    return folder


def test_without_the_position_several_places_are_done_worse(zoo, settings, tmp_path):
    zoo.ingest(shifting(tmp_path / "still", 64, 0.0), name="still")
    zoo.ingest(shifting(tmp_path / "moving", 96, 1.0, seed=1), name="moving")
    document = train_stitch(zoo, "still", "moving", replace(settings, controls=True, rate=1e-4)).document
    for point in document["points"]:
        assert point["similarity"] > 0.999 and point["start"] > 0.999
        assert point["without_position"] < 0.995
    assert document["loss_last"] < 0.02


def test_models_of_one_width_are_compared_with_no_stitch_at_all(zoo, settings, tmp_path):
    zoo.ingest(make("llama", tmp_path / "twin", seed=3), name="twin")
    points = (StitchPoint(0, 1), StitchPoint(1, 2, seen=False))
    document = train_stitch(zoo, "narrow", "twin", replace(settings, points=points)).document
    assert all("unstitched" in point for point in document["points"])
    assert [point["seen"] for point in document["points"]] == [True, False]
    assert document["similarity_unseen"] == document["points"][1]["similarity"]


def test_families_may_differ(zoo, settings, tmp_path):
    zoo.ingest(make("gpt2", tmp_path / "gpt2"), name="gpt2")
    assert train_stitch(zoo, "gpt2", "wide", settings).document["dims"] == [64, 96]
    compose(
        zoo.store,
        parse(
            {"slices": [{"sources": [{"model": m, "layer_range": r}]} for m, r in (("gpt2", [0, 1]), ("wide", [1, 3]))]}
        ),
        "mixed",
    )
    assert torch.isfinite(zoo.model("mixed").load()(IDS).logits).all()


def test_what_cannot_be_stitched_is_refused_and_leaves_nothing(zoo, settings, tmp_path):
    zoo.ingest(make("llama", tmp_path / "bare", tokenizer=False, vocab_size=100), name="bare")
    train_stitch(zoo, "narrow", "wide", settings, name="s")
    (tmp_path / "high.jsonl").write_text("\n".join(json.dumps({"token_ids": [VOCAB + at] * 40}) for at in range(9)))
    before = sorted(model.name for model in zoo.models())
    refusals = [
        (InputError, "needs no stitch to itself", lambda: train_stitch(zoo, "narrow", "narrow", settings)),
        (NotFound, "nobody", lambda: train_stitch(zoo, "nobody", "wide", settings)),
        (Incomparable, "tokenizers", lambda: train_stitch(zoo, "bare", "wide", settings)),
        (InputError, "is a stitch itself", lambda: train_stitch(zoo, "s", "wide", settings)),
        (NameTaken, "another model", lambda: train_stitch(zoo, "narrow", "wide", settings, name="wide")),
        (
            NameTaken,
            "another training",
            lambda: train_stitch(zoo, "narrow", "wide", replace(settings, steps=3), name="s"),
        ),
        (
            InputError,
            "no place 7:1",
            lambda: train_stitch(zoo, "wide", "narrow", replace(settings, points=(StitchPoint(7, 1),))),
        ),
        (
            InputError,
            "whose context is 256",
            lambda: train_stitch(zoo, "wide", "narrow", replace(settings, length=9000)),
        ),
        (
            InputError,
            "does not know",
            lambda: train_stitch(zoo, "wide", "narrow", replace(settings, text=str(tmp_path / "high.jsonl"))),
        ),
        (InputError, "not a model", lambda: zoo.model("s").load()),
    ]
    for error, words, attempt in refusals:
        with pytest.raises(error, match=words):
            attempt()
    assert sorted(model.name for model in zoo.models()) == before
    assert not zoo.verify().damaged


def test_a_model_that_gives_nan_is_named_before_anything_is_trained(zoo, settings, tmp_path):
    make("llama", tmp_path / "sick", seed=1, hidden_size=96)
    edit_weights(tmp_path / "sick", lambda key, tensor: tensor * torch.nan if "embed" in key else tensor)
    zoo.ingest(tmp_path / "sick", name="sick")
    with pytest.raises(TrainingFailed, match="not finite"):
        train_stitch(zoo, "narrow", "sick", settings)


def test_the_pictures_are_drawn(zoo, settings, tmp_path):
    document = train_stitch(zoo, "narrow", "wide", settings).document
    plot_stitch(document, tmp_path / "plots" / "stitch.png")
    parents = {key: {**parent, "params": 1000} for key, parent in document["parents"].items()}
    plot_curve([{**document, "parents": parents}], tmp_path / "plots" / "curve.png")
    plot_curve([document], tmp_path / "plots" / "likeness.png", LIKENESS)
    for name in ("stitch", "curve", "likeness"):
        assert (tmp_path / "plots" / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_a_state_of_another_format_is_started_over(zoo, settings: StitchSettings):
    """A damaged state file restarts the training; the command does not fail."""

    def stop(what: str, done: int, total: int, remark: str) -> None:
        if what == "training" and done == 4:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train_stitch(zoo, "narrow", "wide", settings, progress=stop)
    for path in (zoo.store.root / "work").rglob("*.safetensors"):
        save_file({"x": torch.zeros(1)}, path)
    assert train_stitch(zoo, "narrow", "wide", settings).document["stitch"] == "narrow-to-wide-stitch"
