"""Hops, loads and moves are estimated before and measured after, on devices in virtual time (BL-16, BL-21)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.stages.stages import StageTable
from runtime.chains import Stage
from runtime.config import AgentConfig, ClusterConfig, ControlConfig
from runtime.control.agent_io import StageLoaded
from runtime.control.trace_events import TraceEvents
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import LoadStages
from runtime.policy.profiles import DeviceProfile, Line, LinkProfile
from runtime.scheduler.observe.measured_times import Kind, MeasuredTimes
from runtime.scheduler.observe.snapshot import picture_of
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1* 2* 3* 4", page_tokens=4, max_model_len=512)


def reporting(cluster: VirtualCluster, until: int) -> VirtualCluster:
    """Let all devices report every 20 ms."""
    for when in range(20 * MS, until, 20 * MS):
        cluster.at(when, lambda: [cluster.tell(node.agent.report()) for node in cluster.nodes.values()] and None)
    return cluster


def outcomes(cluster: VirtualCluster, kind: Kind) -> list[tuple[float, float]]:
    return [(each.estimate, each.measured) for each in cluster.scheduler.times.outcomes(kind)]


def test_hops_are_learned_and_not_those_that_wait_for_a_step() -> None:
    latency = MS // 2
    cluster = VirtualCluster([M], [(2,)], latency=latency, config=ClusterConfig(devices=2, placement="partition"))
    for number in range(16):
        cluster.ask(request(f"s{number}", range(1 + number), max_tokens=6), at=number * 17 * MS)
    reporting(cluster, 400 * MS).run()
    cluster.expect()
    found = outcomes(cluster, "hop")
    assert len(found) > 10 and {round(measured * 1e9) for _, measured in found} == {latency}
    assert cluster.scheduler.times.hop_seconds(True, 8, True) == pytest.approx(latency / 1e9, rel=0.05)
    assert cluster.scheduler.times.hop_seconds(False, 8, True) != pytest.approx(latency / 1e9, rel=0.05)


def test_a_batch_that_decodes_on_is_timed_apart_from_messages_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = VirtualCluster([M], [(2,)], latency=MS // 2, config=ClusterConfig(devices=2, placement="partition"))
    cluster.ask(request("s", range(1, 9), max_tokens=64))
    came: list[tuple[int, bool]] = []
    monkeypatch.setattr(cluster.scheduler.times, "add_hop", lambda *given: came.append((given[2], given[4])))
    reporting(cluster, 400 * MS).run()
    cluster.expect()
    row = min(nbytes for nbytes, _ in came)
    assert came[:2] == [(8 * row, True), (row, True)], "the prompt, and the step in which the batch forms"
    assert came[2:] == [(row, False)] * 7, "one in eight steps of the batch"


def test_a_message_in_full_takes_longer_than_one_of_a_batch_that_decodes_on() -> None:
    """Medians as recorded of SmolLM2-135M on two agents, in microseconds.

    With bytes alone, the row that forms a batch would be expected within .5 ms, as it has the fewest bytes.
    """
    times = MeasuredTimes(ControlConfig(), None, TraceEvents(None, ""))
    recorded = [(1152, False, 452), (1152, True, 586), (9216, True, 522), (36864, True, 571), (138240, True, 750)]
    for _ in range(12):
        for nbytes, in_full, taken in (*recorded, recorded[0], recorded[0], (294912, True, 836)):
            times.add_hop(0, True, nbytes, taken / 1e6, in_full)
    for nbytes, in_full, taken in recorded:
        assert times.hop_seconds(True, nbytes, in_full) == pytest.approx(taken / 1e6, rel=0.09), (nbytes, in_full)


def test_between_servers_nothing_is_learned_because_their_clocks_differ() -> None:
    config = ClusterConfig(devices=2, placement="partition")
    cluster = VirtualCluster([M], [(2,)], config=config, servers=("x", "y"))
    cluster.ask(request("s", max_tokens=24))
    reporting(cluster, 200 * MS).run()
    cluster.expect()
    assert not outcomes(cluster, "hop")


def test_loads_are_learned_and_shown() -> None:
    models = [counting_model(name, f"{at}1 {at}2* {at}3", max_model_len=64) for at, name in enumerate("abcdef", 1)]
    nbytes = sum(block.nbytes for block in models[0].blocks())
    config = ClusterConfig(devices=1, residency="swap")
    cluster = VirtualCluster(models, devices=1, loading=lambda: 5 * MS, config=config, limits=(2 * nbytes,))
    for number, model in enumerate(models):
        cluster.ask(request(f"s-{model.spec.name}", (1, 2), model.spec.name), at=number * 100 * MS)
    cluster.run()
    cluster.expect()
    loads = outcomes(cluster, "load")
    assert len(loads) == len(models) and {round(measured * 1000) for _, measured in loads} == {5}
    assert loads[0][0] < 1e-4 and loads[-1][0] == pytest.approx(0.005, rel=0.1)
    (told,) = [each for each in picture_of(cluster.scheduler).estimates if each.kind == "load"]
    assert told.count == len(models) and told.seconds == pytest.approx(0.005, rel=0.1)
    assert len([event for event in cluster.trace.named("estimate") if event.extra["of"] == "load"]) == len(models)


def test_a_load_counts_its_own_work_not_its_place_in_the_queue() -> None:
    spec, stages = M.spec, [Stage(name, 0, 4) for name in "abc"]
    table = StageTable("d", SequencePageTables(100), 8)
    table.handle(LoadStages(tuple(stages), (("1",), ("2",), ("3",))), 10)
    took = []
    for stage, ended in zip(stages, (15, 19, 30), strict=True):
        (sent,) = table.handle(StageLoaded(stage, spec, 1), ended)
        took.append(sent.message.took)  # type: ignore[union-attr]
    assert took == [5, 4, 11]


def moved(latency: int, **how: bool) -> list[tuple[float, float]]:
    """Move twelve held sequences of 40 to 310 tokens: 2.5 tokens per ms are recomputed, 5 copied."""
    config = ClusterConfig(devices=2, control=ControlConfig(bandwidth=1e12))
    cluster = VirtualCluster(
        [M], devices=2, pages=4096, config=config, latency=latency, alpha=0, beta=400_000, page_bytes_per_ms=240.0,
        agent_config=AgentConfig(recompute_chunk=256, fetch_window=1),
    )  # fmt: skip
    for number in range(12):
        name = f"s{number}"
        cluster.ask(request(name, [each % 97 for each in range(40 + 90 * (number % 4))], max_tokens=4), at=cluster.now)
        while not cluster.told[name].tokens:
            cluster.run_one()
        sequence = cluster.scheduler.sequences[name]
        sequence.hold(True)
        while sequence.flying:
            cluster.run_one()
        target = "d1" if "d0" in sequence.place.devices else "d0"
        while cluster.migrate(name, range(1), target, **how) is not None:
            cluster.run_one()
        while name in cluster.scheduler.sequences:
            cluster.run_one()
    cluster.run()
    cluster.expect()
    return outcomes(cluster, "move")


def test_moves_are_known_after_a_few() -> None:
    """What the ends take is not what the scheduler assumes."""
    moves = moved(0)
    assert len(moves) >= 8
    assert moves[0][0] < moves[0][1] / 2, "what was assumed is far off: the test shows learning"
    longest = [measured for _, measured in moves[3::4]]  # each end begins at the pace that it had in the last move
    assert len(longest) == 3 and longest[-1] < 0.45 * longest[0]
    late = sorted(abs(estimate / measured - 1) for estimate, measured in moves[4:])
    assert late[len(late) // 2] < 0.15


def test_the_way_of_an_order_and_its_answer_counts() -> None:
    without, moves = moved(0, copy=False), moved(50 * MS, copy=False)
    assert [measured for _, measured in moves] == pytest.approx([each + 0.1 for _, each in without])
    assert all(estimate == pytest.approx(measured, rel=0.05) for estimate, measured in moves[4:])


@pytest.mark.parametrize("bandwidth", [2e6, 5e8])
def test_before_any_outcome_the_configured_bandwidth_holds(bandwidth: float) -> None:
    times = MeasuredTimes(ControlConfig(bandwidth=bandwidth), None, TraceEvents(None, ""))
    assert times.loads.seconds("d0", {"a block": 1_000_000}) == pytest.approx(1e6 / bandwidth, rel=0.01)
    assert times.move_seconds(64, 4, 8, 1e6, None) == pytest.approx(16 * 1e6 / bandwidth, rel=0.01)


def test_turns_of_both_agents_count_for_the_back_alone() -> None:
    turn = 0.5
    links = (LinkProfile("host", "process", Line((1.0, 1e6), (turn, turn + 1.0))),)
    times = MeasuredTimes(ControlConfig(), DeviceProfile("", (), links), TraceEvents(None, ""))

    def seconds(tokens: int, recompute: float | None, sets: int = 8) -> float:
        front = None if recompute is None else lambda context, chunk: recompute * chunk
        return times.move_seconds(tokens, 4, 8, 1e6, front, sets)

    assert seconds(4, 0.01) == pytest.approx(0.04)
    assert seconds(4, None) == pytest.approx(turn + 1.0, rel=0.01)
    assert seconds(16, 0.1) == pytest.approx(turn + 1.0, rel=0.01)  # 12 tokens in front meanwhile, in 1.2 s
    assert seconds(64, None) == pytest.approx(5 * turn + 16.0, rel=0.01)  # 8, 4, 2, 1 and 1 page sets
    assert seconds(64, None, sets=1) == pytest.approx(16 * turn + 16.0, rel=0.01)


def test_rows_of_the_front_hold_the_back_up_on_agents_that_handle_messages_between_steps() -> None:
    links = (LinkProfile("host", "process", Line((1.0, 1e6), (0.02, 0.021))),)
    times = MeasuredTimes(ControlConfig(), DeviceProfile("", (), links), TraceEvents(None, ""))

    def seconds(row: float, between: bool) -> float:
        return times.move_seconds(1600, 16, 64, 1e6, lambda context, chunk: row * chunk / 16, 8, between)

    assert seconds(0.04, True) == pytest.approx(13 * 0.02 + 100 * 0.001, rel=0.01)  # the back alone: 13 turns of 8
    assert seconds(0.04, False) == pytest.approx(0.391, rel=0.01)  # other turns, and both ends at once
    assert seconds(0.002, True) < 0.5 * seconds(0.04, True)  # rows that are worth their wait


def test_the_estimate_of_a_move_knows_how_its_destination_handles_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = VirtualCluster([M], devices=2, pages=4096, config=ClusterConfig(devices=2))
    cluster.ask(request("a", [each % 97 for each in range(200)], max_tokens=16))
    while not cluster.told["a"].tokens:
        cluster.run_one()
    sequence = cluster.scheduler.sequences["a"]
    sequence.hold(True)
    while sequence.flying:
        cluster.run_one()
    (source,) = sequence.place.devices
    target = cluster.scheduler.devices["d1" if source == "d0" else "d0"]
    target.facts = replace(target.facts, between_steps=True)
    seen: list[tuple[object, ...]] = []
    monkeypatch.setattr(cluster.scheduler.times, "move_seconds", lambda *given: seen.append(given) or 0.1)
    copies: list[tuple[float, ...]] = []
    monkeypatch.setattr(cluster.scheduler.times, "add_copy", lambda *given: copies.append(given))
    while cluster.migrate("a", range(1), target.name, recompute=False) is not None:
        cluster.run_one()
    assert seen[-1][-1] is True
    sets, most = -(-sequence.computed // 4), target.facts.fetch_sets
    while not copies:
        cluster.run_one()
    assert copies[0][0] == -(-sets // most), "as many turns as the back alone takes"
