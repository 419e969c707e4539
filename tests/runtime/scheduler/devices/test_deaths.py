"""A device dies in each phase of its work: the test waits for the event, then kills the device.

Every sequence gets its model's tokens, each once; page accounting agrees after every event, and at the end nothing
is held. `tests/runtime/cluster/test_deaths.py` does the same to processes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from runtime.chains import Stage, Surrogate, devices_of
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, SpeculationConfig
from runtime.control.scheduler_io import AgentDown, ModelUpdated
from runtime.engine.fakes.integer_model import counting_model, surrogate_of
from runtime.messages import (
    CloseSequences,
    FinishMigration,
    ForwardRows,
    MigrationReady,
    OpenSequences,
    PageData,
    PageRequest,
    RowsDone,
    RowsLost,
    RunRows,
    SpeculationResult,
    StageReady,
    StartMigration,
    UnloadStages,
)
from runtime.scheduler.migration.migration import Migration
from runtime.scheduler.sequences.sequence import ScheduledSequence
from tests.runtime.scheduler.changing import Changing, as_version, serve
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

#: Each of its three blocks has attention; `partition` puts them on three devices.
M = counting_model("m", "1 2* 3 4* 5 6* 7 8", max_model_len=128)
CUT = (2, 5)
HOPS = (0, 1, 2)
#: Slow enough that a transfer is seen under way.
SLOW = 100.0


def cluster_of(**changes) -> VirtualCluster:
    config = ClusterConfig(devices=3, placement="partition", prefill_chunk=8)
    fields = dict(
        devices=3,
        pages=200,
        config=config,
        agent_config=AgentConfig(recompute_chunk=8, fetch_window=1),
        page_bytes_per_ms=SLOW,
    )
    return VirtualCluster([M], [CUT], **(fields | changes))  # type: ignore[arg-type]


def busy(**changes) -> VirtualCluster:
    """A cluster with two sequences: `a` is the longer one, with a prompt of several chunks."""
    cluster = cluster_of(**changes)
    cluster.ask(request("a", range(18), "m", max_tokens=16))
    cluster.ask(request("b", range(5), "m", max_tokens=8), at=3 * MS)
    return cluster


def reach(cluster: VirtualCluster, condition: Callable[[], object], most: int = 20_000) -> None:
    """Run events until the condition holds; fail if it never does, since the test would then prove nothing."""
    for _ in range(most):
        if condition():
            return
        assert cluster._heap, "the moment never comes"
        cluster.run_one()
    raise AssertionError("the moment never comes")


def sequence(cluster: VirtualCluster, seq: str = "a") -> ScheduledSequence | None:
    """Return the sequence while it runs."""
    found = cluster.scheduler.sequences.get(seq)
    return found if found is not None and found.path else None


def said(cluster: VirtualCluster, kind: type, to: str | None = None) -> bool:
    """Return whether the latest message is of that kind, so that it is under way."""
    return bool(cluster.sent) and isinstance(cluster.sent[-1][3], kind) and to in (None, cluster.sent[-1][2])


def kill_and_finish(cluster: VirtualCluster, *devices: str) -> None:
    """Kill devices now, run to the end, and assert that all sequences finish and the devices are back."""
    deaths = len(cluster.trace.named("fault"))
    for device in devices:
        assert cluster.nodes[device].alive
        cluster.kill(device)
    cluster.run()
    cluster.expect()
    assert len(cluster.trace.named("fault")) >= deaths + len(devices)
    assert all(cluster.scheduler.devices.alive(device) for device in devices)


# -- start and restart of a device -------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["d0", "d1", "d2"])
def test_before_anybody_knows_that_it_is_there(device: str) -> None:
    cluster = busy()
    reach(cluster, lambda: device in cluster.nodes)
    kill_and_finish(cluster, device)


@pytest.mark.parametrize("device", ["d0", "d1", "d2"])
def test_while_it_loads_a_stage(device: str) -> None:
    cluster = busy()
    reach(
        cluster,
        lambda: device in {each.name for each in cluster.scheduler.devices if each.stages.loading and each.alive},
    )
    kill_and_finish(cluster, device)


@pytest.mark.parametrize("device", ["d0", "d1", "d2"])
def test_while_its_stage_is_loaded_but_nobody_knows(device: str) -> None:
    cluster = busy()
    reach(cluster, lambda: said(cluster, StageReady) and cluster.sent[-1][1] == device)
    kill_and_finish(cluster, device)


@pytest.mark.parametrize("device", ["d0", "d1", "d2"])
def test_while_it_is_idle(device: str) -> None:
    cluster = busy()
    cluster.run()
    cluster.kill(device)
    cluster.ask(request("later", range(12), "m", max_tokens=9), at=cluster.now)  # it comes before the death is known
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("again", ["d0", "d1", "d2"])
@pytest.mark.parametrize("phase", ["starting", "loading", "loaded"])
def test_while_another_takes_its_place(phase: str, again: str) -> None:
    """The restarted device dies too, or another device dies meanwhile."""
    cluster = busy()
    reach(cluster, lambda: (a := sequence(cluster)) is not None and a.phase == "decode")
    first = cluster.nodes["d1"]
    cluster.kill("d1")
    device = cluster.scheduler.devices

    def reached() -> bool:
        if cluster.nodes["d1"] is first:
            return False
        return {
            "starting": not device["d1"].alive,
            "loading": bool(device["d1"].stages.loading),
            "loaded": said(cluster, StageReady),
        }[phase]

    reach(cluster, reached)
    kill_and_finish(cluster, again)


# -- rows --------------------------------------------------------------------------------------------------------------


def running(cluster: VirtualCluster, seq: str, phase: str, hop: int) -> bool:
    """Return whether a step with a row of the sequence runs at this hop."""
    one = sequence(cluster, seq)
    if one is None or one.phase != phase or not one.flying or hop >= len(one.path):
        return False
    node = cluster.nodes[one.path[hop].device]
    rows = node.agent._steps.running()
    return bool(node.running) and any(each.sequence.seq == seq and each.hop == hop for each in rows)


@pytest.mark.parametrize("victim", HOPS)
@pytest.mark.parametrize("hop", HOPS)
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_while_rows_run(phase: str, hop: int, victim: int) -> None:
    """Kill the device that runs the row, one that has run it, or one that will run it, at each hop."""
    cluster = busy()
    reach(
        cluster,
        lambda: (
            running(cluster, "a", phase, hop) and (phase == "decode" or cluster.scheduler.sequences["a"].computed > 0)
        ),
    )
    one = cluster.scheduler.sequences["a"]
    assert len(one.path) == 3
    kill_and_finish(cluster, one.path[victim].device)
    assert phase == "prefill" or cluster.scheduler.state().counters.preemptions


@pytest.mark.parametrize("victim", HOPS)
@pytest.mark.parametrize("kind", [RunRows, ForwardRows, RowsDone, OpenSequences])
def test_while_rows_are_passed_on(kind: type, victim: int) -> None:
    """A device dies while a message with rows is under way: to the first hop, between hops, or back."""
    cluster = busy()
    reach(
        cluster,
        lambda: (
            said(cluster, kind)
            and (a := sequence(cluster)) is not None
            and (a.phase == "decode" or kind is OpenSequences)
        ),
    )
    kill_and_finish(cluster, cluster.scheduler.sequences["a"].path[victim].device)


def test_while_all_are_killed_but_one_and_then_that_one() -> None:
    cluster = busy()
    reach(cluster, lambda: (a := sequence(cluster)) is not None and a.phase == "decode")
    cluster.kill("d0")
    cluster.kill("d2")
    reach(cluster, lambda: not cluster.scheduler.devices.alive("d2"))
    kill_and_finish(cluster, "d1")


@pytest.mark.parametrize("device", ["d0", "d1", "d2"])
def test_while_sequences_wait_for_pages(device: str) -> None:
    cluster = cluster_of(pages=12)
    for number in range(4):
        cluster.ask(request(f"s{number}", range(number + 9), "m", max_tokens=20), at=number * MS)
    reach(cluster, lambda: cluster.scheduler.starved)
    kill_and_finish(cluster, device)


@pytest.mark.parametrize("victim", HOPS)
def test_while_a_newcomer_begins_with_anothers_pages(victim: int) -> None:
    cluster = busy()
    reach(cluster, lambda: (a := sequence(cluster)) is not None and a.computed > 20)
    cluster.ask(request("same", (*range(18), 1, 2), "m", max_tokens=12), at=cluster.now)
    reach(cluster, lambda: said(cluster, OpenSequences) and any(cluster.sent[-1][3].shared))
    kill_and_finish(cluster, cluster.scheduler.sequences["same"].path[victim].device)


# -- moves (BL-16) -----------------------------------------------------------------------------------------------------


def move_of(cluster: VirtualCluster) -> Migration | None:
    return next(iter(cluster.scheduler.migrations), None)


#: Moments of a move, in their order, with the condition that holds then.
MOMENTS: dict[str, Callable[[VirtualCluster, Migration], object]] = {
    "it has been ordered": lambda cluster, move: said(cluster, StartMigration),
    "pages are asked for": lambda cluster, move: said(cluster, PageRequest),
    "pages are on their way": lambda cluster, move: said(cluster, PageData),
    "all is there, and nobody knows": lambda cluster, move: said(cluster, MigrationReady),
    "it is held, its row still under way": lambda cluster, move: (
        move.sequence.waits.held and move.sequence.flying and not move.awaits_answer
    ),
    "the rest is asked for": lambda cluster, move: (
        move.sequence.waits.held and move.stages > 1 and said(cluster, StartMigration)
    ),
    "the rest is on its way": lambda cluster, move: (
        move.sequence.waits.held and move.stages > 1 and said(cluster, PageData)
    ),
    "the rest is there, and nobody knows": lambda cluster, move: (
        move.sequence.waits.held and move.stages > 1 and said(cluster, MigrationReady)
    ),
}
#: Ends of a move, and the arguments of `migrate` for them; page messages are seen only where pages are copied.
ENDS: dict[str, dict[str, bool]] = {"both ends": {}, "copy": {"recompute": False}, "recompute": {"copy": False}}
SEEN = [
    (ends, moment)
    for ends in ENDS
    for moment in MOMENTS
    if ends != "recompute" or ("asked for" not in moment and "way" not in moment)
]


def moving(
    hop: int, target: int | None = None, quick: bool = False, **ends: bool
) -> tuple[VirtualCluster, dict[str, str]]:
    """Start moving all blocks of one hop of a running sequence to another hop's device, or (None) to a fourth one.

    Returns the cluster and the devices by their part in the move. `quick`: links are so fast that the move is
    over before the row under way is back.
    """
    config = ClusterConfig(devices=4, placement="partition", prefill_chunk=8, migration_final_sets=1)
    speed = dict(latency=MS // 100, page_bytes_per_ms=1e9) if quick else dict(latency=MS // 4)
    cluster = busy(devices=4, config=config, **speed)
    reach(cluster, lambda: (a := sequence(cluster)) is not None and a.phase == "decode" and a.computed > 19)
    one = cluster.scheduler.sequences["a"]
    devices = devices_of(one.chain, one.path)
    source, spare = one.path[hop].device, next(name for name in ("d0", "d1", "d2", "d3") if name not in devices)
    to = spare if target is None else one.path[target].device
    blocks = [at for at, name in enumerate(devices) if name == source]
    why: str | None = ""
    while why is not None:  # its stages are loaded there first
        assert cluster._heap, why
        cluster.run_one()
        why = cluster.migrate("a", range(blocks[0], blocks[-1] + 1), to, **ends)
    other = next(name for name in devices if name not in (source, to))
    return cluster, {"source": source, "target": to, "other": other}


@pytest.mark.parametrize("victim", ["source", "target", "other"])
@pytest.mark.parametrize(("ends", "moment"), SEEN)
def test_during_a_move_of_what_begins_the_chain(ends: str, moment: str, victim: str) -> None:
    """Blocks at the start of the chain can be recomputed at the destination, so the move survives its source."""
    cluster, parts = moving(0, **ENDS[ends])
    reach(cluster, lambda: (move := move_of(cluster)) is not None and MOMENTS[moment](cluster, move))
    kill_and_finish(cluster, parts[victim])
    counts = cluster.scheduler.migrations.counts()
    assert counts.started == counts.committed + counts.aborted == 1
    if victim == "source" and ends == "both ends":
        assert counts.committed == 1 and cluster.scheduler.sequences == {}


@pytest.mark.parametrize("victim", ["source", "target", "other"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_during_a_move_that_makes_two_hops_one(moment: str, victim: str) -> None:
    cluster, parts = moving(1, 2)
    reach(cluster, lambda: (move := move_of(cluster)) is not None and MOMENTS[moment](cluster, move))
    kill_and_finish(cluster, parts[victim])


@pytest.mark.parametrize("victim", ["source", "target", "other"])
@pytest.mark.parametrize("heard", range(4))
def test_while_a_move_is_settled(heard: int, victim: str) -> None:
    """The move is committed, and devices have received none or some of the messages that follow."""
    cluster, parts = moving(0)
    reach(cluster, lambda: cluster.scheduler.migrations.counts().committed)
    assert {type(message) for _, _, _, message in cluster.sent[-6:]} >= {FinishMigration, OpenSequences, CloseSequences}
    for _ in range(heard):
        cluster.run_one()
    kill_and_finish(cluster, parts[victim])


def test_a_source_that_dies_when_all_is_copied_is_not_needed_any_more() -> None:
    """The move is committed at once: nothing is left to request, so no answer would come to end it.

    Regression, found by random schedules: the sequence was held for ever.
    """
    cluster, parts = moving(0, quick=True)

    def all_there() -> bool:
        move = move_of(cluster)
        return (
            move is not None
            and not move.awaits_answer
            and move.sequence.waits.held
            and move.upto == move.sequence.computed
        )

    reach(cluster, all_there)
    cluster.kill(parts["source"])
    reach(cluster, lambda: not cluster.scheduler.devices.alive(parts["source"]))
    assert cluster.scheduler.migrations.counts().committed == 1 and move_of(cluster) is None
    cluster.run()
    cluster.expect()


def test_a_table_is_not_cut_while_a_step_writes_it() -> None:
    """A page table is not cut under a row that is still writing in it.

    The first hop's blocks move to the second hop's device, which runs the sequence's row when the source dies. The
    move is committed at once, both hops become one, and the row's table would be cut. (Found by random schedules.)
    """
    cluster = busy(alpha=10 * MS, page_bytes_per_ms=40.0, latency=MS // 4)
    reach(cluster, lambda: (a := sequence(cluster)) is not None and a.phase == "decode")
    one = cluster.scheduler.sequences["a"]
    source, target = one.path[0].device, one.path[1].device
    for hi in (2, 5):  # load first what the sequence needs there
        cluster.scheduler._state.ask_for(one.chain, target, one.chain.stage(0, hi))
    reach(cluster, lambda: Stage("m", 0, 5) in cluster.scheduler.devices[target].stages.loaded)
    reach(cluster, lambda: said(cluster, RunRows) and "a" in cluster.sent[-1][3].seqs)
    assert cluster.migrate("a", range(1), target) is None
    reach(
        cluster,
        lambda: (
            (move := move_of(cluster)) is not None
            and one.waits.held
            and not move.awaits_answer
            and running(cluster, "a", "decode", 1)
        ),
    )
    cluster.nodes[source].alive = False
    cluster.tell(AgentDown(source, "killed"))  # the death is known before the step is over
    assert cluster.scheduler.migrations.counts().committed == 1 and cluster.nodes[target].running
    reach(cluster, lambda: said(cluster, RowsLost) and cluster.sent[-1][1] == target)
    assert "K and V that it needs" in cluster.sent[-1][3].reason and cluster.sent[-1][3].retry
    cluster.run()
    cluster.expect()


# -- controllers -------------------------------------------------------------------------------------------------------


def crowded() -> VirtualCluster:
    """A cluster in which one block's device is full: the block gets another instance, which leaves again later."""
    control = ControlConfig(
        interval_ms=5, cooldown_ms=40, idle_ms=30, rearrange_interval_ms=1_000_000, migration_timeout_ms=400
    )
    one = counting_model("one", "1 2* 3 4 5 6", max_model_len=128)
    config = ClusterConfig(devices=4, placement="partition", control=control)
    cluster = VirtualCluster([one], [(1, 3, 4)], devices=4, pages=24, config=config, page_bytes_per_ms=SLOW)
    for number in range(5):
        cluster.ask(request(f"s{number}", range(number + 1), "one", max_tokens=20), at=number * MS // 2)
    cluster.ticks(5 * MS, 200 * MS)
    return cluster


@pytest.mark.parametrize("device", ["d0", "d1", "d2", "d3"])
@pytest.mark.parametrize(
    "moment", ["an instance comes", "sequences go there", "it is drained", "its stages are dropped"]
)
def test_while_blocks_are_scaled_up_and_down(moment: str, device: str) -> None:
    cluster = crowded()
    moments: dict[str, Callable[[], object]] = {
        "an instance comes": lambda: cluster.trace.named("scale.up"),
        "sequences go there": lambda: cluster.trace.named("scale.up") and said(cluster, PageData),
        "it is drained": lambda: cluster.trace.named("scale.down"),
        "its stages are dropped": lambda: said(cluster, UnloadStages),
    }
    reach(cluster, moments[moment])
    if moment == "it is drained":  # new sequences come meanwhile
        cluster.ask(request("late", range(9), "one", max_tokens=9), at=cluster.now)
    kill_and_finish(cluster, device)


# -- versions (BL-30) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["d0", "d1"])
@pytest.mark.parametrize("moment", ["its stages are loaded", "both run", "the old one goes"])
def test_while_a_model_is_replaced(moment: str, device: str) -> None:
    old, new = counting_model("m-1", "1 2* 3 4* 5* 6"), counting_model("m-2", "1 2* 3 7* 5* 9")
    cut = (1, 3, 4)
    cluster = Changing(chains=[as_version(old, "m", *cut)], blocks=old.blocks(*cut), devices=2, known=[old, new])
    for number in range(8):
        cluster.ask(request(f"s{number}", range(number + 3), "m", max_tokens=16), at=number * 4 * MS)
    cluster.at(12 * MS, lambda: cluster.tell(serve(new, "m", *cut)))
    moments: dict[str, Callable[[], object]] = {
        "its stages are loaded": lambda: (
            cluster.scheduler._state.coming and any(each.stages.loading for each in cluster.scheduler.devices)
        ),
        "both run": lambda: (
            {each.chain.loaded_as for each in cluster.scheduler.sequences.values() if each.path} == {"m-1", "m-2"}
        ),
        "the old one goes": lambda: said(cluster, UnloadStages),
    }
    reach(cluster, moments[moment])
    kill_and_finish(cluster, device)
    assert cluster.updated == [ModelUpdated("m", new.chain(*cut).version)]
    cluster.expect_only((new, cut))


# -- speculated hops (BL-25) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", HOPS)
@pytest.mark.parametrize(
    "moment", ["a stand-in is loaded", "a prediction is passed on", "a guess goes on", "a verdict is on its way"]
)
def test_while_hops_are_predicted(moment: str, victim: int) -> None:
    model = counting_model("m", "1* 2 3* 4* 5 6* 7 8", vocab_size=3)
    config = ClusterConfig(
        devices=3, placement="partition", prefix_caching="off", speculation=SpeculationConfig("exact", top=0.4)
    )
    cluster = VirtualCluster(
        [model], [(2, 5)], devices=3, config=config, stand_ins=[surrogate_of(model, "m~", 4, 3)],
        surrogates={"m": [Surrogate("m~", 4, 5, 1)]},
    )  # fmt: skip
    cluster.scheduler.speculation.pin([(model.chain(2, 5).uses[1].block, f"d{at}") for at in HOPS])
    cluster.ask(request("warm", (1,), "m", max_tokens=1))
    for number in range(3):
        cluster.ask(
            request(f"s{number}", [at % 3 for at in range(number + 6)], "m", max_tokens=16), at=(20 + 3 * number) * MS
        )
    moments: dict[str, Callable[[], object]] = {
        "a stand-in is loaded": lambda: any(
            "~" in stage.model for each in cluster.scheduler.devices for stage in each.stages.loading
        ),
        "a prediction is passed on": lambda: (
            said(cluster, ForwardRows) and any(attempt % 2 for attempt in cluster.sent[-1][3].attempts)
        ),
        "a guess goes on": lambda: cluster.scheduler.speculation.counts().guesses > 0,
        "a verdict is on its way": lambda: said(cluster, SpeculationResult),
    }
    reach(cluster, moments[moment])
    path = next(each.path for each in cluster.scheduler.sequences.values() if each.path)
    kill_and_finish(cluster, path[victim].device)
    assert cluster.scheduler.speculation.counts().started > 0 or moment == "a stand-in is loaded"
