"""Chains over several devices: the model's own tokens whatever happens; page accounting agrees after every event."""

from __future__ import annotations

import random

import pytest

from runtime.chains import devices_of
from runtime.config import AgentConfig, ClusterConfig
from runtime.engine.fakes.integer_model import counting_model
from runtime.types import SequenceRequest
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3 4* 5* 6")
#: Has the same first parts as M.
N = counting_model("n", "1 2* 3 4* 8 9", page_tokens=4)
CUTS = [(1, 3, 4), (1, 3, 4)]


def some(count: int, seed: int = 0, models: tuple[str, ...] = ("m", "n")) -> list[SequenceRequest]:
    rng = random.Random(seed)
    asked = []
    for number in range(count):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 24))]
        asked.append(request(f"s{number}", prompt, rng.choice(models), max_tokens=rng.randrange(1, 20)))
    return asked


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_tokens_are_the_models_own_however_the_chain_is_cut(devices: int) -> None:
    cluster = VirtualCluster([M, N], CUTS, devices=devices)
    for one in some(20, devices):
        cluster.ask(one, at=random.Random(one.seq).randrange(20 * MS))
    cluster.run()
    cluster.expect()
    assert len({device.name for device in cluster.scheduler.devices if device.stages.loaded}) == devices


def test_blocks_on_one_device_run_without_a_hop() -> None:
    """BL-15: a hop is a change of device, so a chain of four blocks on two devices has one."""
    cluster = VirtualCluster([M], [(1, 3, 4)], devices=2)
    cluster.ask(request("a", range(1, 6), "m", max_tokens=5))
    cluster.run()
    cluster.expect()
    passed = [message for _, sender, to, message in cluster.sent if type(message).__name__ == "ForwardRows"]
    assert len(passed) == 5  # one for the prompt, one for each further token


def test_short_pages_preempt_and_change_nothing() -> None:
    cluster = VirtualCluster([M, N], CUTS, devices=2, pages=60)
    cluster.ask(*some(16, 5))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.preemptions > 0


def test_aborts_in_every_phase_leave_nothing() -> None:
    cluster = VirtualCluster([M, N], CUTS, devices=3)
    rng = random.Random(3)
    asked = some(30, 3)
    cluster.ask(*asked)
    for one in asked[::2]:
        cluster.abort(one.seq, rng.randrange(40 * MS))
    cluster.run()
    cluster.expect_empty()
    cluster.requests = {one.seq: one for one in asked[1::2]}
    cluster.expect()


