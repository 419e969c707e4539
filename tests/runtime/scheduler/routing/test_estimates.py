"""New sequences take the path of least latency by block profiles (BL-21): queue, load and hop."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.chains import Rewriting
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.policy.profiles import BlockProfile, Grid, Line
from runtime.policy.routing.latency import Candidate, RowWork, latency_of
from runtime.policy.routing.paths import PathCosts, cheapest
from runtime.scheduler.devices.devices import Device, DeviceFacts, DevicePages, DeviceStages, Passing, Plan
from runtime.scheduler.devices.devices import Work as Reported
from runtime.scheduler.routing.estimates import LatencyEstimates
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def profile(block: str, scale: float = 1.0, load: float = 5.0) -> BlockProfile:
    grid = Grid((1, 8, 64), (16, 1024), tuple((scale * rows, scale * rows * 2) for rows in (1.0, 2.0, 8.0)))
    return BlockProfile(block, 100, grid, Line((1, 64), (scale, scale * 4)), load)


def device(name: str, sequences: int = 0, queued: int = 0, warm: tuple[str, ...] = ("b",)) -> Device:
    passing = Passing(here={str(number): object() for number in range(sequences)})  # type: ignore[misc]
    stages = DeviceStages(warm=set(warm))
    return Device(name, DeviceFacts(), DevicePages(100), Plan(0), stages, Reported(queued=queued), passing)


def test_the_terms_are_those_of_the_table() -> None:
    estimates = LatencyEstimates({"b": profile("b")}, hop=0.5)
    found = estimates.estimate_block("b", device("d", sequences=8, queued=4), 16)
    asked = latency_of(Candidate("d", profile("b"), (RowWork(4, 16),), joins=8, idle=False), RowWork(1, 16))
    assert found == asked and found.queue > 0 and found.load == 0


def test_what_is_loaded_goes_before_what_is_not_unless_it_has_more_to_do_than_loading_takes() -> None:
    estimates = LatencyEstimates({"b": profile("b")}, hop=0.0)
    busy, cold = device("busy", sequences=8, queued=8), device("cold", warm=())
    assert estimates.estimate_block("b", busy, 16).total < estimates.estimate_block("b", cold, 16).total
    quick = LatencyEstimates({"b": profile("b", load=0.1)}, hop=0.0)
    assert quick.estimate_block("b", busy, 16).total > quick.estimate_block("b", cold, 16).total


def test_a_chain_costs_what_it_was_measured_at_as_a_whole_else_the_sum_of_its_blocks() -> None:
    chain = counting_model("m", "1 2*").chain(1)
    first, second = (use.block for use in chain.uses)
    rewriting = replace(chain, rewriting=Rewriting("fine", 0.9))
    estimates = LatencyEstimates({first: profile(first)}, hop=0.0)
    assert estimates.whole(chain) is None
    estimates.learn([profile(second, scale=2.0)])
    summed = estimates.whole(chain)
    assert summed is not None and summed.decode.at(1, 16) == 3.0
    fresh = LatencyEstimates({first: profile(first), second: profile(second)}, hop=0.0)
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
    cluster.scheduler.router.estimates = LatencyEstimates({block: profile(block, load=0.05)}, hop=0.1)
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
