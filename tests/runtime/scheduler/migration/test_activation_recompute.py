"""Moves of blocks in the middle of a chain, recomputed from kept hidden states (BL-16), one by one and at random.

Tokens depend on every bit of K and V, so a hidden state that is stale, missing or of another sequence changes a
token.
"""

from __future__ import annotations

import random

import pytest

from runtime.config import AgentConfig, ClusterConfig
from runtime.control.scheduler_io import Tick
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import FinishMigration, PageData, PageRequest, StartMigration
from runtime.scheduler.migration.migration import Migration
from runtime.types import TraceEvent
from tests.runtime.scheduler.test_scheduler import CUTS, M, N, some
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Two blocks; the second has three layers and takes 8 bytes of hidden states per token as input.
TWO = counting_model("two", "1 2* 3* 4* 5", page_tokens=4, max_model_len=512)
MIDDLE = range(1, 2)


def cluster_of(kept: int = 1 << 30, **changes: object) -> VirtualCluster:
    fields = dict(
        devices=3,
        pages=400,
        config=ClusterConfig(devices=3, placement="partition", prefill_chunk=8),
        page_bytes_per_ms=400.0,
        agent_config=AgentConfig(recompute_chunk=8, fetch_window=1, activation_cache_bytes=kept),
    )
    return VirtualCluster([TWO], [(1,)], **(fields | changes))  # type: ignore[arg-type]


def reach(cluster: VirtualCluster, condition, most: int = 20_000) -> None:  # type: ignore[no-untyped-def]
    for _ in range(most):
        if condition():
            return
        assert cluster._heap, "the moment never comes"
        cluster.run_one()
    raise AssertionError("the moment never comes")


def rest(cluster: VirtualCluster, seq: str = "a", tokens: int = 1) -> None:
    """Run until the sequence has so many tokens, then hold it."""
    reach(cluster, lambda: len(cluster.told[seq].tokens) >= tokens)
    cluster.scheduler.sequences[seq].hold(True)
    reach(cluster, lambda: not cluster.scheduler.sequences[seq].flying)


def go_on(cluster: VirtualCluster, seq: str = "a") -> None:
    sequence = cluster.scheduler.sequences[seq]
    sequence.hold(False)
    cluster.scheduler._state.ready.append(sequence)
    cluster.tell(Tick())


def move(cluster: VirtualCluster, target: str, seq: str = "a", **ends: bool) -> Migration:
    """Start a move, with the sequence held or running; what it needs at the destination is loaded first."""
    while cluster.migrate(seq, MIDDLE, target, **ends) is not None:
        cluster.run_one()
    return next(iter(cluster.scheduler.migrations))


def ended(cluster: VirtualCluster, times: int = 1) -> TraceEvent:
    reach(cluster, lambda: len(cluster.trace.named("kv.meet")) >= times)
    return cluster.trace.named("kv.meet")[-1]


def spans(event: TraceEvent, which: str) -> list[tuple[int, int]]:
    return [tuple(span) for span in event.extra[which]]  # type: ignore[misc]


def finish(cluster: VirtualCluster) -> None:
    cluster.run()
    cluster.expect()


# -- hidden states kept in part ----------------------------------------------------------------------------------------


def test_a_beginning_that_was_let_go_is_copied_first_and_the_front_goes_on_behind_it() -> None:
    cluster = cluster_of(kept=4 * (256 + 64))  # the last four chunks of eight tokens
    cluster.ask(request("a", range(64), "two", max_tokens=6))
    rest(cluster)
    move(cluster, "d2")
    meet = ended(cluster)
    ((lo, hi),) = spans(meet, "recomputed")
    assert lo >= 64 - 4 * 8 - 8 and hi - lo >= 8 and spans(meet, "copied")[0] == (0, lo)
    assert "is not kept" in cluster.trace.named("kv.copy")[0].extra["reason"]
    finish(cluster)


def test_what_came_by_a_move_is_kept_as_far_as_it_was_recomputed() -> None:
    cluster = cluster_of()
    cluster.ask(request("a", range(64), "two", max_tokens=30))
    rest(cluster)
    move(cluster, "d2")
    first = ended(cluster)
    here = spans(first, "recomputed")
    assert here and spans(first, "copied")
    kept = cluster.nodes["d2"].agent._kept
    assert list(kept.spans("a", 1)) == here
    reach(cluster, lambda: len(cluster.told["a"].tokens) >= 12)
    rest(cluster)
    back = next(name for name in ("d0", "d1") if name not in cluster.scheduler.sequences["a"].place.devices)
    move(cluster, back)
    second = ended(cluster, 2)
    for lo, _ in spans(second, "recomputed"):  # tokens that had been copied cannot be recomputed
        assert any(a <= lo < b for a, b in here) or lo >= spans(first, "copied")[-1][1]
    assert spans(second, "recomputed")
    finish(cluster)


