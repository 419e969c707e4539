"""New sequences take the path of least latency by block profiles (BL-21): queue, load and hop."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.chains import Rewriting, Stage
from runtime.config import ClusterConfig, ControlConfig
from runtime.control.trace_events import TraceEvents
from runtime.engine.fakes.integer_model import counting_model
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line, LinkProfile
from runtime.policy.routing.latency import Candidate, Latency, RowWork, latency_of
from runtime.policy.routing.paths import PathCosts, cheapest
from runtime.scheduler.devices.devices import Device, DeviceFacts, DevicePages, DeviceStages, Passing, Plan
from runtime.scheduler.devices.devices import Work as Reported
from runtime.scheduler.observe.measured_times import MeasuredTimes
from runtime.scheduler.routing.estimates import LatencyEstimates
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def profile(block: str, scale: float = 1.0, load: float = 5.0) -> BlockProfile:
    grid = Grid((1, 8, 64), (16, 1024), tuple((scale * rows, scale * rows * 2) for rows in (1.0, 2.0, 8.0)))
    return BlockProfile(block, 100, grid, Line((1, 64), (scale, scale * 4)), load)


def measured_times(crossing: float = 0.0, load: float = 5.0) -> MeasuredTimes:
    """Return times with hops of `crossing` seconds, and loads of `load` seconds per 100 bytes."""
    profiled = DeviceProfile("", (profile("b", load=load),), (LinkProfile("host", "process", Line((1,), (crossing,))),))
    return MeasuredTimes(ControlConfig(), profiled, TraceEvents(None, ""))


def estimates_of(*profiles: BlockProfile, crossing: float = 0.0, load: float = 5.0) -> LatencyEstimates:
    return LatencyEstimates({each.block: each for each in profiles}, measured_times(crossing, load), 64)


def device(name: str, sequences: int = 0, queued: int = 0, warm: tuple[str, ...] = ("b",), prompts: int = 0) -> Device:
    passing = Passing(here={str(number): object() for number in range(sequences)})  # type: ignore[misc]
    stages = DeviceStages(warm=set(warm))
    return Device(
        name, DeviceFacts(), DevicePages(100), Plan(0), stages, Reported(queued=queued, prompt_tokens=prompts), passing
    )


def test_the_terms_are_those_of_the_table() -> None:
    estimates = estimates_of(profile("b"))
    found = estimates.estimate_block("b", device("d", sequences=8, queued=4, prompts=128), 32)
    queued = (RowWork(4, 32, prompt=128),)
    asked = latency_of(Candidate("d", profile("b"), queued, joins=8, chunk=64), RowWork(0, 32, prompt=32))
    assert found == asked and found.queue > 0 and found.load == 0
    row = estimates.estimate_block("b", device("d"), 1)
    assert row == latency_of(Candidate("d", profile("b")), RowWork(1, 1)) and row.compute < found.compute


def test_what_is_loaded_goes_before_what_is_not_unless_it_has_more_to_do_than_loading_takes() -> None:
    chain = counting_model("m", "1 2*").chain()
    block = chain.uses[0].block
    busy, cold = device("busy", sequences=8, queued=8, warm=(block,)), device("cold", warm=())

    def totals(load: float) -> dict[str, float]:
        table = estimates_of(profile(block, load=load), load=load).table(chain, [(busy, cold)], 1)
        return {name: each.total for name, each in table[0].items()}

    assert totals(load=500.0)["busy"] < totals(load=500.0)["cold"]
    assert totals(load=0.1)["busy"] > totals(load=0.1)["cold"]


def test_a_block_that_is_not_there_waits_for_the_loads_under_way_of_its_device() -> None:
    chain = counting_model("m", "1 2*").chain()
    block, times = chain.uses[0].block, measured_times()
    estimates = LatencyEstimates({block: profile(block)}, times, 64)
    candidates = [(device("loads", warm=()), device("rests", warm=()))]
    times.loads.begin("loads", Stage("other", 0, 2), {"a": 100}, 0, ())
    found = estimates.table(chain, candidates, 1)[0]
    assert found["loads"].load - found["rests"].load == pytest.approx(5.0, rel=0.1)


def test_a_load_waits_for_those_under_way_and_brings_nothing_twice() -> None:
    times = measured_times()
    stage = Stage("m", 0, 2)
    alone = times.loads.seconds("d", {"b": 100})
    times.loads.begin("d", stage, {"a": 100}, 0, ())
    assert times.loads.seconds("d", {"b": 100}) == pytest.approx(2 * alone, rel=0.01)
    assert times.loads.seconds("d", {"a": 100, "b": 100}) == pytest.approx(2 * alone, rel=0.01)
    times.end_load(0, "d", stage, 5.0)
    assert times.loads.seconds("d", {"b": 100}) == pytest.approx(alone, rel=0.1)


def test_what_comes_again_is_learned_apart_from_what_comes_first() -> None:
    times = MeasuredTimes(ControlConfig(), None, TraceEvents(None, ""))
    for turn in range(40):
        stage = Stage("m", 0, 2)
        first = turn % 2 == 0
        sizes = {f"b{turn if first else turn - 1}": 10**9}
        times.loads.begin("d", stage, sizes, 0, ())
        times.end_load(0, "d", stage, 4.0 if first else 0.5)
    assert times.loads.seconds("d", {"fresh": 10**9}) == pytest.approx(4.0, rel=0.1)
    assert times.loads.seconds("d", {"b0": 10**9}) == pytest.approx(0.5, rel=0.1)
    told = times.outcomes("load")[-1]
    assert (told.kind, told.measured) == ("load", 0.5) and told.estimate == pytest.approx(0.5, rel=0.15)


def test_measured_hops_decide_whether_a_path_changes_the_device() -> None:
    """The second block is cheaper on another device by less than a hop as assumed, by more than one as measured."""
    chain = counting_model("m", "1 2*").chain(1)
    times = measured_times(crossing=3.0)
    estimates = LatencyEstimates({use.block: profile(use.block) for use in chain.uses}, times, 64)
    table = [{"a": Latency(0, 0, 0, 0)}, {"a": Latency(2, 0, 0, 0), "b": Latency(0, 0, 0, 0)}]
    servers = {"a": "s", "b": "s"}
    assert cheapest(estimates.path_costs(chain, table, servers, 1)) == ("a", "a")
    for _ in range(60):
        times.add_hop(0, True, 8, 0.5, False)
        times.add_hop(0, True, 8, 4.0, True)  # a row that decodes on does not wait for what a message in full costs
    assert cheapest(estimates.path_costs(chain, table, servers, 1)) == ("a", "b")
    assert cheapest(estimates.path_costs(chain, table, {"a": "s", "b": "t"}, 1)) == ("a", "a"), "on another server"


def test_a_chain_costs_what_it_was_measured_at_as_a_whole_else_the_sum_of_its_blocks() -> None:
    chain = counting_model("m", "1 2*").chain(1)
    first, second = (use.block for use in chain.uses)
    rewriting = replace(chain, rewriting=Rewriting("fine", 0.9))
    estimates = estimates_of(profile(first))
    assert estimates.whole(chain) is None
    estimates.learn([profile(second, scale=2.0)])
    summed = estimates.whole(chain)
    assert summed is not None and summed.decode.at(1, 16) == 3.0
    fresh = estimates_of(profile(first), profile(second))
    assert fresh.whole(rewriting) is None, "of what a delta adds to its base's blocks they say nothing"
    fresh.learn([profile(chain.version, scale=7.0)])
    whole = fresh.whole(rewriting)
    assert whole is not None and whole.decode.at(1, 16) == 7.0
    fresh.remove_blocks([], chain.version)
    assert fresh.whole(rewriting) is None


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_path_is_the_cheapest_of_all(data: st.DataObject) -> None:
    names = ["x", "y", "z"]
    blocks = data.draw(st.integers(1, 4))
    hop = data.draw(st.floats(0, 3))
    costs = [
        {name: data.draw(st.floats(0, 5)) for name in data.draw(st.sets(st.sampled_from(names), min_size=1))}
        for _ in range(blocks)
    ]

    def price(path: tuple[str, ...]) -> float:
        return sum(row[name] for row, name in zip(costs, path, strict=True)) + hop * sum(
            a != b for a, b in pairwise(path)
        )

    paths: list[tuple[str, ...]] = [()]
    for row in costs:
        paths = [(*path, name) for path in paths for name in row]
    chosen = cheapest(PathCosts(costs, hop))
    assert chosen is not None and abs(price(chosen) - min(map(price, paths))) < 1e-9


def test_a_cluster_tells_all_terms_and_takes_the_least() -> None:
    model = counting_model("m", "1 2* 3* 4", max_model_len=128)
    block = model.chain().uses[0].block
    cluster = VirtualCluster([model], devices=3, config=ClusterConfig(devices=3, placement="replicate"))
    cluster.scheduler.router.estimates = LatencyEstimates(
        {block: profile(block)}, measured_times(crossing=0.1, load=0.05), 64
    )
    for number in range(12):
        cluster.ask(request(f"s{number}", range(number + 1), "m", max_tokens=12), at=number * MS)
    cluster.run()
    cluster.expect()
    told = cluster.trace.named("dispatch.candidates")
    assert told and all(event.cause == "BL-21" for event in told)
    for event in told:
        terms = event.extra["candidates"]
        assert set(map(len, terms.values())) == {4} and sum(terms[event.dev]) == min(map(sum, terms.values()))
    assert sum(bool(device.stages.loaded) for device in cluster.scheduler.devices) > 1, "one device had to do it all"
