"""A fine-tune stored as base + low-rank deltas: a variant beside the exact model, in a format that peft reads.

The rank determines how close it is.
"""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from surgery.deltas import curve as curve_module
from surgery.deltas import make as making
from surgery.deltas import study as study_module
from surgery.deltas.curve import sizes_of
from surgery.deltas.make import DeltaOptions, delta, opened
from tests import checkpoints
from tests.surgery.deltas.tunes import tune, windows
from tests.surgery.helpers import edit_weights, stored
from zoo.errors import InputError, NameTaken, StoreBusy, WrongBase

FULL = 64  # the full rank of every matrix of the tiny checkpoints; the FFN's have no more


@pytest.fixture
def tuned(zoo, tmp_path, request):
    """A store with `base` and its fine-tune `fine`."""
    family = getattr(request, "param", "llama")
    zoo.ingest(checkpoints.make(family, tmp_path / "base"), name="base")
    zoo.ingest(tune(family, tmp_path / "fine", ranks=3), name="fine", base="base")
    return zoo


@torch.inference_mode()
def logits(model) -> torch.Tensor:
    return model(windows().held).logits


@pytest.mark.parametrize(
    "tuned", ["llama", "qwen2", "gemma2", "glm4", "gpt2", "opt", "gpt_neox", "phi", "llama-tied-bias"], indirect=True
)
@pytest.mark.parametrize(("embeddings", "norms"), [("exact", "exact"), ("lowrank", "fold")])
def test_full_rank_is_the_fine_tune_also_in_stock_peft(tuned, tmp_path, embeddings, norms):
    report = delta(tuned.store, "fine", windows(), DeltaOptions(FULL, embeddings=embeddings, norms=norms))
    exact = logits(tuned.model("fine").load())
    torch.testing.assert_close(logits(tuned.model(report.variant).load()), exact, atol=2e-5, rtol=2e-5)
    assert report.similarity == pytest.approx(1.0, abs=1e-6)
    tuned.model(report.variant).export(tmp_path / "peft")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    torch.testing.assert_close(
        logits(PeftModel.from_pretrained(base, tmp_path / "peft").eval()), exact, atol=2e-5, rtol=2e-5
    )


def test_the_variant_is_a_model_beside_the_exact_one(tuned):
    before = stored(tuned.store)
    report = delta(tuned.store, "fine", windows(), DeltaOptions(4))
    variant = tuned.model(report.variant)
    assert (report.variant, variant.kind, variant.base) == ("fine@delta-r4", "delta", "base")
    assert variant.tokenizer().encode("a text") == tuned.model("fine").tokenizer().encode("a text")
    assert variant.manifest.source == "delta of fine, rank 4"
    assert before["objects"] < stored(tuned.store)["objects"] and before["models"] < stored(tuned.store)["models"]
    in_files = {digest for file in variant.manifest.weight_files for _, digest in file.entries}
    assert report.bytes == sum(tensor.nbytes for tensor in variant.manifest.tensors if tensor.digest in in_files)
    metas = {tensor.digest for tensor in tuned.model("base").manifest.tensors}
    assert report.bytes_exact == sum(
        tensor.nbytes for tensor in tuned.model("fine").manifest.tensors if tensor.digest not in metas
    )
    assert tuned.verify().damaged == ()
    tuned.remove(report.variant)
    tuned.gc()
    assert stored(tuned.store) == before


def test_its_scores_are_kept_for_the_chain_and_each_layer(tuned):
    report = delta(tuned.store, "fine", windows(), DeltaOptions(4))
    with tuned.store.catalog.reading() as reader:
        pairs = reader.equivalences([report.variant])
    assert {pair.relation for pair in pairs} == {"delta"} and {pair.probe for pair in pairs} == {"e" * 64}
    whole, *layers = pairs
    assert (whole.a.model, whole.a.lo, whole.a.hi) == ("fine", 0, 8) and whole.b.model == report.variant
    assert whole.similarity == report.similarity and whole.metrics["base"] == report.base_similarity < report.similarity
    assert [(pair.a.lo, pair.a.hi) for pair in layers] == [(1, 3), (3, 5), (5, 7)]
    assert [pair.similarity for pair in layers] == list(report.layers)


