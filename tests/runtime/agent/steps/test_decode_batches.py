"""A persistent batch takes the same steps as its rows would one by one, whether or not steps are prepared."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.agent.agent import Agent
from runtime.chains import Array, Stacked, StageResult
from runtime.config import AgentConfig, ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import CloseSequences, ForwardRows, RunRows
from runtime.types import StepPlan, StepResult
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2* 3*", page_tokens=4, max_model_len=4096)
CUT = (1, 2)


class Logged(IntegerEngine):
    """An engine that records its steps."""

    def __init__(self, log: list[Any], pages: int, device: str) -> None:
        super().__init__([M], pages, device=device)
        self._log = log

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        self._log.append(
            (self.device, replace(plan, batch=0), {name: bytes(array.data) for name, array in inputs.items()})
        )
        return super().run(plan, inputs)


class Unnumbered:
    """A replacement of `BatchNumbers` with which no batch is persistent."""

    def number(self, *columns: Any) -> int:
        return 0


def logged(seed: int, prepares: bool, numbered: bool = True) -> tuple[VirtualCluster, list[Any]]:
    """Run a random schedule of arrivals, aborts, moves and few pages; return the cluster and its steps."""
    rng, log = random.Random(seed), list[Any]()
    pages, devices = rng.choice((14, 24, 80)), rng.choice((2, 3))
    cluster = VirtualCluster(
        [M], [CUT], devices=devices, make_engine=lambda name: Logged(log, pages, name), prepares=prepares,
        latency=rng.choice((1, 50)) * MS // 100, config=ClusterConfig(devices=devices, placement="partition"),
        agent_config=AgentConfig(recompute_chunk=8, fetch_window=1, page_timeout_ms=rng.choice((20, 2000))),
    )  # fmt: skip
    if not numbered:
        cluster.scheduler._state.out._numbers = Unnumbered()  # type: ignore[assignment]
    for number in range(rng.randrange(2, 7)):
        prompt = [rng.randrange(90) for _ in range(rng.randrange(1, 9))]
        cluster.ask(
            request(f"r{number}", prompt, "m", max_tokens=rng.randrange(2, 24)),
            at=rng.choice((0, 0, rng.randrange(40 * MS))),
        )
    if rng.random() < 0.3:
        cluster.abort("r0", at=rng.randrange(30 * MS))
    for _ in range(rng.choice((0, 0, 2))):
        cluster.at(rng.randrange(40 * MS), lambda: cluster.migrate_some(rng) and None)
    cluster.run()
    return cluster, log


@given(st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_steps_are_the_same_as_without(seed: int) -> None:
    (one, steps), (two, unprepared) = logged(seed, True), logged(seed, False)
    without, expected = logged(seed, False, numbered=False)
    assert steps == expected and unprepared == expected
    for each in (one, two):
        assert {seq: told.tokens for seq, told in each.told.items()} == {
            seq: told.tokens for seq, told in without.told.items()
        }
    assert not any(node.agent.reused_steps for node in without.living())


def steady(prepares: bool = True, rows: int = 4) -> VirtualCluster:
    """Return a cluster whose rows decode over three devices; the first receives tokens, the next ones hidden states."""
    cluster = VirtualCluster(
        [M], [CUT], devices=3, config=ClusterConfig(devices=3, placement="partition"), prepares=prepares
    )
    cluster.ask(*[request(f"r{number}", [number + 1] * (number + 1), "m", max_tokens=40) for number in range(rows)])
    return cluster


def test_most_steps_of_a_steady_batch_reuse_the_last_one_though_rows_need_pages() -> None:
    cluster = steady()
    cluster.run()
    cluster.expect()
    taken = {node.name: (node.agent.reused_steps, node.agent.report().steps) for node in cluster.living()}
    assert len(taken) == 3 and all(reused > 0.7 * steps for reused, steps in taken.values()), taken


def waiting_agent(place: int) -> Agent:
    """Return the agent of a device of a steady batch, between two steps."""
    cluster = steady()
    while min((node.agent.reused_steps for node in cluster.living()), default=0) < 5:
        cluster.run_one()
    agent = next(node.agent for node in cluster.living() if node.name == f"d{place}")
    while agent.busy:
        cluster.run_one()
    return agent


def following(agent: Agent) -> Any:
    """Return the message that continues the agent's batch, with tokens 7, 8 and so on."""
    agent.prepare()
    (batch,) = agent._batches._batches.values()
    rows, ones = batch.rows, (1,) * len(batch.rows)
    starts, generated = tuple(row.start for row in rows), tuple(row.generated for row in rows)
    sample = tuple(row.sample for row in rows)
    if rows[0].hop == 0:
        tokens = tuple(range(7, 7 + len(rows)))
        return RunRows(batch.seqs, batch.epochs, starts, ones, tokens, sample, generated, ones, batch=batch.number)
    hops = tuple(row.hop for row in rows)
    return ForwardRows(batch.seqs, batch.epochs, hops, starts, ones, sample, generated, batch=batch.number)