def test_a_newcomer_that_shares_a_beginning_has_it_copied() -> None:
    cluster = cluster_of()
    cluster.ask(request("a", range(48), "two", max_tokens=60))
    reach(cluster, lambda: cluster.told["a"].tokens)
    cluster.ask(request("b", [*range(32), *range(60, 92)], "two", max_tokens=12), at=cluster.now)
    reach(cluster, lambda: cluster.trace.named("kv.ref"))
    shared = cluster.trace.named("kv.ref")[0].extra["tokens"]
    rest(cluster, "b")
    move(cluster, "d2", "b")
    meet = ended(cluster)
    assert shared == 32 and spans(meet, "recomputed")[0][0] == shared and spans(meet, "copied")[0] == (0, shared)
    finish(cluster)


def test_without_a_back_what_is_not_kept_cannot_be_had() -> None:
    cluster = cluster_of(kept=4 * (256 + 64))
    cluster.ask(request("a", range(64), "two", max_tokens=6))
    rest(cluster)
    move(cluster, "d2", copy=False)
    reach(cluster, lambda: cluster.trace.named("kv.move.abort"))
    finish(cluster)
    assert cluster.scheduler.migrations.counts().committed == 0


def test_a_run_that_begins_within_a_stage_has_no_inputs() -> None:
    cluster = VirtualCluster(
        [M], [(1, 3, 4)], devices=2, config=ClusterConfig(devices=2, placement="partition"),
        agent_config=AgentConfig(recompute_chunk=8, fetch_window=1, activation_cache_bytes=1 << 20),
    )  # fmt: skip
    cluster.ask(request("a", range(20), "m", max_tokens=9))
    rest(cluster)
    (first, second) = cluster.scheduler.sequences["a"].path
    last = range(len(CUTS[0]), len(CUTS[0]) + 1)
    assert second.lo < cluster.scheduler.sequences["a"].chain.uses[last.start].lo
    while cluster.migrate("a", last, first.device) is not None:
        cluster.run_one()
    ended(cluster)
    finish(cluster)
    (start,) = cluster.trace.named("kv.move.start")
    assert start.extra["front"] == "none" and not cluster.trace.named("kv.recompute")


# -- events during a move ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [{}, {"copy": False}], ids=["both-ends", "recompute"])
def test_it_grows_while_it_moves(ends: dict[str, bool]) -> None:
    cluster = cluster_of(page_bytes_per_ms=60.0)
    cluster.ask(request("a", range(64), "two", max_tokens=120))
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    made = move(cluster, "d2", **ends)
    before = len(cluster.told["a"].tokens)
    meet = ended(cluster)
    assert len(cluster.told["a"].tokens) > before and made.stages > 1
    assert spans(meet, "recomputed") and bool(spans(meet, "copied")) == (not ends)
    finish(cluster)


@pytest.mark.parametrize("victim", ["source", "target", "other"])
@pytest.mark.parametrize("kind", [StartMigration, PageRequest, PageData, FinishMigration])
def test_a_device_dies(kind: type, victim: str) -> None:
    """A device dies while a message of hidden states or pages is under way."""
    cluster = cluster_of()
    cluster.ask(request("a", range(64), "two", max_tokens=20), request("b", range(9), "two", max_tokens=9))
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    made = move(cluster, "d2")
    names = {"source": made.source, "target": made.target, "other": made.path[0].device}

    def said() -> bool:
        """Return whether such a message is among the latest, for `PageRequest` and `PageData` one of hidden states."""
        return any(isinstance(each[3], kind) and getattr(each[3], "before", 1) == 1 for each in cluster.sent[-5:])

    reach(cluster, said)
    cluster.kill(names[victim])
    finish(cluster)
    assert cluster.trace.named("fault")


def incoming(cluster: VirtualCluster):  # type: ignore[no-untyped-def]
    return next(iter(cluster.nodes["d2"].agent._moves._incoming.values()), None)


def test_recomputing_goes_on_without_the_source_where_all_inputs_have_come() -> None:
    cluster = cluster_of(beta=MS)
    cluster.ask(request("a", range(30), "two", max_tokens=20))
    rest(cluster)
    made = move(cluster, "d2", copy=False)
    reach(
        cluster,
        lambda: (
            (one := incoming(cluster))
            and one.ends._counts[0] == 0
            and not one.fetch.waiting
            and not one.ends.is_complete
        ),
    )
    cluster.kill(made.source)
    ended(cluster)
    finish(cluster)
    assert cluster.scheduler.migrations.counts().committed == 1 and not cluster.trace.named("batch.preempt")


def test_without_the_source_it_runs_again_where_inputs_are_missing() -> None:
    cluster = cluster_of(beta=MS)
    cluster.ask(request("a", range(60), "two", max_tokens=20))
    rest(cluster)
    made = move(cluster, "d2", copy=False)
    reach(cluster, lambda: (one := incoming(cluster)) and one.ends._counts[0] > 0 and one.ends._counts[3] > 0)
    cluster.kill(made.source)
    finish(cluster)
    assert cluster.scheduler.migrations.counts().committed == 0 and cluster.trace.named("batch.preempt")