def test_a_fine_tune_that_shares_nothing_is_told_its_base(tuned, tmp_path):
    with tuned.store.catalog.reading() as reader:
        assert reader.model("fine").kind == "full"
    tuned.remove("fine")
    tuned.ingest(tmp_path / "fine", name="alone")
    assert tuned.model("alone").kind == "foundation"
    refused(tuned, "alone", InputError, "--base names one", rank=4)
    report = delta(tuned.store, "alone", windows(), DeltaOptions(4, base="base"))
    assert (report.base, tuned.model(report.variant).base) == ("base", "base")


def test_similarity_grows_with_rank_and_a_delta_of_few_ranks_needs_few(tuned):
    with opened(tuned.store, "fine", windows(), DeltaOptions(8, embeddings="lowrank")) as work:
        scores = [work.curve.at(rank).score for rank in (1, 2, 4, 8)]
        similarities = [score.similarity for score in scores]
        assert similarities[:3] == sorted(similarities[:3]) and scores[0].kl > scores[-1].kl
        assert similarities[-1] == pytest.approx(similarities[-2], abs=1e-7)  # every matrix was moved by three ranks
        assert similarities[-1] > 0.99999
        sizes = [work.curve.at(rank).bytes for rank in (1, 2, 4, 8)]
        assert sizes == sorted(sizes) and sizes[0] < work.bytes_exact


@pytest.fixture
def noisy(tuned, tmp_path):
    """Add `noisy`: a fine-tune that no low rank approximates fully."""
    tuned.ingest(tune("llama", tmp_path / "noisy", size=0.3), name="noisy", base="base")
    return tuned


def test_the_smallest_rank_that_reaches_the_target_is_taken(noisy):
    with opened(noisy.store, "noisy", windows(), DeltaOptions()) as work:
        target = work.curve.at(5).score.similarity
    report = delta(noisy.store, "noisy", windows(), DeltaOptions(target=target))
    assert (report.rank, report.similarity) == (5, target)
    below = {point.rank: point.score.similarity for point in report.curve if point.rank < 5}
    assert 4 in below and all(similarity < target for similarity in below.values())


def test_the_same_again_is_the_same_model_and_another_is_refused(tuned):
    first = delta(tuned.store, "fine", windows(), DeltaOptions(2))
    before = stored(tuned.store)
    assert delta(tuned.store, "fine", windows(), DeltaOptions(2)) == first and stored(tuned.store) == before
    with pytest.raises(NameTaken):
        delta(tuned.store, "fine", windows(), DeltaOptions(3), variant=first.variant)
    assert stored(tuned.store) == before


def test_folded_norms_leave_the_bases_components_with_an_adapter_on_top(tuned):
    options = DeltaOptions(2, embeddings="lowrank", norms="fold")
    variant = tuned.model(delta(tuned.store, "fine", windows(), options).variant).manifest
    base = tuned.model("base").manifest
    assert [p.component.base_digest for p in variant.components] == [p.component.digest for p in base.components]
    assert all(placed.component.adapter is not None for placed in variant.components)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_factors_are_stored_in_the_models_dtype_and_scored_as_stored(zoo, tmp_path, dtype):
    zoo.ingest(checkpoints.make("llama", tmp_path / "base", dtype=dtype), name="base")
    zoo.ingest(tune("llama", tmp_path / "fine", dtype=dtype), name="fine", base="base")
    report = delta(zoo.store, "fine", windows(), DeltaOptions(16))
    manifest = zoo.model(report.variant).manifest
    assert {tensor.dtype for tensor in manifest.tensors} == {{"bfloat16": "BF16", "float16": "F16"}[dtype]}
    exact, loaded = logits(zoo.model("fine").load()), logits(zoo.model(report.variant).load())
    cosine = torch.cosine_similarity(exact.float().softmax(-1), loaded.float().softmax(-1), dim=-1).mean()
    assert float(cosine) == pytest.approx(report.similarity, abs=2e-3)


