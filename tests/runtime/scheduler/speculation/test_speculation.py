"""Speculated hops: exact mode gives the chain's own tokens always, similarity mode also similar ones.

Page accounting is checked after every event.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.chains import Likeness, Surrogate
from runtime.config import AgentConfig, ClusterConfig, SpeculationConfig
from runtime.control.scheduler_io import PauseSequence, ResumeSequence, Tick
from runtime.engine.fakes.integer_model import IntegerModel, counting_model, expected, surrogate_of
from runtime.messages import AgentStats, ForwardRows, OpenSequences, RunRows, SpeculationResult
from runtime.types import SequenceRequest, StepPlan
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

CUT = (2, 5)
#: A small vocabulary, so that a wrong prediction often gives the right token.
M = counting_model("m", "1* 2 3* 4* 5 6* 7 8", vocab_size=3)


def cluster_of(
    misses: int,
    mode: str = "exact",
    *,
    model: IntegerModel = M,
    middle: int = 4,
    devices: int = 3,
    pinned: bool = True,
    top: float = 0.4,
    threshold: float = 0.95,
    **others,
) -> VirtualCluster:
    """A cluster with a chain of three hops, whose second hop a stand-in predicts.

    The stand-in is wrong for one value in `misses` (0: for none).
    """
    stand_in = surrogate_of(model, "m~", middle, misses)
    speculation = SpeculationConfig(mode, top=top, threshold=threshold)  # type: ignore[arg-type]
    config = ClusterConfig(devices=devices, placement="partition", speculation=speculation)
    cluster = VirtualCluster(
        [model],
        [CUT],
        devices=devices,
        config=config,
        stand_ins=[stand_in],
        surrogates={"m": [Surrogate("m~", middle, middle + 1, 1)]},
        **others,
    )
    if pinned:
        block = model.chain(*CUT).uses[1].block
        cluster.scheduler.speculation.pin([(block, f"d{at}") for at in range(devices)])
    return cluster


def some(count: int, seed: int, **changes: object) -> list[SequenceRequest]:
    rng = random.Random(seed)
    return [
        request(
            f"s{number}",
            [rng.randrange(3) for _ in range(rng.randrange(1, 24))],
            "m",
            max_tokens=rng.randrange(1, 20),
            **changes,
        )
        for number in range(count)
    ]


def warm(cluster: VirtualCluster) -> None:
    """Send a first request, which makes devices load the stand-in."""
    cluster.ask(request("warm", (1,), "m", max_tokens=1))


def ask(cluster: VirtualCluster, asked: list[SequenceRequest], rng: random.Random, within: int = 30 * MS) -> None:
    warm(cluster)
    for one in asked:
        cluster.ask(one, at=5 * MS + rng.randrange(within))


def slow_second_hop(plan: StepPlan) -> int:
    return 10 * MS if any(row.model == "m[2:5]" for row in plan.rows) else MS


def report_every_5_ms(cluster: VirtualCluster) -> None:
    """Tell the scheduler what the devices report, and that time has passed, from 1 ms on."""

    def beat() -> None:
        for node in cluster.living():
            cluster.tell(node.agent.report())
        cluster.carry_out(cluster.scheduler.handle(Tick(), cluster.now))
        if cluster.scheduler.busy:
            cluster.at(cluster.now + 5 * MS, beat)

    cluster.at(MS, beat)


def passed(cluster: VirtualCluster, odd: bool) -> int:
    return sum(
        (attempt % 2 == 1) is odd
        for _, _, _, message in cluster.sent
        if isinstance(message, ForwardRows)
        for attempt in message.attempts
    )


@pytest.mark.parametrize("misses", [0, 1, 2, 5])
def test_exact_tokens_are_the_chains_own_however_often_a_stand_in_is_wrong(misses: int) -> None:
    cluster = cluster_of(misses)
    ask(cluster, some(12, misses), random.Random(misses))
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.speculation.counts()
    assert counts.started > 50 and counts.guesses > 0
    assert (counts.misses > 0, counts.redone > 0) == (misses > 0, misses > 0)
    assert passed(cluster, odd=True) > 50
    if misses == 1:
        assert counts.hits > 0  # where the token is right by chance


@pytest.mark.parametrize("seed", range(12))
def test_exact_through_deaths_aborts_preemptions_and_moves(seed: int) -> None:
    rng = random.Random(seed)
    cluster = cluster_of(
        rng.choice((0, 2, 5)), pages=rng.choice((70, 90, 300)), latency=rng.choice((MS // 100, MS // 4)),
        agent_config=AgentConfig(recompute_chunk=rng.choice((4, 64)), fetch_window=rng.choice((1, 4))),
        page_bytes_per_ms=rng.choice((1e9, 200.0)),
        costs=lambda plan, rng=rng: rng.choice((MS // 4, MS, 3 * MS)), lanes=rng.choice((("all",), ("real", "ahead"))),
    )  # fmt: skip
    asked = some(16, seed)
    ask(cluster, asked, rng)
    gone = asked[::4] if seed % 2 else []
    for one in gone:
        cluster.abort(one.seq, rng.randrange(5 * MS, 80 * MS))
    for _ in range(3 if seed % 3 == 0 else 0):
        cluster.at(rng.randrange(100 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    for _ in range(30 if seed % 3 else 0):
        cluster.at(rng.randrange(80 * MS), lambda: cluster.migrate_some(rng) and None)
    cluster.run()
    cluster.requests = {seq: one for seq, one in cluster.requests.items() if one not in gone}
    cluster.expect()
    counts = cluster.scheduler.speculation.counts()
    assert counts.started > 0 and counts.hits + counts.misses <= counts.started


def test_pages_of_stand_ins_are_taken_with_the_sequences_own() -> None:
    """Short of pages, a sequence is preempted, and all tokens stay right.

    A sequence that cannot get pages for a stand-in runs without one.
    """
    cluster = cluster_of(3, pages=44)
    ask(cluster, some(16, 5), random.Random(5))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.preemptions > 0
    assert cluster.scheduler.speculation.counts().started > 0


@pytest.mark.parametrize("misses", [0, 1, 4])
def test_similarity_takes_what_is_alike_and_runs_again_what_is_not(misses: int) -> None:
    """Only equal values count as similar here: misses are rolled back, and after a hit no later hop runs twice."""
    cluster = cluster_of(misses, "similarity")
    asked = [replace(one, adaptive=True) for one in some(12, misses)]
    ask(cluster, asked, random.Random(misses))
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.speculation.counts()
    assert (counts.hits > 0, counts.misses > 0) == (misses != 1, misses > 0)
    verdicts = [
        stands
        for _, _, _, message in cluster.sent
        if isinstance(message, SpeculationResult)
        for stands in message.stands
    ]
    assert counts.hits <= verdicts.count(True) and counts.misses <= verdicts.count(False)
    assert (
        len(verdicts) - counts.hits - counts.misses <= counts.redone
    )  # the rest are verdicts on rows that were sent with a wrong token
    events = cluster.trace
    assert len(events.named("spec.hit")) == counts.hits and len(events.named("spec.miss")) == counts.misses
    assert (
        len(events.named("spec.start"))
        == counts.started
        >= len(events.named("spec.verify"))
        >= counts.hits + counts.misses
    )


@pytest.mark.parametrize(("threshold", "cosine"), [(0.95, 0.96), (0.9, 0.92), (0.97, 0.96)])
def test_lossy_predictions_stand_for_those_alone_who_allow_it(threshold: float, cosine: float) -> None:
    """Adaptive requests get the stand-in's tokens where its values are similar enough, exact ones never."""
    cluster = cluster_of(2, "similarity", threshold=threshold, alike=lambda a, b: Likeness(a.data == b.data, cosine))
    warm(cluster)
    prompt = (1, 2, 0, 1)
    asked = request("exact", prompt, "m", max_tokens=12)
    cluster.ask(replace(asked, seq="lossy", adaptive=True), asked, at=10 * MS)
    cluster.run()
    cluster.expect_empty()
    own, other = (
        expected(model, prompt, cluster.requests["exact"].sampling) for model in (M, surrogate_of(M, "m~", 4, 2))
    )
    assert own != other
    lossy = other if cosine >= threshold else own
    assert (cluster.told["exact"].tokens, cluster.told["lossy"].tokens) == (own, lossy)