@pytest.mark.parametrize("seed", range(25))
def test_deaths_lose_duplicate_and_alter_nothing(seed: int) -> None:
    rng = random.Random(seed)
    cluster = VirtualCluster([M, N], CUTS, devices=rng.choice((2, 3)), pages=rng.choice((80, 200)))
    for one in some(20, seed):
        cluster.ask(one, at=rng.randrange(30 * MS))
    for _ in range(4):
        cluster.at(rng.randrange(120 * MS), lambda: cluster.kill(f"d{rng.randrange(cluster.devices)}"))
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("seed", range(40))
def test_migrations_of_every_kind_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    chunk, window = rng.choice((4, 8, 64)), rng.choice((1, 2, 5))
    cluster = VirtualCluster(
        [M, N], CUTS, devices=3, pages=rng.choice((120, 400)),
        agent_config=AgentConfig(recompute_chunk=chunk, fetch_window=window, page_timeout_ms=200),
        page_bytes_per_ms=rng.choice((1e9, 200.0, 20.0)), latency=rng.choice((MS // 100, MS // 4)),
    )  # fmt: skip
    for one in some(14, seed):
        cluster.ask(one, at=rng.randrange(20 * MS))

    def move() -> None:
        ends = rng.choice(({}, {"copy": False}, {"recompute": False}))
        cluster.migrate_some(rng, **ends)

    for _ in range(40):
        cluster.at(rng.randrange(80 * MS), move)
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.migrations.counts()
    assert counts.started == counts.committed + counts.aborted
    if seed == 0:
        assert counts.committed > 0


@pytest.mark.parametrize("seed", range(40))
def test_deaths_and_migrations_together(seed: int) -> None:
    rng = random.Random(1000 + seed)
    cluster = VirtualCluster([M, N], CUTS, devices=3, pages=300, page_bytes_per_ms=rng.choice((1e9, 50.0)))
    for one in some(14, seed):
        cluster.ask(one, at=rng.randrange(20 * MS))

    def move() -> None:
        cluster.migrate_some(rng)

    for _ in range(30):
        cluster.at(rng.randrange(80 * MS), move)
    for _ in range(4):
        cluster.at(rng.randrange(100 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    cluster.run()
    cluster.expect()


def test_a_chain_that_no_device_can_hold_is_refused_with_a_reason() -> None:
    cluster = VirtualCluster([M], [(1, 3, 4)], devices=2, limits=(1500, 1500))
    cluster.ask(request("a", (1, 2), "m"))
    cluster.run()
    assert cluster.told["a"].last.finish == "error"
    assert "cannot hold m" in (cluster.told["a"].last.error or "")


def test_a_prompt_larger_than_a_device_is_refused_with_a_reason() -> None:
    cluster = VirtualCluster([M], [(1, 3, 4)], devices=2, pages=6)
    cluster.ask(request("a", range(30), "m"), request("b", (1, 2), "m"))
    cluster.run()
    assert "pages" in (cluster.told["a"].last.error or "")
    assert cluster.told["b"].last.finish == "length"


def test_a_sequence_that_no_device_holds_alone_runs_over_several_and_is_moved_nowhere_where_it_would_end_earlier() -> (
    None
):
    """Both devices have all blocks, and the cheapest path is on one of them, whose pages are too few for the answer."""
    long = counting_model("long", "1 2* 3 4* 5* 6", max_model_len=128)
    cluster = VirtualCluster(
        [long], [(1, 3, 4)], devices=2, pages=48, config=ClusterConfig(devices=2, placement="replicate")
    )
    cluster.ask(request("a", range(30), "long", max_tokens=60), request("b", range(9), "long", max_tokens=30))
    cluster.run(until=12 * MS)
    a, b = (cluster.scheduler.sequences[seq] for seq in "ab")
    assert (len(a.path), len(b.path)) == (2, 1)
    devices = devices_of(a.chain, a.path)
    first = range(devices.index(devices[-1]))
    assert "end sooner" in str(cluster.migrate("a", first, devices[-1]))
    for at in (60, 200):  # it is admitted again, the second time with more pages than one device has
        cluster.at(at * MS, lambda: cluster.kill(devices[0]))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.preemptions >= 2


def test_pages_that_do_not_verify_are_not_used() -> None:
    """The move is aborted, or its pages are recomputed; the tokens stay the model's."""
    cluster = VirtualCluster(
        [M], [(1, 3, 4)], devices=3, config=ClusterConfig(devices=3, placement="partition"), damage=lambda pages: True
    )
    cluster.ask(request("a", range(20), "m", max_tokens=20))
    cluster.at(8 * MS, lambda: cluster.migrate("a", range(2, 3), "d0"))
    cluster.at(12 * MS, lambda: cluster.migrate("a", range(2, 3), "d0"))
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.migrations.counts()
    assert (counts.committed, counts.aborted) == (0, 1)


def test_whoever_has_no_pages_on_a_device_does_not_give_way_there() -> None:
    """`n` has attention on d1 only: when d0 is short of pages for `m`, no sequence of `n` is preempted."""
    one, other = counting_model("m", "1 2* 3 4"), counting_model("n", "5 6 7 8*")
    cluster = VirtualCluster([one, other], [(2,), (2,)], devices=2, pages=16)
    cluster.ask(*(request(f"m{at}", range(8), "m", max_tokens=40, arrival=at) for at in range(4)))
    cluster.ask(*(request(f"n{at}", range(4), "n", max_tokens=10, arrival=9) for at in range(2)), at=MS)
    cluster.run()
    cluster.expect()
    starts = [cluster.scheduler.block_map.instances[model.chain(2).uses[0].block] for model in (one, other)]
    assert starts == [["d0"], ["d0"]]
    preempted = {event.seq for event in cluster.trace.named("batch.preempt")}
    assert preempted and all(seq.startswith("m") for seq in preempted), preempted


def test_a_move_does_not_shorten_an_answer() -> None:
    """Both halves on one device leave room for half the tokens: a sequence that may need more stays on two."""
    cluster = VirtualCluster([counting_model("m", "1 2* 3* 4", max_model_len=64)], [(2,)], devices=2, pages=12)
    cluster.ask(request("long", range(4), "m", max_tokens=40), request("short", range(4), "m", max_tokens=12))
    said: dict[str, set[str | None]] = {"long": set(), "short": set()}
    for when in range(4, 12, 2):
        for seq, reasons in said.items():
            cluster.at(when * MS, lambda seq=seq, reasons=reasons: reasons.add(cluster.migrate(seq, range(1, 2), "d0")))
    cluster.run()
    cluster.expect()
    assert None not in said["long"] and any("sooner" in (why or "") for why in said["long"])
    assert None in said["short"]
