"""A probe learns from the target's own hidden states, and is kept for one content of its target (TI-10, ARES)."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from surrogates.lengths.probe import answer_states, last_states, probed_component
from surrogates.lengths.probe_storing import PROBE_ENDING, put_probe, stored_probe
from surrogates.lengths.probe_training import TrainedProbe, fitted, train_probe
from surrogates.lengths.training import LengthExample, scores_only
from tests.checkpoints import make, make_lora
from zoo.api import Zoo
from zoo.errors import InputError, MalformedCheckpoint

WIDTHS, LIMIT = (10, 20, 40), 80


def examples(count: int) -> list[LengthExample]:
    """Answers whose lengths the last token but one decides: the state of the last one alone does not show it."""
    draws, made = random.Random(0), list[LengthExample]()
    for _ in range(count):
        word = draws.randrange(4)
        prompt = (*(draws.randrange(8, 300) for _ in range(draws.randrange(3, 12))), word + 4, 3)
        made.append(LengthExample(prompt, min(LIMIT, max(1, word * 25 + draws.randrange(0, 5)))))
    return made


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Zoo:
    root = tmp_path_factory.mktemp("probe")
    opened = Zoo(root / "store")
    opened.ingest(make("llama", root / "m"), "org/m")
    ingest(opened.store, open_source(str(make_lora(root / "m", root / "lora"))), name="org/lora", base="org/m")
    return opened


@pytest.fixture(scope="module")
def trained(zoo: Zoo) -> TrainedProbe:
    some, target = examples(500), zoo.model("org/m").manifest
    at = probed_component(target, 1)
    states = answer_states(zoo.store, target, [each.prompt for each in some], [each.answer for each in some], at, 4)
    return train_probe(states, some, at, WIDTHS, LIMIT)


@pytest.mark.parametrize("layer", [1, 2])
def test_states_are_those_of_transformers(zoo: Zoo, layer: int) -> None:
    target, prompts = zoo.model("org/m").manifest, [each.prompt for each in examples(5)]
    stock = AutoModelForCausalLM.from_pretrained(zoo.store.root.parent / "m").eval()
    states = last_states(zoo.store, target, prompts, probed_component(target, layer))
    for prompt, state in zip(prompts, states, strict=True):
        with torch.inference_mode():
            known = stock(torch.tensor([list(prompt)]), output_hidden_states=True).hidden_states[layer][0, -1]
        assert torch.allclose(state, known, atol=1e-5), f"behind layer {layer}"
    tuned = last_states(zoo.store, zoo.model("org/lora").manifest, prompts, probed_component(target, layer))
    assert not torch.allclose(tuned, states, atol=1e-3), "an adapter's states are its own"


def test_what_decides_lengths_is_learned(trained: TrainedProbe) -> None:
    assert list(trained.scores) == list(WIDTHS) and trained.trained + trained.scored == 500
    assert all(each.accuracy > each.majority + 0.3 for each in trained.scores.values())
    assert trained.scores[20].accuracy > 0.75
    assert sum(map(sum, trained.scores[10].confusion)) == trained.scored


def ending(count: int) -> list[LengthExample]:
    """Answers of any length, whatever the prompt: each of their tokens says how many tens are left."""
    draws, made = random.Random(1), list[LengthExample]()
    for _ in range(count):
        length = draws.randrange(1, 2 * LIMIT)
        answer = tuple(10 + (length - at - 1) // 10 * 3 + draws.randrange(3) for at in range(length))
        made.append(LengthExample(tuple(draws.randrange(100, 300) for _ in range(6)), length, answer))
    return made


def test_what_an_answer_s_own_tokens_show_is_learned(zoo: Zoo) -> None:
    """Nothing in the prompt tells its length; what is forecast from it is hardly better once the answer has begun."""
    some, target = ending(400), zoo.model("org/m").manifest
    at = probed_component(target, 1)
    states = answer_states(zoo.store, target, [each.prompt for each in some], [each.answer for each in some], at, 8)
    trained = train_probe(states, some, at, WIDTHS, 2 * LIMIT)
    assert list(trained.later) == [64, 128]
    for made, by_width in trained.later.items():
        assert list(by_width) == list(WIDTHS)
        count = sum(each.length > made and scores_only(each.prompt) for each in some)
        assert {each.answers for each in by_width.values()} == {count} and count > 10
    assert trained.later[64][20].again > trained.later[64][20].survived + 0.25
    assert trained.later[64][40].again > 0.75
    assert trained.probe.later is not None and trained.probe.later.edges == trained.probe.edges


@pytest.mark.parametrize("layer", [1, 2])
def test_states_of_answers_are_those_of_transformers(zoo: Zoo, layer: int) -> None:
    target, some = zoo.model("org/m").manifest, ending(6)
    stock = AutoModelForCausalLM.from_pretrained(zoo.store.root.parent / "m").eval()
    prompts, answers = [each.prompt for each in some], [each.answer for each in some]
    states = answer_states(zoo.store, target, prompts, answers, probed_component(target, layer), 9)
    assert torch.allclose(
        states.prompts, last_states(zoo.store, target, prompts, probed_component(target, layer)), atol=1e-5
    )
    expected = [(at, made) for at, each in enumerate(some) for made in range(9, each.length, 9)]
    assert list(zip(states.example, states.made, strict=True)) == expected and len(expected) > 6
    for (at, made), state in zip(expected, states.later, strict=True):
        ids = torch.tensor([[*prompts[at], *answers[at][:made]]])
        with torch.inference_mode():
            known = stock(ids, output_hidden_states=True).hidden_states[layer][0, -1]
        assert torch.allclose(state, known, atol=1e-5), (at, made)


def test_a_fit_does_not_depend_on_how_states_are_scaled() -> None:
    draws = torch.Generator().manual_seed(0)
    states, lengths = torch.randn(200, 6, generator=draws), [20 * (at % 3) + 3 for at in range(200)]
    states[:, 2] += torch.tensor([float(at % 3) for at in range(200)])
    plain = fitted(states, lengths, 3, (0, 20, 40)).masses(states)
    moved = fitted(states * 50 + 7, lengths, 3, (0, 20, 40)).masses(states * 50 + 7)
    assert torch.allclose(plain, moved, atol=1e-3)
    assert torch.allclose(plain.sum(-1), torch.ones(200))


def test_a_probe_is_kept_and_refused_for_another_target(zoo: Zoo, trained: TrainedProbe, tmp_path: Path) -> None:
    store, target = zoo.store, zoo.model("org/m").manifest
    assert stored_probe(store, "org/m") is None and stored_probe(store, "org/none") is None
    put_probe(store, target, trained.probe, {"fingerprint": target.fingerprint})
    found = stored_probe(store, "org/m")
    assert found is not None and (found.at, found.edges) == (trained.probe.at, trained.probe.edges)
    assert found.later is None, "it was trained without answers"
    both = replace(trained.probe, later=replace(trained.probe, weight=trained.probe.weight + 1))
    put_probe(store, target, both, {"fingerprint": target.fingerprint}, replace=True)
    own = stored_probe(store, "org/m")
    assert own is not None and own.later is not None and own.later.edges == own.edges
    assert torch.equal(own.later.weight, found.weight + 1) and torch.equal(own.weight, found.weight)
    assert torch.equal(found.weight, trained.probe.weight) and torch.equal(found.bias, trained.probe.bias)
    zoo.verify()
    zoo.gc()
    assert stored_probe(store, "org/m") is not None
    put_probe(store, target, trained.probe, {"fingerprint": "0" * 64}, replace=True)
    with pytest.raises(InputError, match="zoo lengths org/m --kind probe --replace"):
        stored_probe(store, "org/m")


def test_what_is_no_probe_is_refused(zoo: Zoo, trained: TrainedProbe, tmp_path: Path) -> None:
    target = zoo.model("org/lora").manifest
    wrong = replace(trained.probe, edges=(0, 5))
    put_probe(zoo.store, target, wrong, {"fingerprint": target.fingerprint})
    with pytest.raises(MalformedCheckpoint, match="sizes"):
        stored_probe(zoo.store, "org/lora")
    wrong = replace(trained.probe, later=replace(trained.probe, bias=trained.probe.bias[:-1]))
    put_probe(zoo.store, target, wrong, {"fingerprint": target.fingerprint}, replace=True)
    with pytest.raises(MalformedCheckpoint, match="sizes"):
        stored_probe(zoo.store, "org/lora")
    zoo.ingest(make("llama", tmp_path / "x", seed=3), "org/x")
    zoo.ingest(make("llama", tmp_path / "y", seed=4), "org/x" + PROBE_ENDING)
    with pytest.raises(MalformedCheckpoint, match="no length predictor"):
        stored_probe(zoo.store, "org/x")


@pytest.mark.parametrize("layer", [0, 3])
def test_layers_that_are_none_are_refused(zoo: Zoo, layer: int) -> None:
    with pytest.raises(InputError, match="from 1 to 2 for org/m"):
        probed_component(zoo.model("org/m").manifest, layer)


def test_too_few_answers_are_refused(zoo: Zoo) -> None:
    some = examples(20)
    with pytest.raises(InputError, match="too few"):
        train_probe(torch.randn(20, 8), some, 3, WIDTHS, LIMIT)