def test_the_last_hop_and_neighbours_are_never_predicted() -> None:
    """At most one hop of a path is speculated, never the last one, whatever blocks are pinned."""
    cluster = cluster_of(3, pinned=False)
    uses = M.chain(*CUT).uses
    everything = [(use.block, f"d{at}") for use in reversed(uses) for at in range(3)]
    stand_ins = [surrogate_of(M, f"m{part}", part, 3) for part in (1, 4, 6)]
    cluster.stand_ins = stand_ins
    cluster.scheduler.speculation._surrogates = {"m": [Surrogate(f"m{part}", part, part + 1, 1) for part in (1, 4, 6)]}
    cluster.scheduler.speculation.pin(everything)
    ask(cluster, some(12, 3), random.Random(3))
    cluster.run()
    cluster.expect()
    started = cluster.trace.named("spec.start")
    assert started and all(event.extra["hop"] < event.extra["of"] - 1 for event in started)
    assert all(len({e.extra["hop"] for e in started if e.seq == seq}) <= 1 for seq in cluster.requests)


@pytest.mark.parametrize("top", [0.4, 0.0])
def test_ticks_choose_the_longest_queues(top: float) -> None:
    """Reports select the slowest hop, and none while no row waits, or with a share of 0; tokens stay the same."""
    cluster = cluster_of(4, pinned=False, top=top, costs=slow_second_hop)
    report_every_5_ms(cluster)
    ask(cluster, some(14, 9), random.Random(9), within=100 * MS)
    cluster.run(until=MS)
    assert cluster.scheduler.speculation.chosen == ()
    cluster.at(60 * MS, lambda: seen.extend(cluster.scheduler.speculation.chosen))
    seen: list[tuple[str, str]] = []
    cluster.run()
    cluster.expect()
    assert [block for block, _ in seen] == ([M.chain(*CUT).uses[1].block] if top else [])
    assert (cluster.scheduler.speculation.counts().hits > 0) is (top > 0)


