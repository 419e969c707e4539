"""Rows that an engine defers wait unchanged at the head of their queue, and lose no token and no page."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.chains import Array, StageResult
from runtime.engine.fakes.integer_model import expected
from runtime.messages import LoadStages
from runtime.types import StepPlan
from tests.runtime.agent.counted import CountedDevice
from tests.runtime.agent.test_credit import MODEL, OTHER, answer, ask
from tests.runtime.engine.driven import Driven, Limits, name_of


class Scripted(CountedDevice):
    """An engine that defers the scripted sequences, step by step."""

    def __init__(self, *off: str, **options: Any) -> None:
        super().__init__((MODEL, OTHER), 200, **options)
        self._script = list(off)
        self._puts_off = random.Random(0)
        self._puts_off.sample = self._chosen  # type: ignore[method-assign, assignment]

    def _chosen(self, rows: Any, _count: int) -> list[Any]:
        off = self._script.pop(0) if self._script else ""
        return [row for row in rows if name_of(row.seq) in off.split()]


def plans(made: Driven) -> list[list[tuple[str, int, int]]]:
    return [
        [(name_of(row.seq), row.start, len(row.tokens)) for row in plan.rows] for plan in made.out.plans if plan.rows
    ]


def play(engine: CountedDevice, *asked: Any, **limits: Any) -> Driven:
    made = Driven(engine, Limits(**limits))
    for one in asked:
        made.arrive(one)
    while made.busy:
        assert made.step()
    made.end()
    return made


def test_they_come_first_and_in_their_order() -> None:
    """Rows that arrive meanwhile come after the deferred ones."""
    asked = [ask(seq, (number, 5), 6, ignore_eos=True) for number, seq in enumerate("abcd")]
    made = play(Scripted("", "b d", "a b"), *asked)
    assert ["".join(seq for seq, _, _ in rows) for rows in plans(made)][:4] == ["abcd", "abcd", "bdac", "badc"]
    for one in asked:
        assert made.out.tokens(one.seq) == answer(one)


def test_they_come_before_those_that_have_waited_meanwhile() -> None:
    """From the third step on two rows fit a block: the deferred a runs before c and d, which wait for their turn."""
    asked = [ask(seq, (number,), 8, ignore_eos=True) for number, seq in enumerate("abcd")]
    made = Driven(Scripted("", "", "a"))
    for one in asked:
        made.arrive(one)
    made.step()
    made.step()
    made.agent.handle(LoadStages((), (), ((MODEL.chain().uses[0].block, 2),)), (), made.now)
    while made.busy:
        assert made.step()
    made.end()
    assert ["".join(seq for seq, _, _ in rows) for rows in plans(made)][:4] == ["abcd", "abcd", "ab", "ac"]
    for one in asked:
        assert made.out.tokens(one.seq) == answer(one)


def test_a_part_of_a_prompt_is_whole_again() -> None:
    """With a budget of 6 beside a decode, a prompt's chunk of 5 tokens is deferred; alone, it fills the step."""
    short, long = ask("s", (1,), 2, ignore_eos=True), ask("l", range(12), 2, ignore_eos=True, prompt_logprobs=1)
    made = play(Scripted("l", "l"), short, long, max_num_batched_tokens=6)
    rows = [(start, count) for step in plans(made) for seq, start, count in step if seq == "l"]
    assert rows == [(0, 5), (0, 5), (0, 6), (6, 6), (12, 1)]
    assert made.out.tokens("l") == answer(long)
    scores = [one.token for event in made.out.events["l"] for part in event.prompt_logprobs for one in part.chosen]
    assert scores == list(range(1, 12))


def test_what_is_put_off_has_its_pages_and_is_told_of_once() -> None:
    made = play(Scripted("a", "a", "a"), ask("a", range(9), 3, ignore_eos=True), ask("b", (3,), 9, ignore_eos=True))
    groups = [len(row.new_pages) for plan in made.out.plans for row in plan.rows if name_of(row.seq) == "a"]
    assert groups[:4] == [3, 0, 0, 0]
    assert [one.request.seq for plan in made.out.plans for one in plan.opened if name_of(one.request.seq) == "a"] == [
        "a#1@0"
    ]


class _Liar(CountedDevice):
    """An engine that reports as deferred the rows named in `off`, or all rows."""

    off: tuple[str, ...] = ()

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        told = super().run(plan, inputs)
        return replace(told, result=replace(told.result, deferred=self.off or tuple(row.seq for row in plan.rows)))


def test_an_engine_that_puts_off_strangers_or_everybody_has_failed() -> None:
    for off in ((), ("nobody",)):
        engine = _Liar((MODEL,), 200)
        engine.off = off
        made = Driven(engine)
        made.arrive(ask("a"))
        made.arrive(ask("b"))
        made.step()
        assert {events[-1].finish for events in made.out.events.values()} == {"error"}


@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 1000))
def test_whoever_is_put_off_gets_exactly_its_tokens(data: st.DataObject, seed: int) -> None:
    asked = []
    for number in range(data.draw(st.integers(1, 7))):
        prompt = data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=14))
        how = dict(max_tokens=data.draw(st.integers(0, 12)), ignore_eos=data.draw(st.booleans()))
        asked.append(ask(f"s{number}", prompt, model=data.draw(st.sampled_from("mn")), **how))
    due = {one.seq: data.draw(st.integers(0, 9)) for one in asked}
    limits = Limits(data.draw(st.integers(2, 20)), data.draw(st.integers(1, 7)), 0.0)
    engine = CountedDevice((MODEL, OTHER), data.draw(st.integers(20, 70)), puts_off=random.Random(seed))
    made, step = Driven(engine, limits, "off", data.draw(st.integers(1, 4))), 0
    while made.busy or step <= 9:
        for one in asked:
            if due[one.seq] == step:
                made.arrive(one)
        made.step()
        step += 1
        assert step < 3000
    made.end()
    for one in asked:
        model = MODEL if one.model == "m" else OTHER
        assert made.out.tokens(one.seq) == expected(model, one.prompt, one.sampling)
