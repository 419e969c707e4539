"""What decode admission, the choice of a decode device and changes of roles gain, in small (TI-14, TI-22, TI-24)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from benchmarks.simulated.tetri_chats import chatted, turns
from benchmarks.simulated.tetri_decode import CHAT, KNOWLEDGE, LONG, SPREADS, DecodeRun, decoded, main, scenario
from benchmarks.simulated.tetri_decode import demand as lengths_of
from benchmarks.simulated.tetri_flips import SETTINGS, shifted
from benchmarks.simulated.tetri_prefixes import demand, served
from benchmarks.simulated.tetri_workloads import WorkloadRun, beside, mean_beside
from benchmarks.simulated.tetri_workloads import run as run_workload
from runtime.sim.cost.hardware import LINKS
from runtime.sim.experiments.run import assemble


def run(rule: str, known: str) -> DecodeRun:
    lengths: Mapping[str, Any] = {**KNOWLEDGE[known], "seed": 1}
    return decoded(0, 200, 8.0, 1, LONG, decode={"admission": rule}, lengths=lengths)


def test_peak_reservation_preempts_least() -> None:
    """Must not preempt where lengths are known, and less than the paper's rules where they are predicted."""
    assert run("peak", "exact").preemptions == 0
    peak, static, dynamic, greedy = (run(rule, "predicted") for rule in ("peak", "static", "dynamic", "greedy"))
    assert peak.preemptions < min(static.preemptions, dynamic.preemptions)
    assert static.preemptions < greedy.preemptions and peak.mean < greedy.mean


def test_peak_reservation_keeps_answers_going_where_first_tokens_have_deadlines() -> None:
    """The aim: more than 1.15 times as many good requests as with the better of the paper's rules."""

    def due(rule: str) -> DecodeRun:
        lengths = {**KNOWLEDGE["predicted"], "seed": 1}
        settings = {"decode": {"admission": rule}, "lengths": lengths}
        return decoded(0, 200, 3.2, 1, CHAT, 10_000, order="qlm", **settings)

    peak, static, dynamic = (due(rule) for rule in ("peak", "static", "dynamic"))
    assert peak.preemptions < 0.25 * min(static.preemptions, dynamic.preemptions)
    assert peak.good > 1.15 * max(static.good, dynamic.good) and peak.halted < 0.5 * static.halted


@pytest.mark.parametrize("pool", [10_000, 2_000])
def test_a_device_holds_as_many_tokens_as_asked_for(pool: int) -> None:
    made = scenario(0, pool=pool)
    nodes = assemble(made, made.policies["decode"]).nodes.values()
    assert [node.engine.page_capacity * 16 for node in nodes] == [pool]


def test_a_grid_has_all_cases_and_answers_as_heavy_as_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    answers = lengths_of("opt-13b", 2_000, 0.0, 0, SPREADS["few heavy"]).answer[200:]
    assert (answers > 200).mean() == pytest.approx(0.3 * 0.986 + 0.7 * 0.054, abs=0.03)
    given = ["--seeds", "1", "--requests", "20", "--known", "predicted", "--rules", "peak", "--pool", "2000"]
    assert main(["admission", *given, "--clients", "2", "4"]) == 0
    heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lengths")]
    assert heads == [f"lengths long, pool 2000, rate 5.0, clients {clients}, order off" for clients in (2, 4)]


def test_two_choices_are_no_worse_than_one_and_any_is_better_than_the_worst() -> None:
    def mean(choice: str) -> float:
        lengths = {**KNOWLEDGE["predicted"], "seed": 0}
        return decoded(4, 128, 0.0, 0, decode={"choice": choice}, lengths=lengths).mean

    po2, random, worst = mean("po2"), mean("random"), mean("worst")
    assert po2 <= random * 1.01 and random * 1.2 < worst


def test_prefixes_that_are_there_are_sent_less_often_in_the_same_time() -> None:
    """Each device that decodes gets the prompts of which it has the beginning, unless it is busier."""
    asked = demand(120, 6.0, 16, 400, 0)
    for rule in ("load", "po2"):
        plain, counted = (served(asked, 4, 0, "25gbps", choice=rule, present_margin=margin) for margin in (0.0, 0.1))
        assert counted.moved < 0.95 * plain.moved and counted.present > plain.present
        assert counted.mean < 1.03 * plain.mean and counted.preemptions == plain.preemptions == 0


def test_roles_that_follow_the_load_suit_both_loads() -> None:
    fixed, spare = (shifted(SETTINGS[name], 4.0, 2, 0) for name in ("2 prefill, 1 decode", "spare"))
    assert spare.changes == 1 and fixed.changes == 0
    assert spare.mean_answers < 0.8 * fixed.mean_answers
    assert spare.mean_long == pytest.approx(fixed.mean_long, rel=0.05)


def test_separate_devices_gain_most_where_answers_are_long_and_least_where_prompts_are() -> None:
    """Both definitions of perf/$ are printed; the paper's gives its printed values from its own changes (TI-28)."""
    gains = {name: mean_beside({each: [run_workload(name, each, 48, 0)] for each in ("vllm", "roce")}, "roce")
             for name in ("LPHD", "HPLD")}  # fmt: skip
    assert gains["HPLD"]["perf_paper"] < 0.8 * gains["LPHD"]["perf_paper"]
    assert gains["HPLD"]["resources"] > 0 > gains["LPHD"]["resources"] and gains["LPHD"]["first"] < -80
    base = WorkloadRun(1.0, 10.0, 1.0, 10.0)
    found = beside(WorkloadRun(0.15, 5.0, 1.0, 7.9), base)  # the paper's mixed workload
    assert found["perf_paper"] == pytest.approx(1.9, abs=0.01) and found["perf_usual"] == pytest.approx(2.53, abs=0.01)


def test_emulated_links_take_the_papers_times() -> None:
    """K and V of 512 tokens of OPT-13B are 419.4 MB (TI-17)."""
    nbytes = 2 * 40 * 5120 * 2 * 512
    assert nbytes == 419_430_400
    times = [LINKS[name].busy_ns(nbytes) / 1e6 for name in ("ts-roce", "ts-nvlink")]
    assert times == [pytest.approx(16.8, abs=0.03), pytest.approx(1.40, abs=0.003)]


def test_next_turns_of_chats_come_sooner_where_they_run_locally() -> None:
    """UN-18: each turn is handed off or runs locally; with fewer bytes sent, first tokens come sooner."""
    demand = turns(40, 0.5, 0)
    apart, local = chatted(0, demand), chatted(256, demand)
    assert apart.local == 0 and apart.handoffs == local.handoffs + local.local
    assert local.local > local.handoffs and local.moved < apart.moved / 2
    assert local.first < apart.first and local.gap_worst < 1.2 * apart.gap_worst
