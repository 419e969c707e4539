"""Batches capped for urgent sequences in a virtual cluster: what is left out, for how long, and what it gains."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from runtime.config import ClusterConfig, OrderConfig
from runtime.engine.fakes.integer_model import counting_model
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2 3* 4", max_model_len=1024)


def step(plan: Any) -> int:
    """A millisecond per row: alone a token takes one, beside fifteen more sixteen."""
    return len(plan.rows) * MS


def cluster(cap: bool, places: int = 12, evict: bool = True, pages: int = 2000) -> VirtualCluster:
    config = ClusterConfig(max_num_seqs=places, order=OrderConfig("qlm", cap_batches=cap, evict=evict))
    return VirtualCluster((M,), devices=1, pages=pages, config=config, costs=step, latency=MS // 100)


def ask(made: VirtualCluster, seq: str, tokens: int, at: int, slo_ms: int | None = None) -> None:
    one = request(seq, range(1, 9), max_tokens=tokens, ignore_eos=True)
    made.ask(replace(one, arrival=at, slo_ms=slo_ms), at=at)


def ends(made: VirtualCluster, until: int = 6000) -> dict[str, float]:
    """Return when each sequence ended, in ms; the tokens of all are those of the model."""
    made.ticks(10 * MS, until * MS)
    made.run(until=until * MS)
    made.expect()
    return {each.seq: each.t / MS for each in made.trace.named("finish")}


def learned(made: VirtualCluster) -> None:
    for number in range(3):
        ask(made, f"alone{number}", 20, number * 40 * MS)


def test_rows_that_can_wait_are_left_out_while_an_urgent_one_runs() -> None:
    found = {}
    for cap in (True, False):
        made = cluster(cap)
        learned(made)
        for number in range(9):
            ask(made, f"b{number}", 150, 200 * MS)
        ask(made, "urgent", 20, 600 * MS, 120)
        found[cap] = ends(made)
        counters = made.scheduler.state().counters
        assert (counters.slo_met, counters.slo_missed) == ((1, 0) if cap else (0, 1)), found[cap]
        assert counters.preemptions == 0
    assert found[True]["urgent"] < 720 < found[False]["urgent"]
    last = max(found[True].values())
    assert last < 1.1 * max(found[False].values()), "those left out go on afterwards"


def test_as_many_run_as_the_deadline_allows() -> None:
    """With six times the time alone, about five rows run beside it; all keep their places."""
    made = cluster(True)
    learned(made)
    for number in range(9):
        ask(made, f"b{number}", 150, 200 * MS)
    ask(made, "urgent", 20, 600 * MS, 120)
    made.ticks(10 * MS, 660 * MS)
    made.run(until=660 * MS)
    running = [each for each in made.scheduler.sequences.values() if each.path]
    left_out = [each.seq for each in running if each.waits.left_out]
    assert len(running) == 10 and 4 <= len(left_out) <= 8 and "urgent" not in left_out


def test_nothing_that_can_wait_starts_while_rows_are_left_out() -> None:
    made = cluster(True)
    learned(made)
    for number in range(9):
        ask(made, f"b{number}", 150, 200 * MS)
    ask(made, "urgent", 20, 600 * MS, 120)
    ask(made, "later", 20, 640 * MS)
    found = ends(made)
    starts = {each.seq: each.t / MS for each in made.trace.named("batch.insert")}
    assert starts["later"] >= found["urgent"]


def test_a_sequence_with_more_time_than_it_needs_leaves_none_out() -> None:
    made = cluster(True)
    learned(made)
    for number in range(9):
        ask(made, f"b{number}", 150, 200 * MS)
    ask(made, "calm", 20, 600 * MS, 3000)
    made.ticks(10 * MS, 660 * MS)
    made.run(until=660 * MS)
    assert not any(each.waits.left_out for each in made.scheduler.sequences.values())


def test_the_end_of_the_urgent_one_by_its_client_lets_all_go_on() -> None:
    made = cluster(True)
    learned(made)
    for number in range(9):
        ask(made, f"b{number}", 150, 200 * MS)
    ask(made, "urgent", 100, 600 * MS, 600)
    made.abort("urgent", at=700 * MS)
    made.ticks(10 * MS, 6000 * MS)
    made.run()
    assert made.told["urgent"].last.finish == "abort"
    assert all(made.told[f"b{number}"].last.finish == "length" for number in range(9))


def test_pages_run_short_while_rows_are_left_out() -> None:
    """Sequences that are left out give their pages where nothing else can go on."""
    made = cluster(True, pages=400)
    learned(made)
    for number in range(9):
        ask(made, f"b{number}", 300, 200 * MS)
    for number in range(4):
        ask(made, f"u{number}", 60, (500 + 100 * number) * MS, 400)
    found = ends(made, 20_000)
    assert len(found) == 3 + 9 + 4


def token_step(plan: Any) -> int:
    """A millisecond per token, so that prompts take their time, too."""
    return sum(len(row.tokens) for row in plan.rows) * MS


@pytest.mark.parametrize(("slo_ms", "waits"), [(110, True), (300, False)])
def test_a_prompt_that_would_make_an_urgent_one_late_waits_for_its_end(slo_ms: int, waits: bool) -> None:
    """Steps of all four rows are short enough in both cases; a prompt of 60 tokens in one of them is in the second."""
    for cap in (True, False):
        config = ClusterConfig(max_num_seqs=4, order=OrderConfig("qlm", cap_batches=cap))
        made = VirtualCluster((M,), devices=1, pages=2000, config=config, costs=token_step, latency=MS // 100)
        for number in range(4):
            made.ask(request(f"l{number}", range(1, 61), max_tokens=8, ignore_eos=True), at=number * 100 * MS)
        for number in range(2):
            ask(made, f"b{number}", 100, 450 * MS)
        ask(made, "urgent", 20, 550 * MS, slo_ms)
        line = request("line", range(31, 91), max_tokens=8, ignore_eos=True, arrival=570 * MS)
        made.ask(line, at=570 * MS)
        found = ends(made)
        starts = {each.seq: each.t / MS for each in made.trace.named("batch.insert")}
        assert (starts["line"] >= found["urgent"]) == (cap and waits)
        assert (found["urgent"] <= 550 + slo_ms) == (cap or not waits)
