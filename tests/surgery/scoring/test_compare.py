"""Scores of two models against brute force over whole distributions; refusals; resuming after an interruption."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from surgery.scoring import measuring
from surgery.scoring.compare import CompareSettings, probe_of, score
from surgery.scoring.runs import Span
from surgery.scoring.twins import random_twin
from surgery.text.tokenizers import vocabulary_size
from tests.chains import put_chain
from tests.checkpoints import make, make_lora
from tests.surgery.helpers import edit_weights
from zoo import Zoo
from zoo.errors import Incomparable, InputError, NotServable

#: This file serves as the text; reading the standard library takes seconds.
SMALL = dict(source=__file__, tokens=96, length=32)


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    """A store with base; tuned, slightly changed from it; wide, of another width and depth; and lora, on base."""
    root = tmp_path_factory.mktemp("zoo")
    base, tuned = make("llama", root / "base"), make("llama", root / "tuned")
    generator = torch.Generator().manual_seed(3)
    edit_weights(
        tuned, lambda key, tensor: tensor + 0.02 * tensor.std() * torch.randn(tensor.shape, generator=generator)
    )
    make("llama", root / "wide", seed=9, hidden_size=96, num_hidden_layers=6)
    make_lora(base, root / "lora")
    with Zoo(root / "store") as opened:
        opened.ingest(base, name="base")
        opened.ingest(tuned, name="tuned", base="base")
        opened.ingest(root / "wide", name="wide")
        opened.ingest(root / "lora", name="lora", base="base")
        yield opened


def lens_of(zoo, name, windows):
    """Compute log-probabilities behind every layer with transformers: [layers, tokens, vocabulary], embedding first."""
    model = zoo.model(name).load()
    with torch.inference_mode():
        out = model(windows, output_hidden_states=True)
        states = [model.lm_head(model.model.norm(state)) for state in out.hidden_states[:-1]] + [out.logits]
    return torch.stack(states).flatten(1, 2).double().log_softmax(-1)


def expected(a, b):
    """Return (cosine, KL a b, KL b a, agreement), means over tokens."""
    p, q = a.exp(), b.exp()
    cosine = torch.nn.functional.cosine_similarity(p, q, dim=-1).mean().item()
    kl = [((x.exp() * (x - y)).sum(-1)).mean().item() for x, y in ((a, b), (b, a))]
    return cosine, *kl, (a.argmax(-1) == b.argmax(-1)).double().mean().item()


def found(pair):
    return pair.similarity, pair.metrics["kl_ab"], pair.metrics["kl_ba"], pair.metrics["agreement"]


@pytest.mark.parametrize("other", ["tuned", "lora"])
def test_layers_score_as_whole_distributions_do(zoo, other):
    a, b = zoo.model("base"), zoo.model(other)
    settings = CompareSettings(**SMALL, matrix=True)
    result = zoo.compare("base", other, settings)
    windows = probe_of(zoo.store, a, b, settings).windows
    states_a, states_b = lens_of(zoo, "base", windows), lens_of(zoo, other, windows)
    assert [(pair.a.layers, pair.b.components) for pair in result.pairs] == [
        (Span(n, n + 1), Span(2 * n + 1, 2 * n + 3)) for n in range(3)
    ]
    for n, pair in enumerate(result.pairs):
        assert found(pair) == pytest.approx(expected(states_a[n + 1], states_b[n + 1]), abs=2e-5)
        for m in range(3):
            assert result.matrix.values[n][m] == pytest.approx(expected(states_a[n + 1], states_b[m + 1])[0], abs=2e-5)
    assert result.mean == pytest.approx(sum(pair.similarity for pair in result.pairs) / 3)
    with torch.inference_mode():
        hidden = [zoo.model(name).load()(windows, output_hidden_states=True).hidden_states for name in ("base", other)]
    for n in (0, 1):  # transformers applies the norm to the last one
        cosine = torch.nn.functional.cosine_similarity(*(states[n + 1] for states in hidden), dim=-1).mean().item()
        assert cosine < 0.99999 and result.pairs[n].metrics["hidden"] == pytest.approx(cosine, abs=2e-5)


def test_the_control_of_a_chain_of_several_models_has_learned_nothing(zoo, tmp_path):
    zoo.ingest(make("llama", tmp_path / "thin", seed=5, intermediate_size=48), name="thin")
    put_chain(zoo.store, "mixed", ("base", 0, 2), ("thin", 1, 3))
    mixed = zoo.model("mixed")
    found = score(zoo.store, mixed, mixed, CompareSettings(**SMALL))
    assert found.mean == pytest.approx(1.0) and found.control < 0.9
    ids = torch.arange(3, 35).unsqueeze(0)
    with torch.inference_mode():
        first, again, other = (random_twin(zoo.store, mixed.manifest, seed)(ids) for seed in (0, 0, 1))
    assert torch.equal(first, again) and not torch.allclose(first, other)


def test_a_probe_fits_the_shorter_context(zoo, tmp_path):
    zoo.ingest(make("llama", tmp_path / "short", seed=8, max_position_embeddings=16), name="short")
    result = zoo.compare("base", "short", CompareSettings(**SMALL, control=False))
    assert (result.probe.window, result.probe.tokens) == (16, 96)


def test_the_control_is_an_unlearned_twin_and_stays_below(zoo):
    result = zoo.compare("base", "tuned", CompareSettings(**SMALL))
    assert result.pairs[-1].similarity > 0.9 > result.pairs[-1].control > 0
    assert result.control == pytest.approx(sum(pair.control for pair in result.pairs) / 3)
    again = score(zoo.store, zoo.model("base"), zoo.model("tuned"), CompareSettings(**SMALL))
    assert [pair.control for pair in again.pairs] == [pair.control for pair in result.pairs]
    other = score(zoo.store, zoo.model("base"), zoo.model("tuned"), CompareSettings(**SMALL, seed=1))
    assert other.control != result.control


def test_components_embedding_and_head_included(zoo):
    result = zoo.compare("base", "tuned", CompareSettings(**SMALL, granularity="component", matrix=True, control=False))
    assert [pair.a.components for pair in result.pairs] == [Span(n, n + 1) for n in range(8)]
    assert result.pairs[-1].similarity == pytest.approx(
        result.pairs[-2].similarity
    )  # the head reads the last FFN's output
    assert result.control is None and result.matrix.control is None and len(result.matrix.values) == 8


def test_a_model_is_wholly_like_itself(zoo):
    result = zoo.compare("base", "base", CompareSettings(**SMALL, granularity="component", control=False))
    assert all(pair.similarity == pytest.approx(1.0) and pair.metrics["agreement"] == 1.0 for pair in result.pairs)
    with zoo.store.catalog.reading() as reader:
        assert not any(pair.a.model == pair.b.model for pair in reader.equivalences())


def test_other_widths_and_depths_go_by_groups(zoo):
    settings = CompareSettings(**SMALL, matrix=True)
    result = zoo.compare("base", "wide", settings)
    windows = probe_of(zoo.store, zoo.model("base"), zoo.model("wide"), settings).windows
    states_a, states_b = lens_of(zoo, "base", windows), lens_of(zoo, "wide", windows)
    assert result.granularity == "group"
    assert [(pair.a.layers, pair.b.layers) for pair in result.pairs] == [
        (Span(n, n + 1), Span(2 * n, 2 * n + 2)) for n in range(3)
    ]
    for n, pair in enumerate(result.pairs):
        assert found(pair) == pytest.approx(expected(states_a[n + 1], states_b[2 * n + 2]), abs=2e-5)
        assert "hidden" not in pair.metrics
    assert len(result.matrix.values) == 3 and {len(row) for row in result.matrix.values} == {6}
    with pytest.raises(InputError, match="use the granularity `group`"):
        zoo.compare("base", "wide", CompareSettings(**SMALL, granularity="layer"))


def test_scores_are_kept_with_what_they_were_taken_on(zoo):
    result = zoo.compare("base", "tuned", CompareSettings(**SMALL))
    with zoo.store.catalog.reading() as reader:
        kept = [
            each
            for each in reader.equivalences(["tuned"])
            if each.probe == result.probe.digest and each.control is not None
        ]
        (document,) = [
            each
            for each in reader.documents("compare", "base")
            if each.value["pairs"][0]["similarity"] == kept[0].similarity
        ]
    assert [(each.a.model, each.a.lo, each.a.hi, each.b.model) for each in kept] == [
        ("base", 2 * n + 1, 2 * n + 3, "tuned") for n in range(3)
    ]
    assert [each.similarity for each in kept] == [pair.similarity for pair in result.pairs]
    assert document.value["probe"]["sha"] == result.probe.digest
    json.dumps(result.document(), allow_nan=False)


class Stop(Exception):
    pass


@pytest.mark.parametrize(("stop_at", "remains"), [(1, [1, 2, 3, 3, 4, 5, 6]), (3, [3, 3, 4, 5, 6]), (5, [3, 5, 6])])
def test_an_interrupted_comparison_goes_on_where_it_was(zoo, monkeypatch, stop_at, remains):
    """Three windows, one per batch, twice: pairs and control.

    Progress reports the start of each of the two, and each batch done.
    """
    monkeypatch.setattr(measuring, "_HIDDEN_BUDGET", 1)
    settings = CompareSettings(**SMALL, seed=40 + stop_at, matrix=True)
    models = zoo.model("base"), zoo.model("tuned")
    whole = score(zoo.store, *models, settings)
    assert not list((zoo.store.root / "work").iterdir())

    def interrupt(done, total):
        assert total == 6
        if done == stop_at:
            raise Stop

    with pytest.raises(Stop):
        score(zoo.store, *models, settings, interrupt)
    told = []
    resumed = score(zoo.store, *models, settings, lambda done, total: told.append(done))
    assert told == remains
    assert resumed.pairs == whole.pairs and resumed.matrix == whole.matrix
    assert not list((zoo.store.root / "work").iterdir())


def test_other_settings_do_not_go_on_from_these_sums(zoo, monkeypatch):
    monkeypatch.setattr(measuring, "_HIDDEN_BUDGET", 1)
    models = zoo.model("base"), zoo.model("tuned")
    whole = score(zoo.store, *models, CompareSettings(**SMALL, seed=61))

    def interrupt(done, total):
        if done == 5:  # two of the control's three windows
            raise Stop

    with pytest.raises(Stop):
        score(zoo.store, *models, CompareSettings(**SMALL, seed=60), interrupt)
    assert score(zoo.store, *models, CompareSettings(**SMALL, seed=61)).pairs == whole.pairs
    score(zoo.store, *models, CompareSettings(**SMALL, seed=60))
    assert not list((zoo.store.root / "work").iterdir())


def test_a_damaged_file_of_partial_sums_counts_as_none(zoo):
    settings = CompareSettings(**SMALL, seed=50)
    models = zoo.model("base"), zoo.model("tuned")
    whole = score(zoo.store, *models, settings)

    def interrupt(done, total):
        if done:
            raise Stop

    with pytest.raises(Stop):
        score(zoo.store, *models, settings, interrupt)
    (path,) = (zoo.store.root / "work").iterdir()
    path.write_text('{"pairs": {"done": 1, "sums": ')
    assert score(zoo.store, *models, settings).pairs == whole.pairs


def test_what_cannot_be_compared_is_refused_with_the_reason(zoo, tmp_path):
    zoo.ingest(make("llama", tmp_path / "few", tokenizer=False, vocab_size=300), name="few")
    zoo.ingest(make("bloom", tmp_path / "bloom"), name="bloom")
    nan = make("llama", tmp_path / "nan", seed=5)
    edit_weights(nan, lambda key, tensor: tensor * (float("nan") if key == "model.layers.1.mlp.up_proj.weight" else 1))
    zoo.ingest(nan, name="nan")
    (tmp_path / "empty.txt").write_text("\n")
    cases = [
        ("few", {}, Incomparable, "different tokenizers.*320 and 300 tokens"),
        ("bloom", {}, NotServable, "bloom"),
        ("nan", {}, InputError, "not finite"),
        ("tuned", {"source": str(tmp_path / "empty.txt")}, InputError, "a probe file without text"),
        ("tuned", {"tokens": 8}, InputError, "too small"),
        ("tuned", {"groups": 4}, InputError, "make no 4 groups"),
    ]
    for name, options, error, reason in cases:
        with pytest.raises(error, match=reason):
            zoo.compare("base", name, CompareSettings(**{**SMALL, **options}))
        with zoo.store.catalog.reading() as reader:
            assert not [pair for pair in reader.equivalences([name]) if name != "tuned"]


def test_models_without_tokenizers_are_compared_on_ids(tmp_path):
    with Zoo(tmp_path / "store") as zoo:
        for seed, name in enumerate("ab"):
            zoo.ingest(make("gpt2", tmp_path / name, seed=seed, tokenizer=False), name=name)
        with pytest.raises(InputError, match="token ids"):
            zoo.compare("a", "b", CompareSettings(**SMALL))
        probe = tmp_path / "ids.jsonl"
        probe.write_text(json.dumps({"token_ids": [3 + n * 7 % 300 for n in range(96)]}) + "\n")
        result = zoo.compare("a", "b", CompareSettings(**{**SMALL, "source": str(probe)}))
        assert result.probe.tokens == 96 and result.pairs[0].similarity < 1
        probe.write_text(json.dumps({"token_ids": [5000] * 96}) + "\n")
        with pytest.raises(InputError, match="token 5000 of the probe"):
            zoo.compare("a", "b", CompareSettings(**{**SMALL, "source": str(probe)}))


def test_padded_heads_compare_what_both_have(tmp_path):
    """The same tokenizer with heads of 320 and 352 rows, as in published families; the first 320 logits are equal."""
    with Zoo(tmp_path / "store") as zoo:
        make("llama", tmp_path / "a")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
        torch.manual_seed(0)
        model.resize_token_embeddings(352, mean_resizing=False)
        model.save_pretrained(tmp_path / "b")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / "b" / name).write_bytes((tmp_path / "a" / name).read_bytes())
        for name in "ab":
            zoo.ingest(tmp_path / name, name=name)
        assert [vocabulary_size(zoo.model(name).manifest) for name in "ab"] == [320, 352]
        assert zoo.compare("a", "b", CompareSettings(**SMALL)).mean == pytest.approx(1.0, abs=1e-5)


_MEASURE = """
import sys
from pathlib import Path
import torch
from surgery.scoring.compare import CompareSettings
from surgery.scoring import compare as equivalence
from zoo import Zoo

