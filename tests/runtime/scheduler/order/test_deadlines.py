"""Orders by deadline in a virtual cluster: which sequence is first, which gives way, and that no token changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from runtime.config import ClusterConfig, OrderConfig, Plan
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2 3* 4", max_model_len=1024)
N = counting_model("n", "1* 2 5* 6", max_model_len=1024)

#: The events of the trace with which a sequence starts on its devices, starts again, and gives way.
_STAYS = ("batch.insert", "batch.resume", "batch.preempt")


def cluster(
    plan: Plan, places: int = 2, pages: int = 600, evict: bool = True, models: Sequence[IntegerModel] = (M,)
) -> VirtualCluster:
    """One device whose steps take a millisecond, so that a token takes as long."""
    config = ClusterConfig(max_num_seqs=places, order=OrderConfig(plan, evict=evict))
    return VirtualCluster(models, devices=1, pages=pages, config=config, costs=lambda plan: MS, latency=MS // 100)


def ask(cluster: VirtualCluster, seq: str, tokens: int, at: int, slo_ms: int | None = None, model: str = "m") -> None:
    one = request(seq, range(1, 9), model, max_tokens=tokens, ignore_eos=True)
    cluster.ask(replace(one, arrival=at, slo_ms=slo_ms), at=at)


def ends(cluster: VirtualCluster) -> dict[str, float]:
    """Return when each sequence ended, in ms."""
    cluster.ticks(10 * MS, 1200 * MS)
    cluster.run(until=1200 * MS)
    cluster.expect()
    return {each.seq: each.t / MS for each in cluster.trace.named("finish")}


def learned(cluster: VirtualCluster) -> None:
    """Let a few sequences run first, so that the times of prompts and tokens are known."""
    for number in range(4):
        ask(cluster, f"warm{number}", 20, number * 30 * MS)


def test_the_first_deadline_is_first() -> None:
    orders: dict[Plan, list[str]] = {"off": ["a", "b", "c"], "fcfs": ["a", "b", "c"], "edf": ["c", "a", "b"]}
    for plan, order in orders.items():
        made = cluster(plan, places=1)
        learned(made)
        ask(made, "running", 50, 200 * MS)
        for at, (seq, slo) in enumerate((("a", 5000), ("b", 9000), ("c", 800)), 1):
            ask(made, seq, 10, (200 + at) * MS, slo)
        found = ends(made)
        assert sorted("abc", key=found.__getitem__) == order, plan


def test_priority_comes_before_the_deadline() -> None:
    made = cluster("edf", places=1)
    learned(made)
    ask(made, "running", 50, 200 * MS)
    ask(made, "soon", 10, 201 * MS, 100)
    one = request("first", range(1, 9), max_tokens=10, ignore_eos=True, priority=-1)
    made.ask(replace(one, arrival=202 * MS), at=202 * MS)
    found = ends(made)
    assert found["first"] < found["soon"]


def test_a_request_without_a_deadline_is_not_overtaken_for_ever() -> None:
    config = ClusterConfig(max_num_seqs=1, order=OrderConfig("edf", soft_deadline_ms=50))
    made = VirtualCluster((M,), devices=1, pages=400, config=config, costs=lambda plan: MS, latency=MS // 100)
    ask(made, "running", 50, 0)
    ask(made, "soft", 10, MS)
    for number in range(10):
        ask(made, f"s{number}", 10, (2 + number) * MS, 60 + number)
    found = ends(made)
    assert found["soft"] < min(found[f"s{number}"] for number in range(10))


def test_a_strict_order_holds_back_only_what_needs_the_same_devices() -> None:
    config = ClusterConfig(devices=2, max_num_seqs=1, placement="partition", order=OrderConfig("fcfs"))
    made = VirtualCluster((M, counting_model("x", "7* 8", max_model_len=1024)), devices=2, config=config)
    ask(made, "m0", 100, MS)
    ask(made, "m1", 5, 2 * MS)
    ask(made, "x0", 5, 3 * MS, model="x")
    found = ends(made)
    assert found["x0"] < found["m0"]


@pytest.mark.parametrize("model", ["m", "n"])
def test_a_running_sequence_gives_way_to_an_urgent_one(model: str) -> None:
    """Tokens are those of undisturbed sequences: `expect` compares all of them with the model's own."""
    found = {}
    for evict in (True, False):
        made = cluster("qlm", evict=evict, models=(M, N))
        learned(made)
        for seq in ("b0", "b1"):
            ask(made, seq, 200, 200 * MS)
        ask(made, "urgent", 20, 250 * MS, 60, model)
        found[evict] = ends(made)
        counters = made.scheduler.state().counters
        assert counters.evictions == counters.preemptions == evict
        assert (counters.slo_met, counters.slo_missed) == ((1, 0) if evict else (0, 1))
    assert found[True]["urgent"] < 310
    assert found[False]["urgent"] > 390


