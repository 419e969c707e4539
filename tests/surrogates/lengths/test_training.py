"""A predictor learns what decides lengths, is kept in the zoo, and is refused once its target is another (TI-11)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from surgery.models.load import load_model
from surrogates.lengths.buckets import edges_of
from surrogates.lengths.classifier import LONGEST, padded
from surrogates.lengths.storing import ENDING, embedding_of, put_predictor, stored_predictor
from surrogates.lengths.training import LengthExample, LengthTraining, TrainedLengths, predict, split, train
from tests.checkpoints import make
from zoo.api import Zoo
from zoo.errors import InputError, MalformedCheckpoint, NotFound

SETTINGS = LengthTraining((10, 20, 40), 80, epochs=6, seed=1)


def examples(count: int, vocabulary: int = 64) -> list[LengthExample]:
    """Answers whose lengths a word anywhere in the prompt decides, with some noise."""
    draws, made = random.Random(0), list[LengthExample]()
    for _ in range(count):
        word = draws.randrange(4)
        prompt = [draws.randrange(8, vocabulary) for _ in range(draws.randrange(3, 12))]
        prompt[draws.randrange(len(prompt))] = word
        made.append(LengthExample(tuple(prompt), min(80, max(1, word * 25 + draws.randrange(-4, 5)))))
    return made


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    root = tmp_path_factory.mktemp("lengths")
    opened = Zoo(root / "store")
    opened.ingest(make("llama", root / "m"), "org/m")
    return opened


@pytest.fixture(scope="module")
def trained() -> TrainedLengths:
    return train(torch.randn(64, 48, generator=torch.Generator().manual_seed(0)), examples(500), SETTINGS)


def test_what_decides_lengths_is_learned(trained: TrainedLengths) -> None:
    scores = trained.scores
    assert list(scores) == [10, 20, 40] and trained.trained + trained.scored == 500
    assert scores[10].accuracy < scores[20].accuracy <= scores[40].accuracy > 0.9
    assert all(each.accuracy > each.majority + 0.15 for each in scores.values())
    assert sum(map(sum, scores[10].confusion)) == trained.scored


def test_a_prompt_is_always_on_the_same_side() -> None:
    some = examples(300)
    learned, held_out = split([*some, *some])
    assert not {each.prompt for each in learned} & {each.prompt for each in held_out}
    assert 0.1 < len(held_out) / 600 < 0.3


def test_padding_changes_nothing(trained: TrainedLengths) -> None:
    short, long = (3, 9, 10), tuple(range(8, 40))
    alone, together = predict(trained.module, [short])[0], predict(trained.module, [short, long])[0]
    assert alone == pytest.approx(together, abs=1e-5)
    assert padded([range(LONGEST + 50)])["tokens"].shape[1] == LONGEST


def test_too_few_answers_are_refused() -> None:
    with pytest.raises(InputError, match="too few"):
        train(torch.randn(64, 8), examples(24), SETTINGS)


def test_a_predictor_is_kept_and_refused_for_another_target(zoo: Zoo, tmp_path: Path) -> None:
    store, target = zoo.store, zoo.model("org/m").manifest
    with pytest.raises(NotFound, match="zoo lengths org/m"):
        stored_predictor(store, target)
    embedding = load_model(store, target).get_input_embeddings().weight.detach()
    meta = embedding_of(target)
    assert meta.shape == tuple(embedding.shape)
    made = train(embedding, examples(300, embedding.shape[0]), LengthTraining((10, 20), 80, epochs=1))
    document = {
        "fingerprint": target.fingerprint, "edges": list(edges_of(10, 80)), "spread": made.module.spread,
    }  # fmt: skip
    before = {tensor.digest for tensor in target.tensors}
    put_predictor(store, "org/m" + ENDING, target, made, document)
    found = stored_predictor(store, target)
    prompts = [each.prompt for each in examples(40)]
    assert found.edges == edges_of(10, 80) and found.target == "org/m"
    for mine, kept in zip(predict(made.module, prompts), found.masses(prompts), strict=True):
        assert mine == pytest.approx(kept, abs=1e-5)
    kept_model = zoo.model("org/m" + ENDING)
    assert kept_model.kind == "lengths" and kept_model.base == "org/m"
    assert before & {tensor.digest for tensor in kept_model.manifest.tensors} == {meta.digest}, (
        "the embedding is shared"
    )
    with pytest.raises(InputError, match="it is not a model"):
        load_model(store, kept_model.manifest)
    zoo.verify()
    zoo.gc()
    assert stored_predictor(store, target).masses([(1, 2, 3)])
    zoo.ingest(make("llama", tmp_path / "other", seed=9), "org/other")
    with pytest.raises(InputError, match="predicts another org/m"):
        stored_predictor(store, replace(zoo.model("org/other").manifest, name="org/m"))


def test_a_model_with_the_name_of_a_predictor_is_none(zoo: Zoo, tmp_path: Path) -> None:
    zoo.ingest(make("llama", tmp_path / "x", seed=3), "org/x")
    zoo.ingest(make("llama", tmp_path / "y", seed=4), "org/x" + ENDING)
    with pytest.raises(MalformedCheckpoint, match="no length predictor"):
        stored_predictor(zoo.store, zoo.model("org/x").manifest)
