"""What the benchmark of twenty models computes itself: the family, orders to a side, and per-model provisioning.

Provisioning runs in virtual time.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks.serving.sides import Made, Wanted, wanted_of, zoo
from benchmarks.serving.swapped import answered, provision
from benchmarks.serving.twenty import by_popularity, members
from runtime.bench.summary import Slo, summarize
from runtime.bench.workload import WorkloadRequest
from tests.checkpoints import make, make_lora
from zoo.api import Zoo


def _asks(*rows: tuple[float, str]) -> list[WorkloadRequest]:
    return [WorkloadRequest(number, at, model, (5, 6), 4) for number, (at, model) in enumerate(rows)]


class _Engine:
    """An engine that takes a second for a batch, and half a second more for each further request."""

    def __init__(self) -> None:
        self.batches: list[tuple[str, list[int]]] = []

    def run(self, model: str, batch: Sequence[WorkloadRequest]) -> list[float]:
        self.batches.append((model, [ask.number for ask in batch]))
        return [1.0 + 0.5 * place for place in range(len(batch))]


def test_whoever_waits_longest_is_next_and_takes_those_of_its_model_along() -> None:
    engine = _Engine()
    asks = _asks((0.0, "a"), (0.1, "b"), (0.2, "a"), (0.3, "b"), (0.4, "a"))
    made = provision(asks, lambda model: 10.0, engine.run, most=16)
    # at time 0 only a is there; b's swap ends at 11; a is loaded again at 22.5
    assert engine.batches == [("a", [0]), ("b", [1, 3]), ("a", [2, 4])]
    assert [answer.ended for answer in made.answers] == [1.0, 12.0, 23.5, 12.5, 24.0]
    assert (made.swaps, made.ran) == (2, 1.0 + 1.5 + 1.5)


def test_those_who_come_during_a_swap_go_along_and_a_batch_has_an_end() -> None:
    engine = _Engine()
    asks = _asks((0.0, "a"), (0.5, "b"), (5.0, "b"), (6.0, "b"))
    made = provision(asks, lambda model: 10.0, engine.run, most=2)
    assert engine.batches == [("a", [0]), ("b", [1, 2]), ("b", [3])]
    assert made.swaps == 1  # the second batch finds its model loaded
    assert [answer.e2e for answer in made.answers] == [1.0, 11.5, 7.5, 7.5]


def test_an_idle_engine_waits_for_whoever_comes() -> None:
    made = provision(_asks((3.0, "a"), (9.0, "a")), lambda model: 10.0, _Engine().run, most=16)
    assert [answer.ended for answer in made.answers] == [4.0, 10.0]
    assert summarize(made.answers, Slo())["tokens_per_second"] == pytest.approx(8 / 10.0)
    assert provision([], lambda model: 1.0, _Engine().run, most=1).answers == ()


def test_answers_of_which_only_the_end_is_known_count_from_when_they_were_due() -> None:
    first, second = answered(_asks((0.0, "a"), (2.0, "a")), [1.5, 2.25])
    assert (first.e2e, second.e2e, second.tokens, second.tpot) == (1.5, 0.25, 4, None)


def test_the_family_has_twenty_models_and_every_base_stands_before_its_own() -> None:
    family = members()
    names = [one.name for one in family]
    assert len(set(names)) == 20
    assert Counter((one.kind, one.base) for one in family) == {
        ("foundation", None): 2,
        ("full", "small-base"): 6,
        ("lora", "small-base"): 8,
        ("full", "small-wide"): 2,
        ("lora", "small-wide"): 2,
    }
    assert all(one.base is None or names.index(one.base) < names.index(one.name) for one in family)
    order = by_popularity(family, 0)
    assert sorted(order) == sorted(names) and order == by_popularity(family, 0) != by_popularity(family, 1)


def test_an_order_says_everything_per_request_or_once() -> None:
    assert wanted_of({"prompts": [[5], [6]], "tokens": 3}) == [Wanted([5], 3), Wanted([6], 3)]
    order = {"prompts": [[5], [6]], "tokens": [3, 4], "models": ["a", "b"], "at": [0.0, 0.5]}
    assert wanted_of(order) == [Wanted([5], 3, "a", 0.0), Wanted([6], 4, "b", 0.5)]
    with pytest.raises(ValueError, match="argument"):
        wanted_of({"prompts": [[5], [6]], "tokens": [3]})


def test_our_side_answers_with_the_model_that_is_asked_for_and_not_before_it_is_asked(tmp_path: Path) -> None:
    make("llama", tmp_path / "base")
    make_lora(tmp_path / "base", tmp_path / "lora")
    with Zoo(tmp_path / "store") as store:
        store.ingest(tmp_path / "base", "base")
        store.ingest(tmp_path / "lora", "lora", "base")
    what = [str(tmp_path / "store"), "base", "lora"]
    answer = zoo(argparse.Namespace(what=what, threads=1, kv_cache_memory_bytes=4 << 20, dtype="float32"))
    alone = {model: answer([Wanted([5, 6, 7], 6, model)])[0].tokens for model in ("base", "lora")}
    assert alone["base"] != alone["lora"] and len(alone["base"]) == 6

    made: list[Made] = answer([Wanted([5, 6, 7], 6), Wanted([5, 6, 7], 6, "lora"), Wanted([5, 6, 7], 3, "base", 0.2)])
    assert [one.tokens for one in made] == [alone["base"], alone["lora"], alone["base"][:3]]
    assert made[2].ended > max(made[0].ended, made[1].ended)
    with pytest.raises(RuntimeError, match="failed"):
        answer([Wanted([10**6], 2)])
