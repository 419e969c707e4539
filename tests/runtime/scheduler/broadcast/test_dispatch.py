"""A hop offered to several devices runs on exactly one of them, once, whatever happens meanwhile (BL-23)."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from runtime.agent.steps.queue import Lane
from runtime.config import AgentConfig, ClusterConfig
from runtime.control.agent_io import StageStep
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import Bid, ForwardRows, HopAssigned, Offer, OpenSequences, Retract, RunRows
from tests.runtime.scheduler.virtual_cluster import MS, Node, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3 4* 5 6* 7 8", max_model_len=128)
N = counting_model("n", "1 2* 3 4* 5 6* 9 9", max_model_len=128)
CUT = (2, 5)


@dataclass
class Copies(VirtualCluster):
    """A cluster with three blocks of two models, each on two or three of six devices; it records every run of a row.

    Fields:
        ran: How often each (sequence, epoch, hop, first token, tokens) ran.
        copies: Instances of each block.
    """

    ran: Counter[tuple[str, int, int, int, int]] = field(default_factory=Counter)
    copies: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        self.runs: list[tuple[str, str]] = []

    def lay(self) -> None:
        """Put block i of both chains on devices i and i + 3 (and one more)."""
        blocks = self.scheduler.block_map
        for chain in self.scheduler.chains():
            for at, use in enumerate(chain.uses):
                for name in [f"d{at}", f"d{at + 3}", f"d{(at + 4) % 6}"][: self.copies]:
                    blocks.add(use.block, name)
                for name in tuple(blocks.instances[use.block]):
                    if name not in (f"d{at}", f"d{at + 3}", f"d{(at + 4) % 6}")[: self.copies]:
                        blocks.remove(use.block, name)
                for name in blocks.instances[use.block]:
                    self.scheduler._state.ask_for(chain, name, chain.stage(use.lo, use.hi))
        self.carry_out(self.scheduler._state.out.flush())

    def _run(self, node: Node, step: StageStep, lane: Lane) -> None:
        for row in node.agent._steps.oldest_step(lane)[1]:
            if not row.move:
                self.runs.append((row.sequence.seq, node.name))
                self.ran[row.sequence.seq, row.epoch, row.hop, row.start, row.tokens] += 1
        super()._run(node, step, lane)


def cluster_of(copies: int = 2, dispatch: str = "broadcast", **changes) -> Copies:
    config = ClusterConfig(
        devices=6, placement="partition", prefill_chunk=8, dispatch=dispatch, hop_cost=0.0, max_crashes=99
    )  # type: ignore[arg-type]
    fields = dict(devices=6, pages=200, config=config, agent_config=AgentConfig(recompute_chunk=8, fetch_window=1))
    cluster = Copies([M, N], [CUT, CUT], copies=copies, **(fields | changes))  # type: ignore[arg-type]
    cluster.run()
    cluster.lay()
    cluster.run()
    return cluster


def messages(cluster: VirtualCluster, kind: type) -> list:
    return [message for _, _, _, message in cluster.sent if isinstance(message, kind)]


def once(cluster: Copies) -> None:
    """Assert that no row of any hop ran twice in one epoch."""
    assert cluster.ran and set(cluster.ran.values()) == {1}


def test_the_first_bid_wins_the_others_are_told_and_the_scheduler_learns_the_path() -> None:
    cluster = cluster_of()
    cluster.ask(request("a", range(18), "m", max_tokens=6), at=cluster.now)
    cluster.run()
    cluster.expect()
    once(cluster)
    won = messages(cluster, HopAssigned)
    assert [(each.seqs, each.hops) for each in won] == [(("a",), (1,)), (("a",), (2,))]
    assert len(messages(cluster, Offer)) == 4 and len(messages(cluster, Retract)) == 2
    # Later rows of the sequence run where its K and V are; the trace records where each row ran.
    where: dict[int, set[str]] = {}
    for each in cluster.trace.named("block.hop"):
        where.setdefault(each.extra["hop"], set()).add(each.extra["to"])
    assert {at: devices == {each.devices[0]} for each in won for at in each.hops for devices in [where[at]]} == {
        1: True,
        2: True,
    }
    assert len(cluster.trace.named("block.hop")) == 3 * len(messages(cluster, RunRows))
    assert {device for _, device in cluster.runs} == {device for devices in where.values() for device in devices}
    choices = cluster.trace.named("dispatch.choose")
    assert [(each.cause, each.extra["rule"]) for each in choices] == [("BL-23", "broadcast")] * 2


def test_placed_is_the_baseline_and_offers_nothing() -> None:
    cluster = cluster_of(dispatch="placed")
    cluster.ask(request("a", range(18), "m", max_tokens=6), at=cluster.now)
    cluster.run()
    cluster.expect()
    once(cluster)
    assert (
        not messages(cluster, Offer)
        and not messages(cluster, HopAssigned)
        and not any(each.offers for each in messages(cluster, OpenSequences))
    )


def test_a_busy_device_does_not_take_what_an_idle_one_can() -> None:
    """The scheduler's first candidate is in a long step, so the other one takes the hop."""
    cluster = cluster_of(
        costs=lambda plan: 100 * MS if any(len(row.tokens) == 7 and "[2:5]" in row.model for row in plan.rows) else MS
    )
    cluster.ask(request("long", range(7), "m", max_tokens=2), at=cluster.now)
    cluster.run(until=cluster.now + 20 * MS)
    slow = cluster.scheduler.sequences["long"].path[1].device
    cluster.ask(*(request(f"s{number}", range(3), "m", max_tokens=3) for number in range(4)), at=cluster.now)
    cluster.run()
    cluster.expect()
    once(cluster)
    took = {
        device
        for each in messages(cluster, HopAssigned)
        for seq, hop, device in zip(each.seqs, each.hops, each.devices, strict=True)
        if seq != "long" and hop == 1
    }
    assert took and slow not in took