def columns(message: Any, change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Any:
    """Return the message with `change` applied to every column."""
    return msgspec.structs.replace(
        message,
        **{name: change(getattr(message, name)) for name in message.__struct_fields__ if name not in ("batch", "sent")},
    )


def hidden(count: int) -> Array:
    return Array("int64", (count, 1), bytes(8 * count))


@pytest.mark.parametrize(
    ("what", "place"),
    [
        *product(["expected", "shifted", "fewer", "again", "closed", "joined", "unnumbered"], [0, 2]),
        ("apart", 2),
    ],
)
def test_a_message_that_does_not_continue_its_batch_goes_the_usual_way(what: str, place: int) -> None:
    """Its rows run, or not, as where no batch is kept: the batch number alone is not trusted."""
    agent = waiting_agent(place)
    message, before = following(agent), agent.reused_steps
    count = len(message.seqs)
    arrays, runs = [] if place == 0 else [hidden(count)], set(message.seqs)
    if what == "shifted":
        message = columns(message, lambda column: (*column[1:], *column[:1]))
    elif what == "fewer":
        message = columns(message, lambda column: column[1:])
        arrays, runs = [] if place == 0 else [hidden(count - 1)], set(message.seqs)
    elif what == "again":
        message = msgspec.structs.replace(message, starts=tuple(start - 1 for start in message.starts))
    elif what == "apart":
        arrays = [hidden(1) for _ in range(count)]
    elif what == "unnumbered":
        message = msgspec.structs.replace(message, batch=0)
    elif what == "closed":
        agent.handle(CloseSequences((message.seqs[1],), (message.epochs[1],)), (), 0)
        runs.discard(message.seqs[1])
    agent.handle(message, arrays, 1)
    if what == "joined":
        agent.handle(columns(message, lambda column: column[:1]), [] if place == 0 else [hidden(1)], 1)
    step = agent.next_step(2)
    assert step is not None and agent.reused_steps == before + (what == "expected")
    assert {row.seq.split("#")[0] for row in step.plan.rows} == runs
    assert len(step.plan.rows) == len(runs)
    starts = dict(zip(message.seqs, message.starts, strict=True))
    assert all(row.start == starts[row.seq.split("#")[0]] for row in step.plan.rows)
    if place == 0:
        tokens = dict(zip(message.seqs, message.tokens, strict=True))
        assert all(row.tokens == (tokens[row.seq.split("#")[0]],) for row in step.plan.rows)


def test_what_waits_elsewhere_is_said_first_and_once() -> None:
    cluster = steady()
    middle = None
    while middle is None:
        cluster.run_one()
        middle = next(
            (
                node
                for node in cluster.living()
                if node.agent.reused_steps > 3 and node.agent._batches._running is not None
            ),
            None,
        )
        if middle is not None and middle.agent._batches._running.onward is None:
            middle = None
    agent = middle.agent
    plan, rows = agent._steps.oldest_step("all")
    whole = Array("int64", (len(rows), 1), bytes(8 * len(rows)))
    result = StageResult(StepResult(plan.step, (), (), (), 1), Stacked([row.seq for row in plan.rows], whole))
    assert agent.first(StageResult(StepResult(plan.step + 1, (), (), (), 1), result.outputs), 3) is None, (
        "of another step"
    )
    first = agent.first(result, 3)
    assert (
        first is not None and first.message.seqs == tuple(row.sequence.seq for row in rows) and first.arrays == (whole,)
    )
    assert agent.first(result, 4) is None
    assert agent.finish_step(result, 5) == []


def test_rows_of_a_batch_are_due_back_like_others() -> None:
    """A step waits a moment for rows that are due back, whichever way they left."""
    cluster = VirtualCluster(
        [M], [(1, 2)], devices=1, agent_config=AgentConfig(batch_wait_us=2000), config=ClusterConfig(devices=1)
    )
    cluster.ask(*[request(f"r{number}", [number + 1], "m", max_tokens=30) for number in range(3)])
    due: list[int] = []
    while cluster._heap:
        cluster.run_one()
        due += [node.agent._round_trips.due for node in cluster.living() if node.agent.reused_steps > 5]
    assert max(due) == 3, "rows that left in one message are not waited for"
