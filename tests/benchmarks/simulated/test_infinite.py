"""Infinite-LLM's figures on the simulator, one small point of each; without loans they do not come out."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulated.infinite import datasets
from benchmarks.simulated.infinite.attention import in_parts, lines, remote
from benchmarks.simulated.infinite.contexts import batch_rate
from benchmarks.simulated.infinite.migration import HOLDS, PROMPT, SETUP, outgrown, usable
from benchmarks.simulated.infinite.over_time import timed
from benchmarks.simulated.infinite.setups import LONG, SETUPS, START, SYSTEMS, Setup, dataset
from runtime.sim.experiments.run import assemble, play
from runtime.sim.models.shapes import SHAPES

FEW = {"prefill_chunk": 16_384, "max_num_batched_tokens": 16_384}


@pytest.mark.parametrize("setup", SETUPS.values(), ids=list(SETUPS))
def test_instances_hold_normal_requests_of_the_datasets_that_the_paper_made_for_one(setup: Setup) -> None:
    """Table 2: where `normal` is what one instance holds, and where it needs loans from the start."""
    for system in SYSTEMS:
        made = setup.scenario(system)
        simulation = assemble(made, made.policies[system])
        tokens = [node.engine.page_capacity * setup.page_tokens for node in simulation.nodes.values()]
        assert len(tokens) == (1 if system == "together" else setup.instances)
        assert sum(tokens) > 2 * setup.normal
    alone = setup.name in ("7B, 2", "13B, 4", "70B, 8")
    assert (setup.normal <= setup_holds(setup)) == alone


def setup_holds(setup: Setup) -> int:
    made = setup.scenario("alone")
    node = next(iter(assemble(made, made.policies["alone"]).nodes.values()))
    return node.engine.page_capacity * setup.page_tokens


def test_datasets_have_their_shares_and_ranges() -> None:
    for long in LONG:
        prompts, answers = dataset(SETUPS["13B, 4"], long, 1000, 0)
        context = np.array(prompts) + np.array(answers)
        assert (context > 140_000).sum() == round(1000 * long) and context.max() <= 280_000 and context.min() >= 1
        assert min(prompts) >= 1 and min(answers) >= 1 and max(answers) <= 256
    assert dataset(SETUPS["13B, 4"], 0.1, 50, 1) != dataset(SETUPS["13B, 4"], 0.1, 50, 2)


@pytest.mark.parametrize("mode", ["planned", "off"])
def test_figure_7_a_context_of_19_instances_is_served_by_32_that_lend(mode: str) -> None:
    setup = SETUPS["7B, 32"]
    context = 19 * setup_holds(setup)
    demand = setup.demand("lent", [context - 4], [4])
    ledger = play(setup.scenario("lent", lending={"mode": mode, "cap": 1.0}, **FEW), "lent", demand).ledger
    served = not ledger.errors and ledger.tokens[-1] == 4
    assert served == (mode == "planned") and context > 2 * setup.normal


def test_figure_7_loans_cost_nothing_where_none_are_needed() -> None:
    setup = SETUPS["7B, 2"]
    lent, alone, together = (batch_rate(setup, system, 50_000) for system in SYSTEMS)
    assert lent is not None and alone is not None and together is not None
    assert (lent.requests, lent.prompts, lent.decoded) == (alone.requests, alone.prompts, alone.decoded)
    assert lent.lent == 0 and lent.prompts > together.prompts, "no sums over devices"
    longer, refused = (batch_rate(setup, system, 150_000) for system in ("lent", "alone"))
    assert longer is not None and longer.lent > 0 and refused is None


def test_figure_8_the_gain_falls_with_the_share_of_long_requests() -> None:
    setup = SETUPS["7B, 2"]
    gains = {}
    for long in (0.01, 0.3):
        lent, together = (datasets.run(setup, system, long, 24, 0) for system in datasets.COMPARED)
        assert lent.refused == together.refused == 0 and lent.loans > 0
        gains[long] = lent.rate / together.rate
    assert gains[0.01] > 1.05 * gains[0.3]
    assert datasets.run(setup, "alone", 0.3, 24, 0).refused == pytest.approx(0.3, abs=0.05)


def test_figure_9_a_request_outgrows_its_instance() -> None:
    one = outgrown(4_000)
    assert one.reloaded - one.copied == pytest.approx(one.overhead, abs=0.05)
    assert one.overhead > 13.5 and one.lent > 0 < one.sent
    slow = outgrown(4_000, 20e6)
    assert slow.overhead - one.overhead == pytest.approx(SHAPES[SETUP.model].nbytes * (1 / 20e6 - 1 / 1e9))
    assert slow.reloaded > 2 * slow.lent, "the paper's direction, at a download of 20 MB/s"


def test_figure_9_without_loans_the_answer_ends_at_the_instances_limit() -> None:
    demand = SETUP.demand("alone", [PROMPT], [4_000])
    ledger = play(SETUP.scenario("alone", usable=usable()), "alone", demand).ledger
    assert HOLDS - PROMPT <= ledger.tokens[-1] < HOLDS - PROMPT + 2 * SETUP.page_tokens
    assert ledger.first[-1] > START


def test_figure_11_parts_add_a_constant() -> None:
    extra = [in_parts("llama-13b", context) for context in (50_000, 200_000, 800_000)]
    assert len({round(each.parts - each.whole) for each in extra}) == 1
    assert 0.05 < extra[1].overhead < 0.10 and extra[0].overhead > extra[1].overhead > extra[2].overhead


def test_figure_12_pulling_grows_with_what_is_lent() -> None:
    for model in ("llama-13b", "llama2-70b"):
        near, far = (remote(model, lent, "nvlink3") for lent in (1, 65_536))
        assert near.pulled < near.remote, "for a few tokens latency decides"
        assert far.pulled > 4 * far.remote
    assert len(list(lines())) == 11


def test_figure_10_circles_are_resolved_where_that_is_on() -> None:
    stay, resolved = (timed(policy, 18, 0.3, 2) for policy in ("circles stay", "circles resolved"))
    assert stay.circles == stay.recalled == 0 and resolved.circles > 0 < resolved.recalled
    assert len(stay.rates) == 2 and min(*stay.rates, *resolved.rates) > 0