def test_pages_of_those_that_did_not_get_it_are_free_at_once() -> None:
    cluster = cluster_of(copies=3)
    cluster.ask(request("a", range(18), "m", max_tokens=30), at=cluster.now)
    while not cluster.scheduler.offers.settled:
        cluster.run_one()
    (offers,) = {each.offers[0] for each in messages(cluster, OpenSequences) if each.offers}
    # the last hop's other candidates are on the path already
    assert [(at, len(devices)) for at, devices in offers] == [(1, 3)]
    sequence = cluster.scheduler.sequences["a"]
    assert (
        not sequence.offered.hops
        and not sequence.offered.devices
        and {hop.device for hop in sequence.path} == sequence.place.devices
    )
    held = {device.name for device in cluster.scheduler.devices if device.pages.used}
    assert held == sequence.place.devices and not any(device.passing.asked for device in cluster.scheduler.devices)
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("copies", [2, 3])
def test_places_are_kept_for_whoever_may_take_a_hop(copies: int) -> None:
    """New sequences and sequences that win a hop there together never exceed a device's `max_num_seqs`."""
    config = ClusterConfig(
        devices=6, placement="partition", prefill_chunk=8, dispatch="broadcast", hop_cost=0.0, max_num_seqs=3
    )
    cluster = cluster_of(copies, config=config, latency=2 * MS)
    cluster.ask(
        *(request(f"s{at}", range(1 + at % 5), "mn"[at % 2], max_tokens=12) for at in range(24)), at=cluster.now
    )
    most = 0
    while cluster._heap:
        cluster.run_one()
        most = max(most, *(device.passing.count for device in cluster.scheduler.devices))
    assert most == 3
    cluster.expect()


def test_a_sequence_is_moved_only_when_its_path_is_settled() -> None:
    cluster = cluster_of()
    cluster.ask(request("a", range(18), "m", max_tokens=30), at=cluster.now)
    while "a" not in cluster.scheduler.sequences or not cluster.scheduler.sequences["a"].offered.hops:
        cluster.run_one()
    assert "goes" in (cluster.migrate("a", range(1), "d3") or "") or "elsewhere" in (
        cluster.migrate("a", range(1), "d3") or ""
    )
    while cluster.scheduler.sequences["a"].offered.hops:
        cluster.run_one()
    source = cluster.scheduler.sequences["a"].path[0].device
    assert cluster.migrate("a", range(1), "d3" if source == "d0" else "d0") is None
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.migrations.counts().committed == 1
    once(cluster)


