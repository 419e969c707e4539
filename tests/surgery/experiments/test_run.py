"""An experiment's numbers equal brute force over exchanged checkpoints; stopped runs resume; the document is stored."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from transformers import AutoTokenizer

from surgery.evaluation.harness import EvalOptions
from surgery.evaluation.items import cloze_items
from surgery.experiments import run as running
from surgery.experiments.points import Mixture, sharing_points, switching_points
from surgery.experiments.questions import Question, questions
from surgery.experiments.run import EXPERIMENT, Request, run_experiment
from surgery.experiments.scores import ScoreTally, difference, mean
from surgery.text.text import Text
from tests.surgery.experiments.conftest import LAYERS, TEXT
from tests.surgery.experiments.test_bench import surgeon
from zoo.errors import InputError

ASK = Question(windows=6, length=32, lines=4, batch=4)
REQUEST = Request(
    "sharing", "a", "b", lambda layers, replaceable: sharing_points(layers, [2], replaceable), TEXT, ASK, ("pruned",)
)


@pytest.fixture(scope="module")
def document(family, tmp_path_factory):
    return run_experiment(family.zoo, REQUEST, tmp_path_factory.mktemp("out") / "state.json")


@torch.inference_mode()
def brute_force(family, mixture: Mixture) -> dict[str, float]:
    """Compute the measures on whole models, one sequence at a time."""
    model, tokenizer = surgeon(family, mixture), AutoTokenizer.from_pretrained(family.root / "b")
    windows = TEXT.tokens(tokenizer, ASK.length, ASK.windows, part="held_out", seed=ASK.seed)
    loss = hits = right = 0.0
    for window in windows:
        out = model(window[None]).logits[0].double()
        loss += float(torch.nn.functional.cross_entropy(out[:-1], window[1:], reduction="sum"))
        hits += int((out[:-1].argmax(-1) == window[1:]).sum())
    items = cloze_items(list(TEXT.held_out), ASK.lines)
    for item in items:
        scores = []
        for choice in item.choices:
            stem, ids = tokenizer.encode(item.context.rstrip()), tokenizer.encode(item.context + choice)
            new, ids = len(ids) - len(stem), ids[-256:]
            logs = model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
            scores.append(sum(float(logs[at - 1, ids[at]]) for at in range(len(ids) - new, len(ids))))
        right += scores.index(max(scores)) == item.answer
    count = ASK.windows * (ASK.length - 1)
    return {"accuracy": hits / count, "loss": loss / count, "lines": right / len(items)}


def test_every_number_is_that_of_brute_force(family, document):
    entries = [(Mixture(point["mixture"]), point) for point in document["points"]]
    entries += [(Mixture(letter * LAYERS, letter), document["baselines"][letter]) for letter in "ab"]
    base = brute_force(family, Mixture("b" * LAYERS))
    assert [(point["line"], point["at"], point["mixture"]) for _, point in entries[:-2]] == [
        ("shared", 0, "aabb"), ("shared", 1, "baab"), ("shared", 2, "bbaa"), ("pruned", 1, "bssb"),
    ]  # fmt: skip
    for mixture, entry in entries:
        for measure, expected in brute_force(family, mixture).items():
            assert entry[measure]["value"] == pytest.approx(expected, abs=1e-5), (mixture, measure)
            assert entry[measure]["difference"] == pytest.approx(expected - base[measure], abs=2e-5)


def test_the_document_names_its_ground_and_is_kept_once(family, document, tmp_path):
    assert document["probe"]["text"] == TEXT.digest
    assert document["fingerprints"]["a"] == family.zoo.model("a").manifest.fingerprint
    again = run_experiment(family.zoo, REQUEST, tmp_path / "state.json")
    assert json.dumps(again) == json.dumps(document)
    with family.zoo.store.catalog.reading() as reader:
        kept = [found for found in reader.documents(EXPERIMENT, "b") if found.value["experiment"] == "sharing"]
    assert [found.value for found in kept] == [document]


def test_a_stopped_run_goes_on_and_further_points_cost_only_themselves(family, document, tmp_path, monkeypatch):
    state, calls = tmp_path / "state.json", []
    tally = running.tally

    def counted(batch, hidden, head):
        if len(calls) == stop:
            raise KeyboardInterrupt
        calls.append(batch.key)
        return tally(batch, hidden, head)

    monkeypatch.setattr(running, "tally", counted)
    stop = 8
    with pytest.raises(KeyboardInterrupt):
        run_experiment(family.zoo, REQUEST, state, keep=False)
    stop = None
    assert run_experiment(family.zoo, REQUEST, state, keep=False) == document
    mixtures, batches = 6, 2 + 4
    assert len(calls) == mixtures * batches + 8 - mixtures, "the whole batch before the stop was not measured again"
    calls.clear()
    more = dataclasses.replace(REQUEST, plan=lambda layers, replaceable: sharing_points(layers, [1, 2], replaceable))
    run_experiment(family.zoo, more, state, keep=False)
    assert len(calls) == batches * (LAYERS + 2), "one shared layer at each place, two pruned"
    calls.clear()
    other = dataclasses.replace(REQUEST, ask=dataclasses.replace(ASK, seed=1))
    assert run_experiment(family.zoo, other, state, keep=False)["points"] != document["points"]
    assert len(calls) == mixtures * batches, "other questions begin anew"


def test_switching_at_the_end_is_the_second_model(family, tmp_path):
    request = dataclasses.replace(
        REQUEST, experiment="switching", plan=lambda n, r: switching_points(n, [2], [1, 2], r), surrogates=()
    )
    found = run_experiment(family.zoo, request, tmp_path / "state.json", keep=False)
    one, two = found["points"]
    assert (one["mixture"], two["mixture"]) == ("bbba", "bbbb")
    assert {key: two[key] for key in found["baselines"]["b"]} == found["baselines"]["b"]
    assert two["loss"]["difference_error"] == 0.0


def test_tasks_of_lm_eval_are_measured_at_every_point_and_once(family, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    request = dataclasses.replace(
        REQUEST,
        plan=lambda n, r: sharing_points(n, [4]),
        tasks=("library_cloze",),
        options=EvalOptions(limit=3),
        surrogates=(),
    )
    found = run_experiment(family.zoo, request, tmp_path / "state.json", keep=False)
    accuracies = [
        entry["tasks"]["library_cloze"]["acc,none"] for entry in (*found["baselines"].values(), *found["points"])
    ]
    assert len(accuracies) == 3 and all(0 <= each <= 1 for each in accuracies)
    monkeypatch.setattr(running, "evaluate", None)
    assert run_experiment(family.zoo, request, tmp_path / "state.json", keep=False) == found


def test_a_model_that_gives_no_numbers_is_refused(family, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "surgery.experiments.bench.MixtureBench.head",
        lambda self, mixture, x: torch.full((*x.shape[:-1], 320), math.nan),
    )
    with pytest.raises(InputError, match="no numbers"):
        run_experiment(family.zoo, REQUEST, tmp_path / "state.json", keep=False)


def test_a_text_without_enough_text_is_refused(family, tmp_path):
    with pytest.raises(InputError, match="too little text"):
        run_experiment(
            family.zoo, dataclasses.replace(REQUEST, text=Text("tiny", ("a",), ("b",))), tmp_path / "state.json"
        )


def test_questions_are_the_same_for_the_same_text_and_their_digest_tells(family):
    tokenizer = family.zoo.model("b").tokenizer()
    one, two = (questions(TEXT, tokenizer, ASK, 256) for _ in range(2))
    assert one.digest == two.digest
    assert questions(TEXT, tokenizer, dataclasses.replace(ASK, lines=3), 256).digest != one.digest
    assert one.tokens == 6 * 32 and one.lines == 4
    assert all(batch.ids.shape[1] <= 256 for batch in one.batches)
    assert all(batch.ids.shape[1] <= 20 for batch in questions(TEXT, tokenizer, ASK, 20).batches)


def test_errors_are_those_of_the_batches():
    tallies = [ScoreTally(10.0, 5, 10), ScoreTally(20.0, 7, 10), ScoreTally(30.0, 9, 10)]
    found = mean(tallies, "loss")
    assert found.value == pytest.approx(2.0)
    assert found.error == pytest.approx(1.0 / math.sqrt(3))  # batch means 1, 2, 3: deviation 1 over root 3
    assert difference(tallies, tallies, "hits").error == 0.0
    assert mean(tallies[:1], "loss").error is None
