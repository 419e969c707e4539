"""An engine that puts rows off: nobody loses a token or a page by waiting, and a result that puts off too much is
refused.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from runtime.engine.fakes.fake import FakeEngine, answer
from runtime.types import Row, StepPlan, StepResult
from tests.runtime.agent.helpers import agent_with
from tests.runtime.agent.test_runs import MODELS, Load, check_quiet, fits, loads
from tests.runtime.virtual import Virtual, request


class Choosy(FakeEngine):
    """Runs some of the rows, at least one. Pages that a row got while it waited are its own, and taken as far as it
    runs then.
    """

    def __init__(self, pages: int, seed: int) -> None:
        super().__init__(MODELS, pages, alpha=100, beta=10)
        self._random = random.Random(seed)
        self._page_tokens = {one.name: one.page_tokens for one in MODELS}
        self._given: dict[str, list[tuple[int, ...]]] = {}
        self._taken: Counter[str] = Counter()

    def execute(self, plan: StepPlan) -> StepResult:
        for seq in plan.released:
            self._given.pop(seq, None)
            del self._taken[seq]
        off = set(self._random.sample([row.seq for row in plan.rows], self._random.randrange(max(1, len(plan.rows)))))
        for row in plan.rows:
            self._given.setdefault(row.seq, []).extend(row.new_pages)
        rows = tuple(self._with_pages(row) for row in plan.rows if row.seq not in off)
        return replace(super().execute(replace(plan, rows=rows)), deferred=tuple(off), idle=3)

    def _with_pages(self, row: Row) -> Row:
        count = -(-(row.start + len(row.tokens)) // self._page_tokens[row.model]) - self._taken[row.seq]
        self._taken[row.seq] += count
        pages = self._given[row.seq]
        taken, pages[:] = tuple(pages[:count]), pages[count:]
        return structs.replace(row, new_pages=taken)


@settings(max_examples=150, deadline=None)
@given(loads(disturbed=False), st.integers(0, 1000))
def test_who_is_put_off_gets_exactly_its_tokens(load: Load, seed: int) -> None:
    virtual = Virtual(Choosy(load.pages, seed), load.config)
    for time, one in load.arrivals:
        virtual.arrive(one, time)
    virtual.run()
    for _, one in load.arrivals:
        if fits(virtual, one):
            assert virtual.told[one.seq].tokens == answer(virtual.agent.models[one.model], one.prompt, one.sampling)
    check_quiet(virtual)
    counters = virtual.agent.state().counters
    assert counters.idle_tokens >= 3 * counters.steps


def test_a_result_that_puts_off_strangers_or_everybody_is_refused() -> None:
    agent = agent_with(request("a"), request("b"))
    plan = agent.next_step(0)
    assert plan is not None
    for deferred in (("a", "b"), ("c",)):
        with pytest.raises(ValueError, match="put off"):
            agent.finish_step(StepResult(plan.step, (), deferred=deferred), 0)
    assert len(agent.fail_step("enough", 0)) == 2