MOMENTS = {"offered": Offer, "bid": Bid, "given": ForwardRows, "retracted": Retract, "won": HopAssigned}


@pytest.mark.parametrize("victim", ["offerer", "winner", "loser", "first"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_death_at_each_moment(moment: str, victim: str) -> None:
    cluster = cluster_of()
    cluster.ask(request("a", range(18), "m", max_tokens=8), request("b", range(5), "n", max_tokens=8), at=cluster.now)
    while not messages(cluster, MOMENTS[moment]):
        cluster.run_one()
    offer = next((sender, to) for _, sender, to, message in cluster.sent if isinstance(message, Offer))
    path = cluster.scheduler.sequences["a"].path
    candidates = [to for _, sender, to, message in cluster.sent if isinstance(message, Offer) and sender == offer[0]]
    first = next((sender for _, sender, _, message in cluster.sent if isinstance(message, Bid)), candidates[0])
    others = [each for each in candidates if each != first]
    cluster.kill({"offerer": offer[0], "winner": first, "loser": others[0], "first": path[0].device}[victim])
    cluster.run()
    cluster.expect()
    once(cluster)


def test_when_all_candidates_die_it_runs_again() -> None:
    cluster = cluster_of(latency=MS)
    cluster.ask(request("a", range(18), "m", max_tokens=8), at=cluster.now)
    while not messages(cluster, Offer):
        cluster.run_one()
    for to in [to for _, _, to, message in cluster.sent if isinstance(message, Offer)]:
        cluster.kill(to)
    cluster.run()
    cluster.expect()
    once(cluster)


def at_random(seed: int) -> Copies:
    """Run a random schedule of deaths, moves, aborts and few pages, and check its end."""
    rng = random.Random(seed)
    cluster = cluster_of(
        rng.choice((2, 3)), pages=rng.choice((30, 60, 200)), latency=rng.choice((MS // 100, MS // 4, 2 * MS)),
        restart=rng.choice((5, 40)) * MS, page_bytes_per_ms=rng.choice((1e9, 200.0)),
    )  # fmt: skip
    costs = random.Random(seed + 1)
    cluster.costs = lambda plan: costs.choice((MS // 4, MS, 3 * MS))
    begin = cluster.now
    gone = []
    for number in range(14):
        one = request(f"s{number}", range(1 + rng.randrange(24)), rng.choice("mn"), max_tokens=rng.randrange(1, 20))
        at = begin + rng.randrange(60 * MS)
        cluster.ask(one, at=at)
        if rng.random() < 0.2:
            gone.append(one.seq)
            cluster.abort(one.seq, at + rng.randrange(20 * MS))
    for _ in range(rng.randrange(5)):
        cluster.at(begin + rng.randrange(80 * MS), lambda: cluster.kill(f"d{rng.randrange(6)}"))
    for _ in range(15):
        cluster.at(begin + rng.randrange(80 * MS), lambda: cluster.migrate_some(rng) and None)
    cluster.run()
    for seq in gone:
        del cluster.requests[seq]
    cluster.expect()
    once(cluster)
    return cluster


@pytest.mark.parametrize("seed", range(12))
def test_never_two_executions_of_a_hop_and_never_none(seed: int) -> None:
    at_random(seed)


def test_the_schedules_do_have_offers_deaths_and_moves() -> None:
    seen: Counter[str] = Counter()
    for seed in range(20, 26):
        cluster = at_random(seed)
        seen["won"] += cluster.scheduler.offers.settled
        seen["deaths"] += len(cluster.trace.named("fault"))
        seen["moves"] += cluster.scheduler.migrations.counts().committed
        seen["preempted"] += cluster.scheduler.state().counters.preemptions
    assert min(seen[name] for name in ("won", "deaths", "moves", "preempted")) > 0, seen


def test_the_same_schedule_twice_is_the_same() -> None:
    def digest() -> str:
        told = hashlib.blake2b()
        for entry in (cluster := at_random(3)).sent:
            told.update(repr(entry).encode())
        return told.hexdigest() + str(cluster.now)

    assert digest() == digest()
