"""Simulated devices attend to lent K and V for each other: what steps wait for, what creditors lose (IL-27, IL-29)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from runtime.chains import Stage
from runtime.sim.cost.hardware import GPUS, LINKS, ClusterHardware, ServerSpec
from runtime.sim.cost.loans import EXTRA_NS, LentWork, attending_ns, travel_ns
from runtime.sim.experiments.preset import LOADED, STILL
from runtime.sim.experiments.run import Played, assemble, play
from runtime.sim.experiments.scenario import Scenario, scenario_of
from runtime.sim.models.family import App, Cutting, family_of
from runtime.sim.models.shapes import SHAPES
from runtime.sim.run.clock import VirtualClock
from runtime.sim.run.engine import SimEngine
from runtime.sim.run.lenders import LenderTimes
from runtime.sim.run.network import Network
from runtime.sim.run.node import Node
from runtime.sim.workload.requests import Demand
from runtime.types import Row, SentAway, StepPlan
from zoo.errors import InputError

GPU, LLAMA = GPUS["A100-80GB"], SHAPES["llama-7b"]
FAMILY = family_of([App("llama-7b", "llama-7b", "foundation")], Cutting(parts=1, page_layers=32))
STAGE = Stage("llama-7b", 0, LLAMA.components)
#: Tokens of pages that one device has, about.
HERE = 111_000


class Rig:
    """Three engines on one server that reach each other, without a scheduler."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = Network(ClusterHardware((ServerSpec(GPU, 3),)))
        self.nodes: dict[str, Node] = {}
        for name in ("s0g0", "s0g1", "s0g2"):
            engine = SimEngine(name, GPU, FAMILY, 1000)
            engine.load(STAGE)
            self.nodes[name] = Node(None, engine, None, 0)  # type: ignore[arg-type]
        lenders = LenderTimes(self.clock, self.network, self.nodes)
        for node in self.nodes.values():
            node.engine.borrow(lenders)

    def step(self, device: str, rows: list[Row], away: Sequence[SentAway] = (), over: tuple[str, ...] = ()) -> int:
        plan = StepPlan(1, tuple(rows), (), over, place_changes=tuple(away))
        return self.nodes[device].engine.run(plan, {}).result.busy


@pytest.fixture
def rig() -> Rig:
    return Rig()


def row(start: int, count: int = 1, seq: str = "a") -> Row:
    return Row(seq, STAGE.id, (0,) * count, start)


def lent(first: int, last: int, creditor: str = "s0g1", seq: str = "a") -> SentAway:
    return SentAway(seq, creditor, 1, first, last)


def one_row(tokens: int, queries: int = 1) -> LentWork:
    made = LentWork(32)
    made.add_row(queries, tokens)
    return made


def test_a_step_takes_the_longer_of_both_parts(rig: Rig) -> None:
    short, long = rig.step("s0g0", [row(10_000)]), rig.step("s0g0", [row(70_000)])
    asks = travel_ns(LLAMA, one_row(60_000), LINKS["nvlink3"]) + attending_ns(LLAMA, one_row(60_000), GPU)
    here = long - short - attending_ns(LLAMA, one_row(50_000), GPU) + attending_ns(LLAMA, one_row(10_001), GPU)
    assert asks > here
    with_loan = rig.step("s0g0", [row(70_000)], [lent(0, 60_000)])
    assert with_loan == pytest.approx(short + asks - attending_ns(LLAMA, one_row(10_001), GPU) + 32 * EXTRA_NS, abs=40)
    # Most of it here: the creditor's part is hidden, but for the messages' own launches.
    few = Rig()
    hidden = few.step("s0g0", [row(100_000)], [lent(0, 10_000)])
    assert hidden == pytest.approx(few.step("s0g0", [row(90_000, seq="b")]) + 32 * EXTRA_NS, abs=40)


def test_two_creditors_attend_at_the_same_time(rig: Rig) -> None:
    one = rig.step("s0g0", [row(90_000)], [lent(0, 80_000)])
    rig = Rig()
    two = rig.step("s0g0", [row(90_000)], [lent(0, 40_000), lent(40_000, 80_000, "s0g2")])
    assert one - two == pytest.approx(attending_ns(LLAMA, one_row(40_000), GPU), rel=0.001)
    assert rig.nodes["s0g1"].attended == rig.nodes["s0g2"].attended > 0


def test_chunks_of_a_prompt_are_attended_to_by_pairs(rig: Rig) -> None:
    rig.step("s0g0", [row(80_000, 512)], [lent(0, 40_000)])
    assert rig.nodes["s0g1"].attended == round(attending_ns(LLAMA, one_row(40_000, 512), GPU))
    assert rig.network.inside.messages == 64 and rig.network.inside.nbytes > 32 * 512 * LLAMA.hidden * 6


def test_rows_that_decode_hide_what_creditors_take_and_chunks_do_not(rig: Rig) -> None:
    """As `engine.attention.away`: chunks of other rows come after the answers."""
    away = [lent(0, 60_000)]
    alone = rig.step("s0g0", [row(70_000)], away)
    decoding = Rig().step("s0g0", [row(70_000), row(40_000, seq="b")], away)
    assert decoding - alone < 1_000, "40,000 tokens are read meanwhile"
    chunk = rig.step("s0g0", [row(40_000, 512, seq="c")])
    beside = Rig().step("s0g0", [row(70_000), row(40_000, 512, seq="c")], away)
    waits = alone - rig.step("s0g0", [row(10_000, seq="d")])
    assert beside - chunk > 0.9 * waits > 10e6