def test_pages_are_given_as_well_as_places() -> None:
    made = cluster("qlm", places=64, pages=200)
    learned(made)
    for number in range(3):
        ask(made, f"b{number}", 200, (200 + number) * MS)
    long = request("urgent", [1] * 300, max_tokens=10, ignore_eos=True)
    made.ask(replace(long, arrival=250 * MS, slo_ms=100), at=250 * MS)
    found = ends(made)
    assert found["urgent"] < 350, found
    assert made.scheduler.state().counters.evictions > 0
    assert {each.cause for each in made.trace.named("batch.preempt")} >= {"QL-09"}


def test_none_gives_way_if_one_ends_in_time() -> None:
    made = cluster("qlm")
    learned(made)
    ask(made, "b0", 200, 200 * MS)
    ask(made, "b1", 60, 200 * MS)
    ask(made, "urgent", 20, 250 * MS, 100)
    assert ends(made)["urgent"] < 350
    assert made.scheduler.state().counters.evictions == 0


def test_a_sequence_of_higher_priority_does_not_give_way() -> None:
    made = cluster("qlm", places=1)
    learned(made)
    ask(made, "first", 150, 200 * MS)
    low = request("urgent", range(1, 9), max_tokens=20, ignore_eos=True, priority=1)
    made.ask(replace(low, arrival=250 * MS, slo_ms=60), at=250 * MS)
    found = ends(made)
    assert found["first"] < found["urgent"]
    assert made.scheduler.state().counters.evictions == 0


