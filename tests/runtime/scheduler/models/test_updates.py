"""Models are updated under load: each sequence keeps the version it began with, and old versions are unloaded."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from runtime.config import ClusterConfig
from runtime.control.scheduler_io import WithdrawModel
from runtime.engine.fakes.integer_model import IntegerModel, counting_model
from tests.runtime.scheduler.changing import Changing, as_version, serve
from tests.runtime.scheduler.routing.test_estimates import estimates_of, profile
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

A = counting_model("m-1", "1 2* 3 4* 5* 6")
#: Another version of A; two of its blocks are new.
B = counting_model("m-2", "1 2* 3 7* 5* 9")
C = counting_model("m-3", "11 12* 13 14* 15* 16")
CUT = (1, 3, 4)
SEQUENCES = 24


def cluster_of(devices: int = 2, **changes) -> Changing:
    chain, blocks = as_version(A, "m", *CUT), A.blocks(*CUT)
    return Changing(chains=[chain], blocks=blocks, devices=devices, known=[A, B, C], **changes)


def ask(cluster: Changing, rng: random.Random, within: int, first: int = 0, count: int = SEQUENCES) -> None:
    for number in range(first, first + count):
        prompt = [rng.randrange(97) for _ in range(rng.randrange(1, 20))]
        cluster.ask(request(f"s{number}", prompt, "m", max_tokens=rng.randrange(1, 20)), at=rng.randrange(within))


def change(cluster: Changing, model: IntegerModel, at: int) -> None:
    cluster.at(at, lambda: cluster.tell(serve(model, "m", *CUT)))


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_newcomers_get_the_new_version_and_the_old_one_goes_when_its_last_sequence_has(devices: int) -> None:
    cluster = cluster_of(devices)
    ask(cluster, random.Random(devices), 60 * MS)
    change(cluster, B, 20 * MS)
    cluster.run()
    cluster.expect()
    assert set(cluster.given.values()) == {"m-1", "m-2"}
    assert [(each.version, each.error) for each in cluster.updated] == [(B.chain().version, "")]
    cluster.expect_only((B, CUT))
    assert [event.ev for event in cluster.trace.events if event.cause == "BL-30"] == ["model.serve", "model.drop"]


def test_from_one_event_on_all_newcomers_get_it() -> None:
    cluster = cluster_of()
    ask(cluster, random.Random(1), 60 * MS, count=60)
    change(cluster, B, 20 * MS)
    cluster.run()
    came = [event.seq for event in cluster.trace.named("arrive")]
    given = [cluster.given[seq or ""] for seq in came]
    assert given == sorted(given) and len(set(given)) == 2


def test_blocks_that_both_versions_have_stay_and_serve_both() -> None:
    cluster = cluster_of()
    before: dict[str, list[str]] = {}

    def look() -> None:
        before.update((block, list(where)) for block, where in cluster.scheduler.block_map.instances.items())

    ask(cluster, random.Random(2), 40 * MS)
    cluster.at(15 * MS, look)
    change(cluster, B, 20 * MS)
    cluster.run()
    cluster.expect()
    shared = {use.block for use in A.chain(*CUT).uses} & {use.block for use in B.chain(*CUT).uses}
    assert len(shared) == 2
    assert all(list(cluster.scheduler.block_map.instances[block]) == before[block] for block in shared)


def test_of_versions_that_are_gone_nothing_measured_is_kept() -> None:
    """Block profiles, latency estimates, prediction outcomes and loads of old versions are removed.

    Otherwise a server that takes a new version of a model every minute would grow for ever.
    """
    cluster = cluster_of()
    versions = [counting_model(f"m-{number}", f"1 2* 3 {10 + number}* 5* 6", max_model_len=128) for number in range(6)]
    cluster.known = versions  # type: ignore[assignment]
    router, history = cluster.scheduler.router, cluster.scheduler.speculation.history
    first = [profile(block.id) for block in A.blocks(*CUT)]
    estimates = router.estimates = estimates_of(*first, crossing=0.1)
    sizes: list[tuple[int, int, int, int, dict[str, int]]] = []

    def size() -> None:
        sizes.append(
            (
                len(estimates._profiles),
                len(estimates._whole),
                len({key[0] for key in estimates._known}),
                len(history._outcomes),
                {name: len(loads.had) for name, loads in cluster.scheduler.times.loads._loads.items()},
            )
        )

    for number, model in enumerate(versions):
        event = serve(model, "m", *CUT)
        measured = tuple(profile(block.id) for block in event.blocks)
        at = (20 + 200 * number) * MS
        cluster.at(at, lambda event=event, measured=measured: cluster.tell(replace(event, profiles=measured)))
        for one in range(4):
            cluster.ask(request(f"s{number}-{one}", range(one + 1), "m", max_tokens=8), at=at + (50 + one) * MS)

        def seen(chain=event.chain) -> None:
            estimates.whole(chain)
            history.add(
                cluster.now, next(iter(cluster.scheduler.sequences.values())), (chain.uses[1].block, "d0"), False
            )

        cluster.at(at + 60 * MS, seen)
        cluster.at(at + 190 * MS, lambda: history.review())
        cluster.at(at + 195 * MS, size)
    cluster.run()
    cluster.expect()
    assert all(each == sizes[0] for each in sizes), sizes
    assert sizes[0][:2] == (4, 1) and sizes[0][2] <= 4 and sizes[0][3] == 1, sizes
    assert sum(sizes[0][4].values()) == 4, sizes


def test_a_new_block_goes_where_the_one_is_whose_place_it_takes() -> None:
    cluster = cluster_of(3)
    cluster.at(10 * MS, lambda: cluster.tell(serve(C, "m", *CUT)))
    old: dict[int, tuple[str, ...]] = {}
    instances = cluster.scheduler.block_map.instances
    cluster.at(
        9 * MS, lambda: old.update((at, tuple(instances[use.block])) for at, use in enumerate(A.chain(*CUT).uses))
    )
    cluster.run()
    assert {at: tuple(instances[use.block]) for at, use in enumerate(C.chain(*CUT).uses)} == old


def test_a_version_for_which_there_is_no_room_is_refused_and_the_old_one_goes_on() -> None:
    cluster = cluster_of(2, limits=(4000, 4000))
    ask(cluster, random.Random(3), 40 * MS)
    change(cluster, C, 20 * MS)
    cluster.run()
    cluster.expect()
    assert set(cluster.given.values()) == {"m-1"}
    assert cluster.updated[0].version == A.chain().version and "cannot hold m-3" in cluster.updated[0].error
    cluster.expect_only((A, CUT))


def test_a_version_that_a_device_cannot_load_is_refused_and_the_old_one_goes_on() -> None:
    unknown = counting_model("m-9", "1 2* 3 7* 5* 8")
    cluster = cluster_of()
    ask(cluster, random.Random(4), 40 * MS)
    change(cluster, unknown, 20 * MS)
    change(cluster, B, 45 * MS)
    ask(cluster, random.Random(5), 80 * MS, first=SEQUENCES)
    cluster.run()
    cluster.expect()
    assert "no model named 'm-9'" in cluster.updated[0].error and cluster.updated[1].error == ""
    cluster.expect_only((B, CUT))


def test_a_version_of_a_name_that_devices_know_already_is_refused() -> None:
    cluster = cluster_of()
    cluster.at(10 * MS, lambda: cluster.tell(serve(counting_model("m-1", "1 2* 3 7* 5* 8"), "m", *CUT)))
    cluster.run()
    assert "names of their own" in cluster.updated[0].error
    assert cluster.updated[0].version == A.chain().version


def test_one_goes_back_while_the_first_version_still_runs() -> None:
    cluster = cluster_of()
    ask(cluster, random.Random(6), 70 * MS, count=40)
    change(cluster, B, 15 * MS)
    change(cluster, A, 30 * MS)
    cluster.run()
    cluster.expect()
    assert [each.version for each in cluster.updated] == [B.chain().version, A.chain().version]
    cluster.expect_only((A, CUT))


def test_an_update_that_is_overtaken_is_given_up() -> None:
    cluster = cluster_of()
    ask(cluster, random.Random(7), 50 * MS)
    change(cluster, C, 20 * MS)
    change(cluster, B, 20 * MS)
    cluster.run()
    cluster.expect()
    assert [bool(each.error) for each in cluster.updated] == [True, False]
    assert "m-3" not in cluster.given.values()
    cluster.expect_only((B, CUT))


def test_a_new_model_comes_and_another_is_withdrawn() -> None:
    cluster = cluster_of()
    ask(cluster, random.Random(8), 40 * MS)
    cluster.at(10 * MS, lambda: cluster.tell(serve(C, "c", *CUT)))
    cluster.at(30 * MS, lambda: cluster.tell(WithdrawModel("m")))
    late = request("late", (1, 2), "m")
    cluster.ask(request("new", (1, 2, 3), "c"), at=20 * MS)
    cluster.ask(late, at=60 * MS)
    cluster.run()
    assert "not loaded" in (cluster.told["late"].last.error or "")
    for seq in [seq for seq, told in cluster.told.items() if told.last.finish == "error"]:
        assert cluster.given.get(seq) is None  # it came after the withdrawal
        del cluster.requests[seq]
    assert len(cluster.requests) > 5
    cluster.expect()
    cluster.expect_only((C, CUT))
    assert [spec.name for spec in cluster.scheduler.models()] == ["c"]


def test_withdrawing_what_is_not_there_says_so() -> None:
    cluster = cluster_of()
    cluster.at(10 * MS, lambda: cluster.tell(WithdrawModel("nobody")))
    cluster.run()
    assert "not loaded" in cluster.updated[0].error


def test_an_update_before_the_devices_are_there_waits_for_them() -> None:
    cluster = cluster_of()
    cluster.at(0, lambda: cluster.tell(serve(B, "m", *CUT)))
    ask(cluster, random.Random(9), 40 * MS)
    cluster.run()
    cluster.expect()
    cluster.expect_only((B, CUT))


@pytest.mark.parametrize("seed", range(25))
def test_updates_under_load_with_deaths_and_moves(seed: int) -> None:
    """UN-09: through updates and deaths, each sequence has the tokens of the version it began with."""
    rng = random.Random(seed)
    config = ClusterConfig(devices=3, placement="partition")
    cluster = cluster_of(3, pages=rng.choice((60, 200)), config=config, page_bytes_per_ms=rng.choice((1e9, 50.0)))
    ask(cluster, rng, 80 * MS)
    versions = [B, C, A, B] if seed % 2 else [C, B]
    for model in versions:
        change(cluster, model, rng.randrange(10 * MS, 120 * MS))
    for _ in range(12):
        cluster.at(rng.randrange(100 * MS), lambda: cluster.migrate_some(rng))
    for _ in range(3):
        cluster.at(rng.randrange(120 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    cluster.run()
    cluster.expect()
    assert len(cluster.updated) == len(versions)
    last = cluster.scheduler.block_map
    served = next(model for model in (A, B, C) if model.chain().version == cluster.updated[-1].version)
    assert {use.block for use in served.chain(*CUT).uses} == set(last.instances)
    cluster.expect_only((served, CUT))
