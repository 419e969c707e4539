"""Prompts on one group of devices, decoding on another (TI-15, TI-19): tokens, places, transfers, room, ends."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from runtime.messages import FinishMigration, PageData, PageRequest, StartMigration
from runtime.role_config import RoleName
from runtime.scheduler.migration.migration import Migration
from tests.runtime.scheduler.handoff.apart import Apart
from tests.runtime.scheduler.test_scheduler import some
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

PAIR: tuple[RoleName, ...] = ("prefill", "decode")


def reach(cluster: Apart, condition: Callable[[], object], most: int = 20_000) -> None:
    """Run until a condition holds."""
    for _ in range(most):
        if condition():
            return
        cluster.run_one()
    raise AssertionError("the moment never comes")


def moves(cluster: Apart) -> list[Migration]:
    return list(cluster.scheduler.migrations)


@pytest.mark.parametrize(
    ("roles", "placement"),
    [
        (PAIR, "auto"),
        (("prefill", "decode", "decode"), "auto"),
        (("prefill", "prefill", "decode"), "auto"),
        (("prefill", "decode", "decode"), "partition"),
        (("prefill", "prefill", "decode"), "partition"),
        (("prefill", "prefill", "prefill", "decode", "decode"), "partition"),
        (("both", "prefill", "decode"), "auto"),
    ],
)  # fmt: skip
def test_each_phase_runs_on_its_devices_with_one_transfer(roles: Sequence[RoleName], placement: str) -> None:
    cluster = Apart(*roles, settings={"placement": placement, "prefill_chunk": 8}, pages=4000)
    for one in some(64 if roles == PAIR else 24, 3):
        cluster.ask(one, at=random.Random(one.seq).randrange(40 * MS))
    cluster.run()
    cluster.expect()
    cluster.expect_phases()
    if "both" not in roles:
        cluster.expect_one_transfer_each()
    assert {device for device, *_ in cluster.ran} == set(cluster.roles)


def test_a_transfer_has_a_part_for_each_pair_of_devices() -> None:
    cluster = Apart("prefill", "prefill", "decode", "decode", "decode", settings={"placement": "partition"})
    cluster.ask(request("a", range(20), "m", max_tokens=9))
    reach(cluster, lambda: moves(cluster))
    (move,) = moves(cluster)
    pairs = {(part.source, part.target) for part in move.parts}
    assert len(pairs) == len(move.parts) > 1 and {source for source, _ in pairs} == {"d0", "d1"}
    cluster.run()
    cluster.expect()
    cluster.expect_one_transfer_each()


def test_the_first_token_leaves_before_the_transfer_and_the_second_after_it() -> None:
    cluster = Apart(*PAIR, page_bytes_per_ms=10.0)
    cluster.ask(request("a", range(20), "m", max_tokens=9))
    reach(cluster, lambda: cluster.told["a"].tokens)
    assert not [each for each in cluster.sent if isinstance(each[3], PageData)]
    reach(cluster, lambda: len(cluster.told["a"].tokens) == 2)
    assert not moves(cluster)
    cluster.run()
    phases = [event.extra["phase"] for event in cluster.trace.named("phase")]
    assert phases == ["queued", "prefill", "transfer", "decode", "done"]
    assert cluster.scheduler.state().counters.handoff_ns > cluster.kv_bytes(cluster.requests["a"]) / 10.0 * MS
    cluster.expect()


def test_an_answer_of_one_token_is_not_handed_off() -> None:
    cluster = Apart(*PAIR)
    cluster.ask(request("a", range(9), "m", max_tokens=1))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.migrations.counts().started == 0


def test_decode_devices_get_equal_shares() -> None:
    """Hand-offs under way count, so that those of one moment do not all go to one device."""
    cluster = Apart("prefill", "decode", "decode", page_bytes_per_ms=20.0, pages=1000)
    cluster.ask(*(request(f"s{at}", range(9), "m", max_tokens=30) for at in range(12)))
    cluster.run()
    cluster.expect()
    went = [event.extra["to"] for event in cluster.trace.named("dispatch.choose")]
    assert went.count(("d1",)) == went.count(("d2",)) == 6


# -- room --------------------------------------------------------------------------------------------------------------


def test_a_full_decode_side_holds_sequences_at_their_prompts_in_order() -> None:
    cluster = Apart(*PAIR, settings={"max_num_seqs": 3}, pages=400)
    cluster.ask(*(request(f"s{at}", range(9 - at), "m", max_tokens=20) for at in range(6)))
    reach(cluster, lambda: (device := cluster.scheduler.devices.get("d1")) and device.passing.count == 3)
    reach(cluster, lambda: sum(each.waits.handoff for each in cluster.scheduler.sequences.values()) == 3)
    assert cluster.scheduler.devices["d0"].passing.count == 3 and not moves(cluster)
    cluster.run()
    cluster.expect()
    cluster.expect_phases()
    went = [event.extra["seq"] for event in cluster.trace.named("dispatch.choose")]
    assert went == [f"s{at}" for at in range(6)]


def test_sequences_that_begin_do_not_take_the_room_that_one_waits_for() -> None:
    """Without that, one with a long prompt is handed off once requests have ceased to come."""
    cluster = Apart("prefill", "both", pages=40)
    for at in range(200):
        cluster.ask(request(f"s{at}", range(2), "m", max_tokens=20), at=at * MS)
    cluster.ask(request("big", range(40), "m", max_tokens=6), at=20 * MS)
    reach(cluster, lambda: len(cluster.told["big"].tokens) == 1)
    first = cluster.now
    reach(cluster, lambda: len(cluster.told["big"].tokens) > 1)
    assert cluster.now - first < 60 * MS
    cluster.run()
    cluster.expect()


def test_few_pages_preempt_and_lose_nothing() -> None:
    cluster = Apart("prefill", "decode", "decode", pages=60)
    cluster.ask(*some(24, 5))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.preemptions > 0
    assert cluster.trace.named("batch.resume")
    for device, seq, start, count in cluster.ran:  # contexts are computed again on the device for prompts only
        assert count == 1 or cluster.roles[device] == "prefill", (seq, start)


def test_it_decodes_where_its_prompt_ran_if_no_decode_path_holds_as_much() -> None:
    """Over two devices a sequence may be twice as long as on the one that decodes."""
    cluster = Apart("prefill", "prefill", "decode", settings={"placement": "partition"}, pages=27)
    cluster.ask(request("long", range(20), "m", max_tokens=30), request("short", range(8), "m", max_tokens=4))
    cluster.run()
    cluster.expect()
    (stays,) = cluster.trace.named("handoff.none")
    assert stays.extra["seq"] == "long" and "more room here" in stays.extra["error"]
    assert cluster.scheduler.state().counters.handoffs == 1


def test_a_prompt_side_that_is_just_full_does_not_end_an_answer() -> None:
    """The limit of an answer is that of the path on which it decodes."""
    cluster = Apart("prefill", "decode", "decode", settings={"placement": "partition"}, pages=15)
    cluster.ask(request("a", range(19), "m", max_tokens=9))
    cluster.run()
    cluster.expect()
    assert len(cluster.told["a"].tokens) == 9


# -- ends and deaths in each phase -------------------------------------------------------------------------------------


def _moment(cluster: Apart, phase: str) -> Callable[[], object]:
    sent = {"asked": StartMigration, "wanted": PageRequest, "under way": PageData, "committed": FinishMigration}
    if phase in sent:
        return lambda: any(isinstance(each[3], sent[phase]) for each in cluster.sent[-9:])
    sequence = cluster.scheduler.sequences
    return {
        "queued": lambda: "a" in sequence,
        "prompt": lambda: "a" in sequence and sequence["a"].computed > 0,
        "held": lambda: sequence["a"].waits.handoff and not sequence["a"].waits.move,
        "decode": lambda: len(cluster.told["a"].tokens) > 2,
    }[phase]


PHASES = ["queued", "prompt", "asked", "wanted", "under way", "committed", "decode"]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("phase", PHASES)
def test_an_abort_frees_both_sides(phase: str, cut: bool) -> None:
    roles: tuple[RoleName, ...] = ("prefill", "prefill", "decode", "decode") if cut else PAIR
    settings = {"prefill_chunk": 4, "placement": "partition" if cut else "auto"}
    cluster = Apart(*roles, settings=settings, page_bytes_per_ms=20.0)
    cluster.ask(request("a", range(20), "m", max_tokens=20))
    reach(cluster, _moment(cluster, phase))
    cluster.abort("a", cluster.now)
    cluster.run()
    cluster.expect_empty()
    assert cluster.told["a"].last.finish == "abort"


@pytest.mark.parametrize("victim", ["source", "target"])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
def test_a_device_that_dies_in_any_phase_loses_nothing(phase: str, victim: str, cut: bool) -> None:
    roles: tuple[RoleName, ...] = ("prefill", "prefill", "decode", "decode") if cut else PAIR
    settings = {"prefill_chunk": 4, "placement": "partition" if cut else "auto"}
    cluster = Apart(*roles, settings=settings, page_bytes_per_ms=20.0)
    cluster.ask(request("a", range(20), "m", max_tokens=20), request("b", range(7), "n", max_tokens=12))
    reach(cluster, _moment(cluster, phase))
    cluster.kill({"source": "d0", "target": f"d{len(roles) - 1}"}[victim])
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("gone", ["d0", "d1"])
def test_where_a_role_does_not_come_back_the_other_devices_run_everything(gone: str) -> None:
    cluster = Apart(*PAIR, replace=False)
    cluster.ask(request("a", range(20), "m", max_tokens=20), request("b", range(9), "m", max_tokens=20))
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    cluster.kill(gone)
    cluster.final(gone)
    cluster.ask(request("c", range(9), "n", max_tokens=5), at=cluster.now)
    cluster.run()
    cluster.expect()


def test_pages_that_never_verify_do_not_keep_a_sequence_from_decoding() -> None:
    cluster = Apart(*PAIR, damage=lambda pages: True)
    cluster.ask(request("a", range(20), "m", max_tokens=9))
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs_aborted == cluster.scheduler._state.config.max_crashes
    assert "failed" in cluster.trace.named("handoff.none")[0].extra["error"]


# -- beside other mechanisms -------------------------------------------------------------------------------------------


def test_a_prompt_stays_where_later_prompts_can_start_from_it() -> None:
    cluster = Apart(*PAIR, settings={"prefix_caching": "cached"}, pages=400)
    cluster.ask(request("a", range(20), "m", max_tokens=5))
    cluster.run()
    cluster.ask(request("b", [*range(16), 50, 51], "m", max_tokens=5), at=cluster.now)
    cluster.run()
    assert [each.path[0].device for each in cluster.scheduler.prefix_cache].count("d0") == 1
    (ref,) = cluster.trace.named("kv.ref")
    assert ref.seq == "b" and ref.extra["tokens"] == 16
    cluster.expect_phases()
    cluster.expect()


def test_nothing_moves_to_a_device_that_does_not_run_its_phase() -> None:
    cluster = Apart("prefill", "decode", "decode")
    cluster.ask(request("a", range(20), "m", max_tokens=40))
    reach(cluster, lambda: len(cluster.told["a"].tokens) > 2)
    (hop,) = cluster.scheduler.sequences["a"].path
    whole = range(len(cluster.scheduler.sequences["a"].chain.uses))
    assert "does not run" in (cluster.migrate("a", whole, "d0") or "")
    other = {"d1": "d2", "d2": "d1"}[hop.device]
    while (why := cluster.migrate("a", whole, other)) is not None:
        assert "is not loaded" in why
        cluster.run_one()
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.moves == 2


def test_what_has_left_keeps_no_room() -> None:
    """The last one that waits for room is aborted: what comes later begins there again."""
    cluster = Apart(*PAIR, pages=60)
    cluster.ask(request("a", range(40), "m", max_tokens=30))
    cluster.ask(request("big", range(50, 90), "m", max_tokens=30), at=1 * MS)
    handoffs, state = cluster.scheduler._handoffs, cluster.scheduler._state
    reach(cluster, lambda: [*handoffs.waiting] == ["big"] and bool(state.awaited))
    cluster.abort("big", cluster.now)
    reach(cluster, lambda: not handoffs.waiting)
    assert not state.awaited
    cluster.run()
    cluster.expect_empty()