# -- refusals ----------------------------------------------------------------------------------------------------------


def refused(zoo, name: str, kind: type[Exception], words: str, **options) -> None:
    before = stored(zoo.store)
    with pytest.raises(kind, match=words):
        delta(zoo.store, name, windows(), DeltaOptions(**options))
    assert stored(zoo.store) == before


def test_what_is_no_full_fine_tune_is_refused(tuned, tmp_path):
    refused(tuned, "base", InputError, "foundation")
    tuned.ingest(checkpoints.make_lora(tmp_path / "base", tmp_path / "lora"), name="lora", base="base")
    refused(tuned, "lora", InputError, "of kind lora")
    tuned.ingest(
        checkpoints.make("llama", tmp_path / "other", seed=9, num_hidden_layers=2), name="shorter", base="base"
    )
    refused(tuned, "shorter", WrongBase, "6 components .* 8")
    tuned.ingest(checkpoints.make("llama", tmp_path / "wide", intermediate_size=128), name="wider", base="base")
    refused(tuned, "wider", WrongBase, "other settings")


def test_nothing_smaller_reaches_the_target(noisy):
    refused(noisy, "noisy", InputError, "--rank stores it", target=1.0)


@pytest.mark.parametrize("options", [dict(rank=0), dict(target=0.0), dict(target=1.5)])
def test_senseless_options(options):
    with pytest.raises(InputError):
        DeltaOptions(**options)


@pytest.mark.parametrize("where", ["model.layers.1.mlp.up_proj.weight", "model.layers.2.input_layernorm.weight"])
def test_weights_that_are_not_finite_stop_it(zoo, tmp_path, where):
    zoo.ingest(checkpoints.make("llama", tmp_path / "base"), name="base")
    folder = tune("llama", tmp_path / "fine")
    edit_weights(folder, lambda key, tensor: torch.full_like(tensor, float("nan")) if key == where else tensor)
    zoo.ingest(folder, name="fine", base="base")
    refused(zoo, "fine", InputError, "NaN or infinity", rank=2)