def high_water():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))

torch.set_num_threads(1)
with Zoo(sys.argv[1]) as zoo:
    zoo.model("a").tokenizer()
    zoo.compare("a", "b", CompareSettings(sys.argv[2], 64, 32, matrix=True, control=False))
    before = high_water()
    zoo.compare("a", "b", CompareSettings(sys.argv[2], 512, 32, matrix=True, control=False))
    print(high_water() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the peak from /proc")
def test_memory_does_not_grow_with_tokens_times_vocabulary(tmp_path):
    """Peak memory stays far below the 369 MB of whole distributions; the budget is 96 MB.

    369 MB = 512 tokens x 30,000 x 2 models x 3 positions x 4 bytes.
    """
    with Zoo(tmp_path / "store") as zoo:
        for seed, name in enumerate("ab"):
            zoo.ingest(make("llama", tmp_path / name, seed=seed, vocab_size=30_000, hidden_size=32), name=name)
    program = [sys.executable, "-c", _MEASURE, str(tmp_path / "store"), __file__]
    grown = int(subprocess.run(program, check=True, capture_output=True, text=True).stdout)
    assert grown < 150 << 20


@pytest.mark.parametrize("kind", ["prefix", "prompt", "stitch"])
def test_kinds_that_add_no_block_are_refused(zoo, kind):
    tuned = zoo.model("tuned")
    tuned.manifest = dataclasses.replace(tuned.manifest, kind=kind)
    with pytest.raises(Incomparable, match=f"tuned is of kind {kind}"):
        score(zoo.store, zoo.model("base"), tuned, CompareSettings(**SMALL))


def test_states_before_a_stitch_cannot_be_read_by_the_head():
    """Behind 4 components (embedding, layer, stitch, layer) the width is the head's; behind 2 it is not."""
    kinds = ["embedding", "layer", "stitch", "layer", "lm_head"]
    stack = SimpleNamespace(placed=[SimpleNamespace(component=SimpleNamespace(kind=kind)) for kind in kinds])
    measuring.check_readable("stitched", stack, (4,))
    with pytest.raises(Incomparable, match=r"stitched changes its width at component 2.*as one group"):
        measuring.check_readable("stitched", stack, (2, 4))