def test_tokens_are_here_again_once_their_sequence_is_over(rig: Rig) -> None:
    before = rig.step("s0g0", [row(70_000)])
    rig.step("s0g0", [row(70_000)], [lent(0, 60_000)])
    assert rig.step("s0g0", [row(70_000, seq="b")]) == before
    assert rig.step("s0g0", [row(70_000)], over=("a",)) == before


def test_a_change_of_a_table_that_is_closed_since_is_not_of_the_next_one(rig: Rig) -> None:
    """A sequence that gives way behind its loan, and runs again: one plan has all three."""
    before = rig.step("s0g0", [row(70_000, seq="b")])
    assert rig.step("s0g0", [row(70_000)], [lent(0, 60_000)], over=("a",)) == before


def test_a_creditor_ends_its_step_later_and_does_one_thing_at_a_time(rig: Rig) -> None:
    idle, busy = rig.nodes["s0g2"], rig.nodes["s0g1"]
    busy.stepping["all"] = 5_000
    rig.step("s0g0", [row(70_000)], [lent(0, 60_000), lent(60_000, 65_000, "s0g2")])
    assert busy.debt == busy.attended > 0 == idle.debt
    assert idle.between == idle.attended, "a step that begins meanwhile is charged"
    first = Rig()
    alone = first.step("s0g0", [row(70_000)], [lent(0, 60_000)])
    beside = first.step("s0g2", [row(70_000)], [lent(0, 60_000)])
    assert alone < beside == pytest.approx(2 * attending_ns(LLAMA, one_row(60_000), GPU), abs=2)


def test_without_creditors_to_reach_a_step_with_loans_fails() -> None:
    engine = SimEngine("s0g0", GPU, FAMILY, 1000)
    engine.load(STAGE)
    with pytest.raises(ValueError, match="creditors"):
        engine.run(StepPlan(1, (row(70_000),), place_changes=(lent(0, 10),)), {})


# -- with the scheduler ------------------------------------------------------------------------------------------------


def scenario(devices: int = 2, **policy: Any) -> Scenario:
    values = {
        "parts": 1, "page_layers": 32, "page_tokens": 256, "max_model_len": 400_000, "control": STILL,
        "placement": "replicate", "prefix_caching": "off", "prefill_chunk": 2048, "max_num_batched_tokens": 2048,
    }  # fmt: skip
    return scenario_of(
        "loans",
        {
            "cluster": {"servers": [devices], "weights": 0.95},
            "apps": {"ladder": ["llama-7b"], "accuracy": [1.0]},
            "policies": {
                "off": values | policy,
                "planned": {**values, "lending": {"mode": "planned", "cap": 1.0}, **policy},
            },
        },
    )


def demand(*prompts: int, answer: int = 32) -> Demand:
    at = np.full(len(prompts), round(LOADED * 1e9))
    return Demand(("llama-7b",), at, np.zeros_like(at), np.array(prompts), np.full(len(prompts), answer))


def run(policy: str, *prompts: int, trace: Path | None = None) -> Played:
    return play(scenario(), policy, demand(*prompts), trace)


def test_a_context_longer_than_a_device_is_served_with_loans_only() -> None:
    assert next(iter(run("off", 150_000).ledger.errors)).startswith("its 150000 tokens need")
    played = run("planned", 150_000)
    assert played.ledger.reasons == {"length": 1} and played.counts["loans"] >= 1


def test_decoding_with_loans_is_charged_for_both_parts() -> None:
    """Two devices read one context: faster than one could, slower than half of it."""
    ledger = run("planned", 150_000).ledger
    per_token = (ledger.ended[0] - ledger.first[0]) / 31
    whole = attending_ns(LLAMA, one_row(150_000), GPU)
    rest = LLAMA.nbytes * 1e9 / (2039e9 * 0.8) + 32 * 60_000 + 500_000
    assert rest + 0.5 * whole < per_token < rest + 0.85 * whole


def test_pages_travel_over_the_link_before_they_are_lent(tmp_path: Path) -> None:
    played = run("planned", 150_000, trace=tmp_path / "trace")
    events = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    began = {each["loan"]: each for each in events if each["ev"] == "kv.lend.start"}
    held = [each for each in events if each["ev"] == "kv.lend"]
    assert held and played.counts["loan_bytes"] == sum(each["pages"] for each in held) * 256 * LLAMA.kv_bytes * 32
    for each in held:
        nbytes = each["pages"] * 256 * LLAMA.kv_bytes * 32
        assert each["t"] - began[each["loan"]]["t"] >= LINKS["nvlink3"].busy_ns(nbytes)


def test_the_same_run_gives_the_same_trace(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run("planned", 150_000, 30_000, 90_000, trace=tmp_path / name)
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()


def test_devices_in_place_of_dead_ones_lend_and_borrow_again() -> None:
    made = scenario()
    simulation = assemble(made, made.policies["planned"])
    simulation.run(
        demand(150_000).requests(), [(round((LOADED + 25) * 1e9), "s0g0"), (round((LOADED + 70) * 1e9), "s0g1")]
    )
    first, second = simulation.nodes["s0g0"], simulation.nodes["s0g1"]
    assert simulation.ledger.reasons == {"length": 1} and simulation.ledger.ended[0] > (LOADED + 100) * 1e9
    assert (first.life, second.life) == (1, 1) and first.steps > 0 and second.attended > 0


def test_lending_steps_token_by_token() -> None:
    assert scenario().policies["planned"].scheduler.stride == 1
    assert scenario().policies["off"].scheduler.stride > 1
    with pytest.raises(InputError, match="each token is a step"):
        scenario(strides=True)
    with pytest.raises(InputError, match="lending has no 'caps'"):
        scenario(lending={"caps": 1})
    with pytest.raises(InputError, match="a simulated page has all layers"):
        scenario(lending={"mode": "planned", "shape": "layers"})