@pytest.mark.parametrize(("misses", "ends"), [(1, True), (0, False)])
def test_predictions_that_are_wrong_too_often_end_and_tokens_stay(misses: int, ends: bool) -> None:
    """A stand-in that is always wrong is given up, for running sequences too; one that is right stays in use."""
    cluster = cluster_of(misses, pinned=False, costs=slow_second_hop)
    report_every_5_ms(cluster)
    warm(cluster)
    for number in range(20):
        cluster.ask(request(f"s{number}", (number % 3, 1), "m", max_tokens=30), at=(5 + 7 * number) * MS)
    cluster.run()
    cluster.expect()
    told, counts = cluster.trace.named("spec.end"), cluster.scheduler.speculation.counts()
    assert bool(told) == ends == (cluster.scheduler.state().counters.speculations_ended > 0)
    if not ends:
        assert counts.hits > 100
        return
    assert (
        told[0].block == M.chain(*CUT).uses[1].block
        and told[0].extra["rate"] < told[0].extra["needed"]
        and told[0].extra["of"] == 32
    )
    began = [event.t for event in cluster.trace.named("spec.start") if event.dev == told[0].dev]
    assert not [at for at in began if told[0].t < at < told[0].t + 60 * 5 * MS], "none until it has rested"


def test_off_is_as_if_there_were_none() -> None:
    """Negative control: the same messages as without surrogates, and no speculation event in the trace."""
    sent = []
    for mode in ("off", "none"):
        cluster = cluster_of(2, "off", pinned=False)
        if mode == "none":
            cluster.scheduler.speculation._surrogates = {}
        cluster.at(30 * MS, lambda cluster=cluster: cluster.tell(Tick()))
        ask(cluster, some(6, 1), random.Random(1))
        cluster.run()
        cluster.expect()
        assert not [event for event in cluster.trace.events if event.ev.startswith("spec.")]
        sent.append(
            [
                (now, to, type(message), message if not isinstance(message, ForwardRows) else message.attempts)
                for now, _, to, message in cluster.sent
            ]
        )
    assert sent[0] == sent[1]


