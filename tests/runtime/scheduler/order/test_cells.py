"""Cells with a virtual queue each in a virtual cluster: what runs where, and what the death of a device changes."""

from __future__ import annotations

from dataclasses import replace

from runtime.config import ClusterConfig, ControlConfig, OrderConfig
from runtime.control.scheduler_io import AddRequests
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.observe.snapshot import picture_of
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import Told, request

M = counting_model("m", "1* 2 3* 4", max_model_len=1024)
N = counting_model("n", "1* 2 5* 6", max_model_len=1024)


def cluster(
    devices: int = 2, cells: bool = True, places: int = 2, assign: str = "backlog", pages: int = 600,
    evict: bool = False,
) -> VirtualCluster:  # fmt: skip
    config = ClusterConfig(
        devices=devices, max_num_seqs=places, placement="replicate", control=ControlConfig.off(),
        order=OrderConfig("qlm", evict=evict, cells=cells, assign=assign),
    )  # fmt: skip
    return VirtualCluster((M, N), devices=devices, pages=pages, config=config, costs=lambda plan: MS, latency=MS // 100)


def ask(made: VirtualCluster, seq: str, tokens: int, at: int, slo_ms: int | None = None, model: str = "m") -> None:
    one = request(seq, range(1, 9), model, max_tokens=tokens, ignore_eos=True)
    made.ask(replace(one, arrival=at, slo_ms=slo_ms), at=at)


def finish(made: VirtualCluster, until: int = 3000) -> dict[str, float]:
    made.ticks(10 * MS, until * MS)
    made.run(until=until * MS)
    made.expect()
    return {each.seq: each.t / MS for each in made.trace.named("finish")}


def cells(made: VirtualCluster) -> list[frozenset[str]]:
    assert made.scheduler._state.cells is not None
    return [cell.devices for cell in made.scheduler._state.cells.cells]


def where(made: VirtualCluster) -> dict[str, str]:
    """Return the cell of each live sequence."""
    order = made.scheduler.order
    assert order is not None
    groups = {seq: order.forecasts.groups.group_of(seq) for seq in made.scheduler.sequences}
    return {seq: group.cell for seq, group in groups.items() if group is not None}


def test_a_chain_that_is_cut_is_in_one_cell() -> None:
    config = ClusterConfig(devices=2, placement="partition", order=OrderConfig("qlm"))
    made = VirtualCluster((M,), [(2,)], devices=2, pages=600, config=config, costs=lambda plan: MS, latency=MS // 100)
    ask(made, "a", 5, MS)
    finish(made)
    assert [len(each) for each in cells(made)] == [2]


def test_copies_are_cells_of_their_own() -> None:
    made = cluster()
    ask(made, "a", 5, MS)
    finish(made)
    assert [len(each) for each in cells(made)] == [1, 1]


def test_a_group_goes_to_the_cell_with_the_least_work() -> None:
    made, found = cluster(), dict[str, str]()
    for number, tokens in enumerate((300, 300, 40, 40, 5)):
        ask(made, f"s{number}", tokens, (1 + number // 2) * MS, 60_000 + number // 2)
    made.at(4 * MS, lambda: found.update(where(made)))
    finish(made)
    assert found["s4"] == found["s2"] == found["s3"] != found["s0"] == found["s1"]


def test_every_sequence_runs_in_the_cell_of_its_group() -> None:
    made = cluster()
    for number in range(24):
        ask(made, f"s{number}", 20 + number, (1 + number % 5) * MS, 60_000 + number % 3, "mn"[number % 2])
    seen: dict[str, set[str]] = {}

    def look() -> None:
        by = where(made)
        for seq, sequence in made.scheduler.sequences.items():
            if sequence.path:
                assert {hop.device for hop in sequence.path} == {by[seq]}
                seen.setdefault(by[seq], set()).add(seq)

    for at in range(2, 200, 3):
        made.at(at * MS, look)
    assert len(finish(made)) == 24
    assert len(seen) == 2 and min(map(len, seen.values())) >= 8, "both cells serve, by their backlogs"


def test_an_urgent_group_goes_where_all_that_runs_gives_way() -> None:
    """One device runs long answers without deadlines, the other short ones that are more urgent than the new one."""
    for evict in (True, False):
        made, found = cluster(evict=evict), dict[str, str]()
        for number in range(4):
            ask(made, f"s{number}", *((600, MS, None), (60, 2 * MS, 20_000))[number // 2])
        ask(made, "urgent", 5, 30 * MS, 21_000)
        made.at(31 * MS, lambda made=made, found=found: found.update(where(made)))
        finish(made)
        assert found["s0"] == found["s1"] != found["s2"] == found["s3"]
        assert found["urgent"] == (found["s0"] if evict else found["s2"])


def test_a_place_that_is_left_is_used_by_what_waits_elsewhere() -> None:
    """All requests are alike, so that they are one group; still, no cell idles while any of them waits."""
    made, single = cluster(), cluster(cells=False)
    for each in (made, single):
        for number in range(16):
            ask(each, f"s{number}", 40, MS, 60_000)
    last, best = (max(finish(each).values()) for each in (made, single))
    assert last < 1.1 * best


def test_groups_in_turn_stay_where_they_are() -> None:
    """The baseline of QL-12: every second group is long, so one cell gets all long ones while the other idles."""
    ends = {}
    for assign in ("backlog", "turns"):
        made, found = cluster(assign=assign), dict[str, str]()
        for number in range(8):
            ask(made, f"s{number}", 300 if number % 2 else 5, (1 + number) * MS, 60_000 + number)
        made.at(10 * MS, lambda made=made, found=found: found.update(where(made)))
        ends[assign] = max(finish(made).values())
        if assign == "turns":
            assert len({found[f"s{number}"] for number in (1, 3, 5, 7)}) == 1
    assert ends["turns"] > 1.5 * ends["backlog"]


def test_the_death_of_a_device_changes_no_other_queue() -> None:
    made = cluster(places=1)
    for number in range(8):
        ask(made, f"s{number}", 60, (1 + number) * MS, 60_000 + number)
    made.run(until=30 * MS)
    before = where(made)
    first, second = sorted(set(before.values()))
    stay = [seq for seq in before if before[seq] == second]
    assert stay and len(stay) < 8
    made.kill(first)
    made.run(until=35 * MS)
    after = where(made)
    assert all(after[seq] == second for seq in after), "what waited there is assigned to the living cell"
    found = finish(made)
    ordered = sorted(stay, key=found.__getitem__)
    assert ordered == sorted(stay, key=lambda seq: int(seq[1:]))


def test_virtual_queues_are_shown_by_cell() -> None:
    made = cluster(places=1)
    for number in range(8):
        ask(made, f"s{number}", 60, (1 + number) * MS, 60_000 + number)
    made.ticks(10 * MS, 20 * MS)
    made.run(until=25 * MS)
    queue = picture_of(made.scheduler).queue
    assert queue is not None
    assert [each["cell"] for each in queue.virtual] == sorted({*where(made).values()})
    assert sorted(id for each in queue.virtual for id in each["groups"]) == sorted(each.id for each in queue.groups)
    finish(made)


def test_a_request_that_can_never_run_leaves_other_queues_as_they_are() -> None:
    """It ends as the first of its cell's queue, while another cell has the next request of the same model."""
    made, at = cluster(pages=40), 100 * MS
    for number in range(4):  # both devices load the model
        ask(made, f"w{number}", 5, MS, 50_000 + number)
    never = request("never", (1,) * 600, "m", max_tokens=5, ignore_eos=True)
    lot = [replace(never, arrival=at, slo_ms=1_000)]
    for number in range(4):
        one = request(f"s{number}", range(1, 9), "m", max_tokens=20, ignore_eos=True)
        lot.append(replace(one, arrival=at, slo_ms=50_000 + number))
    for one in lot:
        made.requests[one.seq], made.told[one.seq] = one, Told(list(one.output))
    made.at(at, lambda: made.tell(AddRequests(tuple(lot))))
    made.ticks(10 * MS, 500 * MS)
    made.run(until=500 * MS)
    ends = {one.seq: made.told[one.seq].last.finish for one in lot}
    assert ends == {"never": "error", **dict.fromkeys(("s0", "s1", "s2", "s3"), "length")}
