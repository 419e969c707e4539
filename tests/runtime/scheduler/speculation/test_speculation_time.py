"""Speculating on the slowest hop gains in virtual time what `policy.speculation.choice.chain_time` computes."""

from __future__ import annotations

import pytest

from runtime.agent.steps.queue import Lane
from runtime.chains import Surrogate
from runtime.config import ClusterConfig, SpeculationConfig
from runtime.engine.fakes.integer_model import counting_model, surrogate_of
from runtime.policy.speculation.choice import chain_time
from runtime.types import StepPlan
from tests.runtime.policy.figure15 import figure_15
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2 3* 4* 5 6* 7 8")
CUT, MIDDLE = (2, 5), 4
#: Milliseconds of the three hops, and of the second hop's stand-in.
HOPS, STAND_IN = (2, 10, 3), 1
OWN: tuple[Lane, ...] = ("real", "ahead")
TOKENS = 20


def costs(plan: StepPlan) -> int:
    """Return the time of a step by the stages of its rows; a prompt row costs as much as any other."""
    stages = {row.model for row in plan.rows}
    took = {"m[0:2]": HOPS[0], "m[2:5]": HOPS[1], "m[5:8]": HOPS[2], "m~[2:5]": STAND_IN}
    return sum(took[stage] for stage in stages) * MS


def times(misses: int | None, mode: str = "exact", lanes: tuple[Lane, ...] = OWN) -> tuple[VirtualCluster, list[float]]:
    """Run one request; return the cluster and when each token came, in milliseconds since the request.

    `misses` None: without a stand-in.
    """
    config = ClusterConfig(
        devices=3, placement="partition", speculation=SpeculationConfig(mode if misses is not None else "off")
    )  # type: ignore[arg-type]
    cluster = VirtualCluster(
        [M],
        [CUT],
        devices=3,
        config=config,
        latency=1,
        costs=costs,
        lanes=lanes,
        stand_ins=[surrogate_of(M, "m~", MIDDLE, misses or 0)],
        surrogates={"m": [Surrogate("m~", MIDDLE, MIDDLE + 1, 1)]},
    )
    cluster.scheduler.speculation.pin([(M.chain(*CUT).uses[1].block, f"d{at}") for at in range(3)])
    cluster.ask(request("warm", (1,), "m", max_tokens=1))
    cluster.ask(request("a", (1, 2, 3), "m", max_tokens=TOKENS), at=100 * MS)
    cluster.run()
    cluster.expect()
    told = [event.t for event in cluster.trace.named("token") if event.seq == "a"]
    return cluster, [round((when - 100 * MS) / MS, 2) for when in told]


def test_a_pass_takes_what_the_policy_says() -> None:
    """The first token takes one pass through the chain: with the prediction right, wrong, and without one."""
    stand_ins, checks = (0.0, STAND_IN, 0.0), (0.0,) * 3
    for misses, wrong in ((0, ()), (1, (1,))):
        _, told = times(misses)
        assert told[0] == chain_time(HOPS, stand_ins, checks, (1,), wrong)
    assert times(None)[1][0] == chain_time(HOPS, stand_ins, checks, ())


def test_an_answer_takes_the_slowest_hops_time_per_token() -> None:
    """A guess sends the next row to the slowest hop before that is done, so this hop never waits.

    Exact tokens take 10 ms each instead of 15; on one stream the stand-in's time adds to it: 11 ms.
    """

    def per_token(told: list[float]) -> float:
        return round((told[-1] - told[0]) / (TOKENS - 1), 1)

    assert per_token(times(None)[1]) == sum(HOPS)
    assert per_token(times(0)[1]) == HOPS[1]
    assert per_token(times(0, lanes=("all",))[1]) == HOPS[1] + STAND_IN


def test_wrong_predictions_cost_time_and_nothing_else() -> None:
    """With all predictions wrong, tokens are late only by the time of superseded rows."""
    cluster, told = times(1)
    _, plain = times(None)
    assert cluster.scheduler.speculation.counts().misses > 0
    assert plain[-1] <= told[-1] <= plain[-1] + TOKENS * HOPS[1]


@pytest.mark.parametrize(("wrong", "gain"), [((0,), "some"), ((2,), "none")])
def test_figure_15(wrong: tuple[int, ...], gain: str) -> None:
    """With one hop of three speculated, the first token's time lies between the figure's T2 and T6."""
    figure = figure_15(HOPS, (STAND_IN,) * 3, (0.0,) * 3, wrong)
    assert (figure.gain > 0) == (gain == "some")
    first = {misses: times(misses)[1][0] for misses in (None, 0, 1)}
    assert figure.ideal < first[0] < figure.none == first[None] == first[1]