def test_what_has_grown_when_the_source_is_gone_is_not_waited_for() -> None:
    """All requested pages are there; the source dies after more was computed, which no device can send."""
    cluster = cluster_of(page_bytes_per_ms=1e9, latency=MS // 100)
    cluster.ask(request("a", range(30), "two", max_tokens=60))
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    made = move(cluster, "d2")
    reach(cluster, lambda: (one := incoming(cluster)) and one.ends.is_complete)
    reach(cluster, lambda: made.sequence.computed > made.upto)
    cluster.kill(made.source)
    finish(cluster)


def test_hidden_states_that_do_not_verify_are_not_used() -> None:
    cluster = cluster_of(damage=lambda pages: pages.before > 0)
    cluster.ask(request("a", range(64), "two", max_tokens=20))
    rest(cluster)
    move(cluster, "d2")
    meet = ended(cluster)
    assert not spans(meet, "recomputed") and "do not verify" in cluster.trace.named("kv.copy")[0].extra["reason"]
    finish(cluster)


def test_what_an_older_epoch_asks_for_is_refused() -> None:
    cluster = cluster_of()
    cluster.ask(request("a", range(20), "two", max_tokens=9))
    rest(cluster)
    sequence = cluster.scheduler.sequences["a"]
    source = cluster.nodes[sequence.path[1].device].agent
    want = PageRequest(1, "a", sequence.epoch, (0, 3), 0, 8, "d2", 1)
    (given,) = source.handle(want, (), cluster.now)
    assert type(given).__name__ == "SendActivations" and given.message.kept == ((0, sequence.computed),)
    for stale in (
        PageRequest(1, "a", sequence.epoch - 1, (0, 3), 0, 8, "d2", 1),
        PageRequest(1, "a", sequence.epoch, (0, 3), 0, 8, "d2", 2),
    ):
        (refused,) = source.handle(stale, (), cluster.now)
        assert refused.message.error and not refused.message.kept and not refused.arrays
    (beyond,) = source.handle(PageRequest(1, "a", sequence.epoch, (0, 3), 0, 99, "d2", 1), (), cluster.now)
    assert beyond.message.error and beyond.message.kept == ((0, sequence.computed),)
    go_on(cluster)
    finish(cluster)


@pytest.mark.parametrize("phase", range(0, 30, 3))
def test_an_abort_in_every_phase_leaves_nothing(phase: int) -> None:
    cluster = cluster_of()
    cluster.ask(request("a", range(64), "two", max_tokens=20))
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    move(cluster, "d2")
    for _ in range(phase):
        cluster.run_one()
    cluster.abort("a", cluster.now)
    cluster.run()
    cluster.expect_empty()


# -- random schedules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(30))
def test_migrations_of_every_kind_change_no_token(seed: int) -> None:
    rng = random.Random(seed)
    kept, chunk, window = rng.choice((2000, 20_000, 1 << 20)), rng.choice((4, 8, 64)), rng.choice((1, 2, 5))
    cluster = VirtualCluster(
        [M, N],
        CUTS,
        devices=3,
        pages=rng.choice((120, 400)),
        config=ClusterConfig(devices=3, placement="partition", prefill_chunk=rng.choice((4, 64))),
        agent_config=AgentConfig(
            recompute_chunk=chunk, fetch_window=window, page_timeout_ms=200, activation_cache_bytes=kept
        ),
        page_bytes_per_ms=rng.choice((1e9, 200.0, 20.0)),
        latency=rng.choice((MS // 100, MS // 4)),
    )
    deaths = seed % 2
    if rng.random() < 0.3:
        cluster.damage = lambda pages: rng.random() < 0.2
    for one in some(14, seed):
        cluster.ask(one, at=rng.randrange(20 * MS))

    def one_of_them() -> None:
        cluster.migrate_some(rng, **rng.choice(({}, {}, {"copy": False}, {"recompute": False})))

    for _ in range(60):
        cluster.at(rng.randrange(80 * MS), one_of_them)
    for _ in range(4 * deaths):
        cluster.at(rng.randrange(100 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    cluster.run()
    cluster.expect()
    counts = cluster.scheduler.migrations.counts()
    assert counts.started == counts.committed + counts.aborted
    if seed == 0:
        assert counts.inputs > 0


@pytest.mark.parametrize("lost", range(8))
@pytest.mark.parametrize("ends", [{}, {"copy": False}], ids=["both-ends", "recompute"])
@pytest.mark.parametrize("speed", [200.0, 2000.0, 50_000.0])
def test_one_portion_that_does_not_verify_is_brought_again(lost: int, ends: dict[str, bool], speed: float) -> None:
    """Whichever portion it is, and whatever was requested after it, nothing waits for ever."""
    count = 0

    def damage(pages: PageData) -> bool:
        nonlocal count
        count += pages.before > 0
        return pages.before > 0 and count == lost + 1

    cluster = cluster_of(damage=damage, page_bytes_per_ms=speed)
    cluster.ask(request("a", range(96), "two", max_tokens=8))
    rest(cluster)
    move(cluster, "d2", **ends)
    ended(cluster)
    finish(cluster)