def test_a_sequence_runs_as_long_as_its_start_takes_before_it_gives_way_again() -> None:
    """Its prompt takes 25 steps. Urgent ones come so often that it would never get through it otherwise."""
    config = ClusterConfig(max_num_seqs=1, prefill_chunk=8, order=OrderConfig("qlm"))
    made = VirtualCluster((M,), devices=1, pages=600, config=config, costs=lambda plan: MS, latency=MS // 100)
    learned(made)
    long = request("b", [1] * 200, max_tokens=60, ignore_eos=True)
    made.ask(replace(long, arrival=200 * MS), at=200 * MS)
    for number in range(12):
        ask(made, f"u{number}", 5, (250 + 25 * number) * MS, 40)
    assert "b" in ends(made)
    stays = [each.t for each in made.trace.events if each.seq == "b" and each.ev in _STAYS]
    begins, given = stays[::2], stays[1::2]
    assert len(given) > 1
    assert all(end - begin >= 25 * MS for begin, end in zip(begins, given, strict=False))


def test_a_waiting_sequence_becomes_urgent_when_others_run_longer_than_expected() -> None:
    """Nothing but time passes between its arrival, when it could wait, and the moment when it no longer can."""
    coin = counting_model("m", "1* 2 3* 4", vocab_size=3, max_model_len=1024)
    config = ClusterConfig(max_num_seqs=1, order=OrderConfig("qlm"))
    made = VirtualCluster((coin,), devices=1, pages=600, config=config, costs=lambda plan: MS, latency=MS // 100)
    for number in range(6):
        short = request(f"w{number}", (1, 2), max_tokens=200, min_tokens=20, stop_token_ids=(0, 1, 2), ignore_eos=True)
        made.ask(replace(short, arrival=number * 30 * MS), at=number * 30 * MS)
    made.ask(request("b", (1, 2), max_tokens=200, ignore_eos=True, arrival=200 * MS), at=200 * MS)
    urgent = request("urgent", (1, 2), max_tokens=10, ignore_eos=True)
    made.ask(replace(urgent, arrival=210 * MS, slo_ms=80), at=210 * MS)
    begun = made.trace
    found = ends(made)
    given = [each.t for each in begun.named("batch.preempt")]
    assert len(given) == 1 and given[0] > 220 * MS, "it could wait at first"
    assert found["urgent"] < 290


def test_those_that_are_late_anyway_go_last() -> None:
    """One long backlog: EDF serves the hopeless first and lets all be late; those that can be on time are."""
    met = {}
    plans: tuple[Plan, ...] = ("edf", "qlm")
    for plan in plans:
        made = cluster(plan, places=1, evict=False)
        learned(made)
        ask(made, "running", 200, 200 * MS)
        for number in range(6):
            ask(made, f"hopeless{number}", 60, (210 + number) * MS, 100)
        for number in range(3):
            ask(made, f"fine{number}", 20, (220 + number) * MS, 500)
        found = ends(made)
        met[plan] = made.scheduler.state().counters.slo_met
        assert all(f"hopeless{number}" in found for number in range(6))
    assert met == {"edf": 0, "qlm": 3}


def test_many_urgent_ones_take_turns_with_a_batch_and_all_end() -> None:
    """No pair of sequences evicts each other for ever, and the batch goes on between."""
    made = cluster("qlm", places=3)
    learned(made)
    for number in range(6):
        ask(made, f"b{number}", 120, 200 * MS)
    for number in range(12):
        ask(made, f"u{number}", 15, (220 + 40 * number) * MS, 60)
    found = ends(made)
    counters = made.scheduler.state().counters
    assert counters.slo_met >= 11, counters
    assert 0 < counters.evictions <= 12
    assert max(found.values()) < 1200


def test_off_gives_the_trace_of_a_scheduler_without_the_mechanism() -> None:
    """`slo_ms` changes nothing while the plan is off."""
    traces = []
    for slo in (None, 30):
        made = cluster("off")
        for number in range(8):
            ask(made, f"s{number}", 20 + number, number * MS, slo)
        ends(made)
        traces.append([(each.t, each.ev, each.seq) for each in made.trace.events])
    assert traces[0] == traces[1]


def test_unknown_plans_are_refused() -> None:
    with pytest.raises(ValueError, match="plan must be one of off, fcfs, edf, qlm"):
        OrderConfig("lifo")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="soft_deadline_ms"):
        OrderConfig("edf", soft_deadline_ms=0)


def ask_first(cluster: VirtualCluster, seq: str, tokens: int, at: int, ttft_slo_ms: int) -> None:
    """Ask for an answer whose first token is to be there in a time."""
    one = request(seq, range(1, 9), "m", max_tokens=tokens, ignore_eos=True)
    cluster.ask(replace(one, arrival=at, ttft_slo_ms=ttft_slo_ms), at=at)


@pytest.mark.parametrize("plan", ["edf", "qlm"])
def test_a_deadline_of_a_first_token_counts_in_the_order(plan: Plan) -> None:
    made = cluster(plan, places=1)
    learned(made)
    ask(made, "running", 50, 200 * MS)
    ask(made, "a", 10, 201 * MS, slo_ms=600)
    ask_first(made, "b", 10, 202 * MS, ttft_slo_ms=200)
    found = ends(made)
    assert found["b"] < found["a"]


def test_requests_give_way_for_a_first_token_that_would_be_late_and_only_for_that() -> None:
    """An answer of 100 ms with 60 ms for its first token: 60 ms for the whole answer would be late anyway."""
    made = cluster("qlm", places=1)
    learned(made)
    ask(made, "running", 300, 200 * MS)
    ask_first(made, "urgent", 100, 240 * MS, ttft_slo_ms=60)
    found = ends(made)
    assert [each.seq for each in made.trace.named("batch.preempt")] == ["running"]
    assert found["urgent"] < found["running"]
    other = cluster("qlm", places=1)
    learned(other)
    ask(other, "running", 300, 200 * MS)
    ask(other, "urgent", 100, 240 * MS, slo_ms=60)
    ends(other)
    assert not other.trace.named("batch.preempt")


def test_a_sequence_that_has_its_first_token_in_time_gives_way_as_one_without_a_deadline() -> None:
    made = cluster("qlm", places=1)
    learned(made)
    ask_first(made, "first", 300, 200 * MS, ttft_slo_ms=20)
    ask(made, "urgent", 20, 260 * MS, slo_ms=80)
    ends(made)
    assert [each.seq for each in made.trace.named("batch.preempt")] == ["first"]
    assert made.scheduler.state().counters.slo_met == 2 and made.scheduler.state().counters.slo_missed == 0


def test_first_tokens_are_counted_under_any_plan() -> None:
    made = cluster("off", places=1)
    ask_first(made, "in time", 100, 0, ttft_slo_ms=50)
    ask_first(made, "late", 10, 1 * MS, ttft_slo_ms=50)
    ends(made)
    assert (made.scheduler.state().counters.slo_met, made.scheduler.state().counters.slo_missed) == (1, 1)


def test_nearly_equal_objectives_share_a_group_and_keep_their_order() -> None:
    for by_class, groups in ((True, 1), (False, 4)):
        config = ClusterConfig(max_num_seqs=1, order=OrderConfig("edf", slo_classes=by_class))
        made = VirtualCluster([M], devices=1, pages=600, config=config, costs=lambda plan: MS, latency=MS // 100)
        ask(made, "running", 100, 0)
        for number, slo in enumerate((900, 880, 860, 840)):
            ask(made, f"s{number}", 10, (40 + number) * MS, slo)
        made.run(until=60 * MS)
        order = made.scheduler.order
        assert order is not None and len(list(order.forecasts.groups.waiting())) == groups
        found = ends(made)
        assert sorted(found, key=found.__getitem__) == ["running", "s3", "s2", "s1", "s0"]