def test_an_interruption_leaves_nothing(tuned, monkeypatch):
    before = stored(tuned.store)

    def stop(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(making, "_ingest", stop)
    with pytest.raises(KeyboardInterrupt):
        delta(tuned.store, "fine", windows(), DeltaOptions(2))
    assert stored(tuned.store) == before


def work_of(zoo) -> list:
    return sorted((zoo.store.root / "work").glob("delta-*"))


@pytest.mark.parametrize("after", [1, 9])
def test_stopped_and_started_again_it_goes_on_and_gives_the_same(noisy, tmp_path, monkeypatch, after):
    """Stops after `after` matrices of the study; the second run factorises only the remaining ones."""
    options = DeltaOptions(4)
    straight = delta(noisy.store, "noisy", windows(), options)
    assert work_of(noisy) == [], "what is done leaves nothing behind"
    noisy.remove(straight.variant)
    made = []
    take_apart = study_module.factorise

    def counted(*arguments):
        made.append(1)
        return take_apart(*arguments)

    def stop(done, total):
        if done == after:
            raise KeyboardInterrupt

    monkeypatch.setattr(study_module, "factorise", counted)
    before = stored(noisy.store)
    with pytest.raises(KeyboardInterrupt):
        delta(noisy.store, "noisy", windows(), options, progress=stop)
    assert len(made) == after and stored(noisy.store) == before and len(work_of(noisy)) == 1
    told = []
    again = delta(noisy.store, "noisy", windows(), options, progress=lambda done, total: told.append((done, total)))
    assert again == straight
    assert len(made) == len(straight.ranks) and told[0] == (after + 1, len(straight.ranks)), (
        "no matrix was taken apart twice"
    )
    assert work_of(noisy) == []


def test_what_was_scored_before_the_stop_is_not_scored_again(noisy, monkeypatch):
    scored = []
    compare = curve_module.compare_stacks

    def counted(*arguments):
        scored.append(1)
        if len(scored) == 3:
            raise KeyboardInterrupt
        return compare(*arguments)

    monkeypatch.setattr(curve_module, "compare_stacks", counted)
    with pytest.raises(KeyboardInterrupt):
        delta(noisy.store, "noisy", windows(), DeltaOptions(target=0.97))
    first = delta(noisy.store, "noisy", windows(), DeltaOptions(target=0.97))
    resumed = len(scored) - 3
    noisy.remove(first.variant)
    scored[:] = [1] * 3
    assert delta(noisy.store, "noisy", windows(), DeltaOptions(target=0.97)) == first
    assert len(scored) - 3 == resumed + 2


def test_another_rank_target_or_name_goes_on_with_the_same_study_and_another_text_does_not(noisy, monkeypatch):
    def never(*_):
        raise AssertionError("this matrix was taken apart before")

    with pytest.raises(InputError, match="--rank stores it"):
        delta(noisy.store, "noisy", windows(), DeltaOptions(target=1.0))
    monkeypatch.setattr(study_module, "factorise", never)
    assert delta(noisy.store, "noisy", windows(), DeltaOptions(3), variant="three").rank == 3
    with pytest.raises(AssertionError):
        delta(noisy.store, "noisy", windows(count=4), DeltaOptions(3))


def test_the_same_at_the_same_time_is_refused(noisy):
    with opened(noisy.store, "noisy", windows(), DeltaOptions(3)), pytest.raises(StoreBusy, match="by another process"):
        delta(noisy.store, "noisy", windows(), DeltaOptions(3))


@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
@pytest.mark.parametrize("allocation", ["spread", "even"])
def test_a_budget_of_bytes_is_kept_and_used_up(noisy, share, allocation):
    report = delta(
        noisy.store, "noisy", windows(), DeltaOptions(embeddings="lowrank", allocation=allocation, bytes=share)
    )
    most = share * report.bytes_exact
    manifest = noisy.model(report.variant).manifest
    in_files = {digest for file in manifest.weight_files for _, digest in file.entries}
    assert report.bytes == sum(tensor.nbytes for tensor in manifest.tensors if tensor.digest in in_files) <= most
    one_more = 4 * sum((64, 64)) * (22 if allocation == "even" else 3)  # one rank of every matrix; of the widest one
    assert report.bytes > most - one_more and report.variant == f"noisy@delta-{share * 100:g}pct"
    same = delta(
        noisy.store,
        "noisy",
        windows(),
        DeltaOptions(embeddings="lowrank", allocation=allocation, bytes=int(most)),
        variant="same",
    )
    assert (same.ranks, same.bytes) == (report.ranks, report.bytes)


def test_bytes_go_where_they_gain_more_than_evenly(noisy):
    scores = {}
    for allocation in ("spread", "even"):
        options = DeltaOptions(embeddings="lowrank", allocation=allocation, bytes=0.2)
        scores[allocation] = delta(noisy.store, "noisy", windows(), options, variant=allocation).score.kl
    assert scores["spread"] < scores["even"]


@pytest.mark.parametrize(
    "options", [dict(bytes=0.0), dict(bytes=-5), dict(bytes=float("inf")), dict(bytes=0.5, rank=3)]
)
def test_senseless_budgets(options):
    with pytest.raises(InputError, match="budget of bytes"):
        DeltaOptions(**options)


def test_a_budget_below_what_is_carried_whole_is_refused(noisy):
    refused(noisy, "noisy", InputError, "leave nothing for deltas.*--embeddings lowrank", bytes=0.05)


def test_wholes_count_once_where_head_and_table_are_tied(zoo, tmp_path):
    zoo.ingest(checkpoints.make("qwen2", tmp_path / "base"), name="base")
    zoo.ingest(tune("qwen2", tmp_path / "fine"), name="fine", base="base")
    with opened(zoo.store, "fine", windows(), DeltaOptions(1)) as work:
        table = checkpoints.VOCAB * 64 * 4
        assert table < sizes_of(work.exact, work.base, work.plan).whole < 2 * table
        assert json.dumps(dataclasses.asdict(work.curve.at(1)))