def test_off_nothing_is_remembered_of_queues() -> None:
    """Queues of blocks that are gone would never be removed."""
    cluster = cluster_of(0, "off")
    for version in range(20):
        cluster.tell(AgentStats("d0", 5, 1, MS, 1, 9, ((f"block {version}", 5),)))
        cluster.tell(Tick())
    assert not cluster.scheduler.speculation._queued and not cluster.scheduler.speculation._reports


def test_nothing_is_predicted_during_a_move() -> None:
    """UN-13: no row of a sequence is speculated from the start of its move on."""
    cluster = cluster_of(3, page_bytes_per_ms=20.0)
    rng = random.Random(4)
    ask(cluster, some(12, 4), rng)
    for _ in range(40):
        cluster.at(rng.randrange(80 * MS), lambda: cluster.migrate_some(rng) and None)
    cluster.run()
    cluster.expect()
    moving: set[str | None] = set()
    starts = moves = 0
    for event in cluster.trace.events:
        if event.ev == "kv.move.start":
            moving.add(event.seq)
            moves += 1
        elif event.ev == "kv.move.abort" or event.ev == "batch.preempt":
            moving.discard(event.seq)
        elif event.ev == "spec.start":
            assert event.seq not in moving
            starts += 1
    assert starts and moves and cluster.scheduler.migrations.counts().committed


@pytest.mark.parametrize("pinned", [True, False])
def test_what_is_predicted_is_never_shared(pinned: bool) -> None:
    """UN-13: a later request with the same prefix shares it only with sequences that are not speculated.

    The case without speculation is the negative control.
    """
    cluster = cluster_of(3, pinned=pinned)
    warm(cluster)
    for number in range(4):
        cluster.ask(request(f"s{number}", [1, 2, 0, 1] * 4, "m", max_tokens=20), at=(10 + 8 * number) * MS)
    cluster.run()
    cluster.expect()
    assert (cluster.scheduler.speculation.counts().started > 0) == pinned
    assert (cluster.trace.named("kv.ref") == []) == pinned


def test_a_pause_begins_behind_what_is_under_way_however_well_it_is_predicted() -> None:
    slow = {"m[2:5]": 4 * MS}  # slow, so that the successor of a speculated row starts from a guess
    cluster = cluster_of(
        0,
        lanes=("real", "ahead"),
        costs=lambda plan: max((slow.get(row.model, MS // 4) for row in plan.rows), default=0),
    )
    warm(cluster)
    cluster.ask(request("s", range(3), "m", max_tokens=50), at=5 * MS)
    cluster.at(40 * MS, lambda: cluster.tell(PauseSequence("s")))
    cluster.at(400 * MS, lambda: cluster.tell(ResumeSequence("s")))
    cluster.run()
    cluster.expect()
    sent = [when for when, _, _, message in cluster.sent if isinstance(message, RunRows) and "s" in message.seqs]
    assert cluster.scheduler.speculation.counts().guesses > 0 and max(sent) > 400 * MS
    assert not [when for when in sent if 40 * MS < when < 400 * MS]


@pytest.mark.parametrize("misses", [0, 3])
def test_a_path_may_come_back_to_a_device_behind_what_is_predicted(misses: int) -> None:
    """Path d0, d1, d0: on d0, a speculated row at the last hop is not superseded by the real row at the first hop."""
    cluster = cluster_of(misses)
    last = M.chain(*CUT).uses[2].block

    def bring_back() -> None:
        cluster.scheduler.block_map.add(last, "d0")
        cluster.scheduler.block_map.remove(last, "d2")

    cluster.at(2 * MS, bring_back)
    for one in some(8, misses):
        cluster.ask(one, at=6 * MS)
    cluster.at(3 * MS, lambda: warm(cluster))
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.speculation.counts()
    assert counts.hits > 0 and (counts.misses > 0) == (misses > 0)
    assert {
        hop.device for one in cluster.sent if isinstance(one[3], OpenSequences) for path in one[3].paths for hop in path
    } <= {
        "d0",
        "d1",
    }
