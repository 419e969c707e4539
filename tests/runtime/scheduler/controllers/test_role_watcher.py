"""The scheduler changes roles as loads change; nothing is lost, and every chain keeps all phases (TI-24)."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

from runtime.control.scheduler_io import PauseSequence, ResumeSequence, SetRoles
from runtime.messages import LoadStages
from runtime.role_config import RoleChangeConfig, RoleName
from runtime.scheduler.controllers.actions import holders
from tests.runtime.scheduler.handoff.apart import Apart
from tests.runtime.scheduler.handoff.test_handoffs import reach
from tests.runtime.scheduler.test_scheduler import M, some
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

UNTIL = 1500 * MS


def watched(*roles: RoleName, drain_ms: int = 1000, until: int = UNTIL, watch: Any = "spare", **changes: Any) -> Apart:
    """A cluster with a window of 100 ms that reports its use and ticks every 2 ms."""
    config = RoleChangeConfig(watch, window_ms=100, drain_ms=drain_ms)
    settings = {"placement": "replicate", "role_changes": config, "prefill_chunk": 16, **changes.pop("settings", {})}
    cluster = Apart(*roles, settings=settings, **{"pages": 400, **changes})
    for when in range(2 * MS, until, 2 * MS):
        cluster.at(when, lambda: [cluster.tell(node.agent.report()) for node in cluster.living()])
    cluster.ticks(2 * MS, until)
    return cluster


def answers(cluster: Apart, count: int, every: int, prompt: int, tokens: int, start: int = 0) -> None:
    """Ask for answers of so many tokens, one after another."""
    for number in range(count):
        text = [1 + (number + start + at) % 7 for at in range(prompt)]
        cluster.ask(request(f"s{start + number}", text, "m", max_tokens=tokens), at=start * MS + number * every)


def changes(cluster: Apart) -> list[tuple[str, str, str, str]]:
    """Return what happened to roles: event, cause, device, role."""
    found = [event for event in cluster.trace.events if event.ev in ("role.leave", "role.flip", "role.keep")]
    return [(each.ev, each.cause, each.dev, each.extra.get("role", "")) for each in found]


def passing(cluster: Apart, name: str) -> int:
    """Return the sequences with a path over a device."""
    device = cluster.scheduler.devices.get(name)
    return 0 if device is None else device.passing.count


def roles(cluster: Apart) -> list[str]:
    return [cluster.scheduler.devices.roles[f"d{at}"].name for at in range(len(cluster.nodes))]


def test_an_idle_prefill_device_decodes_when_decoding_is_short() -> None:
    cluster = watched("prefill", "prefill", "decode", pages=150)
    answers(cluster, 60, 5 * MS, prompt=3, tokens=60)
    cluster.run()
    cluster.expect()
    (leave, flip) = changes(cluster)  # the last device for prompts keeps its role, whatever the load is
    assert leave[:2] == ("role.leave", "TI-25") and flip[:2] == ("role.flip", "TI-25")
    assert leave[2] == flip[2] in ("d0", "d1") and flip[3] == "decode"
    assert sorted(roles(cluster)) == ["decode", "decode", "prefill"]
    (at,) = (event.t for event in cluster.trace.named("role.flip"))
    later = {seq for device, seq, start, _ in cluster.ran if device == flip[2] and start >= 3}
    assert len(later) > 5, "it decodes"
    loads = [(to, stage) for _, _, to, each in cluster.sent if isinstance(each, LoadStages) for stage in each.stages]
    assert len(loads) == len(set(loads)), "nothing is loaded again"
    assert cluster.scheduler.state().counters.role_changes == 1 and at < UNTIL


def test_an_idle_decode_device_runs_prompts_when_these_are_short_and_its_sequences_move_away() -> None:
    cluster = watched("prefill", "decode", "decode", beta=MS // 2)
    answers(cluster, 3, MS, prompt=3, tokens=120)  # both decode while prompts come
    answers(cluster, 90, 6 * MS, prompt=60, tokens=1, start=20)
    cluster.run()
    cluster.expect()
    found = changes(cluster)
    assert [each[:2] for each in found] == [("role.leave", "TI-26"), ("role.flip", "TI-26")]
    assert found[0][2] in ("d1", "d2") and found[1][3] == "prefill"
    ran = [(seq, start) for device, seq, start, count in cluster.ran if device == found[1][2] and count > 1]
    assert len(ran) > 20, "it runs prompts"


def test_what_decodes_on_a_device_that_leaves_moves_to_one_that_stays() -> None:
    cluster = watched("prefill", "decode", "decode", until=400 * MS)
    answers(cluster, 4, MS, prompt=3, tokens=100)
    reach(cluster, lambda: passing(cluster, "d1") and passing(cluster, "d2"))
    cluster.scheduler.devices.roles.leaving["d1"] = "prefill"
    cluster.run()
    cluster.expect()
    causes = {event.cause for event in cluster.trace.named("sequence.move")}
    assert causes == {"TI-26"} and cluster.scheduler.migrations.counts().committed > 0
    assert roles(cluster)[1] == "prefill"
    (flip,) = cluster.trace.named("role.flip")
    left = {seq for device, seq, *_ in cluster.ran if device == "d1"}
    ends = {event.seq: event.t for event in cluster.trace.events if event.ev == "token"}
    assert left and all(flip.t < ends[seq] - 50 * MS for seq in left), "it does not wait for answers to end"


@pytest.mark.parametrize("pair", [("prefill", "decode"), ("prefill", "decode", "both")])
def test_the_last_device_of_a_phase_and_those_of_both_keep_their_roles(pair: Sequence[RoleName]) -> None:
    cluster = watched(*pair)
    answers(cluster, 40, 5 * MS, prompt=3, tokens=60)
    cluster.run()
    cluster.expect()
    kept = [each for each in changes(cluster) if each[2] != "d0"]
    assert not kept and ("both" in pair or roles(cluster) == list(pair))


@pytest.mark.parametrize(
    ("names", "leaves"), [(("prefill", "prefill", "decode"), "d0"), (("prefill", "decode", "decode"), "d1")]
)
def test_a_device_that_leaves_gets_nothing_new(names: Sequence[RoleName], leaves: str) -> None:
    cluster = watched(*names, until=100 * MS, watch="off")
    reach(cluster, lambda: len(cluster.scheduler.devices) == 3)
    cluster.scheduler.devices.roles.leaving[leaves] = "decode"
    answers(cluster, 12, MS, prompt=20, tokens=20, start=10)
    cluster.run()
    cluster.expect()
    assert {device for device, *_ in cluster.ran} == {"d0", "d1", "d2"} - {leaves}


def test_sequences_do_not_move_to_a_device_that_leaves() -> None:
    cluster = watched("prefill", "decode", "decode", "decode", until=60 * MS, watch="off")
    cluster.run()
    cluster.scheduler.devices.roles.leaving["d2"] = "prefill"
    blocks = [use.block for use in cluster.scheduler.chains()[0].uses]
    assert [device.name for device in holders(cluster.scheduler._state, blocks, "d1")] == ["d1", "d3"]


def test_a_prefill_device_changes_once_no_context_is_computed_there() -> None:
    cluster = watched("prefill", "prefill", "decode", until=300 * MS, beta=MS // 2, settings={"max_num_seqs": 3})
    answers(cluster, 12, 8 * MS, prompt=20, tokens=40)
    roles_now, scheduler = cluster.scheduler.devices.roles, cluster.scheduler
    reach(
        cluster,
        lambda: (
            scheduler._state.awaited
            and {bool(each.output) for each in scheduler.devices["d0"].passing.here.values()} == {True, False}
        ),
    )
    roles_now.leaving["d0"] = "decode"
    reach(cluster, lambda: not roles_now.leaving)
    here = list(cluster.scheduler.devices["d0"].passing.here.values())
    assert all(len(sequence.output) > 0 for sequence in here)
    waiting = {sequence.seq for sequence in here if not sequence.waits.move}
    assert waiting, "they wait for room where the rest decodes"
    cluster.run()
    cluster.expect()
    assert changes(cluster)[-1] == ("role.flip", "TI-25", "d0", "decode")
    assert waiting <= {seq for device, seq, start, _ in cluster.ran if device == "d0" and start >= 20}


def test_a_window_begins_anew_with_each_change() -> None:
    cluster = watched("prefill", "prefill", "decode", pages=150)
    answers(cluster, 60, 5 * MS, prompt=3, tokens=60)
    cluster.run(until=95 * MS)
    cluster.tell(SetRoles((("d0", "prefill"),)))
    cluster.run()
    cluster.expect()
    assert cluster.trace.named("role.leave")[0].t >= 195 * MS


def test_a_device_without_blocks_is_of_no_use_in_another_role() -> None:
    cluster = watched(
        "prefill", "prefill", "prefill", "decode", settings={"placement": "on-demand"}, models=(M,), cuts=((),)
    )
    answers(cluster, 60, 5 * MS, prompt=3, tokens=60)
    cluster.run()
    cluster.expect()
    assert sum(bool(device.plan.blocks) for device in cluster.scheduler.devices) == 2 and not changes(cluster)


def test_what_waits_goes_to_a_device_that_keeps_its_role_after_all() -> None:
    cluster = watched("prefill", "prefill", "decode", until=400 * MS, drain_ms=100, settings={"max_num_seqs": 2})
    answers(cluster, 3, 0, prompt=60, tokens=5)
    reach(cluster, lambda: len(cluster.ran) > 2)
    for seq in ("s0", "s1", "s2"):
        cluster.tell(PauseSequence(seq, None))
    cluster.run(until=20 * MS)
    (leaves,) = (name for name in ("d0", "d1") if passing(cluster, name) == 1)
    cluster.scheduler.devices.roles.leaving[leaves] = "decode"
    answers(cluster, 1, 0, prompt=9, tokens=5, start=21)
    cluster.run(until=60 * MS)
    assert not cluster.told["s21"].tokens
    cluster.run(until=300 * MS)
    assert [each[0] for each in changes(cluster)] == ["role.keep"] and len(cluster.told["s21"].tokens) == 5
    for seq in ("s0", "s1", "s2"):
        cluster.tell(ResumeSequence(seq))
    cluster.run()
    cluster.expect()


def test_a_change_that_has_become_impossible_is_given_up() -> None:
    cluster = watched("prefill", "decode", "decode", until=300 * MS, page_bytes_per_ms=1.0, replace=False)
    answers(cluster, 4, MS, prompt=3, tokens=60)
    reach(cluster, lambda: passing(cluster, "d1"))
    cluster.scheduler.devices.roles.leaving["d1"] = "prefill"
    cluster.kill("d2")
    cluster.final("d2")
    cluster.run()
    cluster.expect()
    assert [each[0] for each in changes(cluster)] == ["role.keep"]
    assert "would not be whole on devices that decode" in cluster.trace.named("role.keep")[0].extra["error"]


def test_a_device_that_is_not_left_in_time_keeps_its_role() -> None:
    cluster = watched("prefill", "decode", "decode", drain_ms=0, beta=MS // 2, page_bytes_per_ms=1.0)
    answers(cluster, 3, MS, prompt=3, tokens=120)
    answers(cluster, 60, 6 * MS, prompt=60, tokens=1, start=20)
    cluster.run()
    cluster.expect()
    found = changes(cluster)
    assert ("role.keep", "TI-26") in [each[:2] for each in found]
    why = cluster.trace.named("role.keep")[0].extra["error"]
    assert "have not left it in time" in why
    assert not cluster.scheduler.devices.roles.leaving


def test_a_role_given_by_hand_ends_a_change_under_way() -> None:
    cluster = watched("prefill", "decode", "decode", until=60 * MS)
    reach(cluster, lambda: cluster.now > 10 * MS)
    cluster.scheduler.devices.roles.leaving["d1"] = "prefill"
    cluster.tell(SetRoles((("d2", "both"),)))
    assert not cluster.scheduler.devices.roles.leaving and roles(cluster) == ["prefill", "decode", "both"]
    cluster.run()
    assert [each[0] for each in changes(cluster)] == ["role.flip"]


def test_a_device_that_dies_while_it_leaves_keeps_its_role() -> None:
    cluster = watched("prefill", "decode", "decode", until=300 * MS, page_bytes_per_ms=1.0)
    answers(cluster, 4, MS, prompt=3, tokens=100)
    reach(cluster, lambda: passing(cluster, "d1"))
    cluster.scheduler.devices.roles.leaving["d1"] = "prefill"
    cluster.kill("d1")
    cluster.run()
    cluster.expect()
    assert [each[0] for each in changes(cluster)] == ["role.keep"] and roles(cluster)[1] == "decode"
    assert cluster.trace.named("role.keep")[0].extra["error"] == "it is dead"


def test_off_nothing_changes() -> None:
    cluster = watched("prefill", "prefill", "decode", watch="off")
    answers(cluster, 60, 5 * MS, prompt=3, tokens=60)
    cluster.run()
    cluster.expect()
    assert not changes(cluster)


@pytest.mark.parametrize("seed", range(6))
def test_changes_with_deaths_and_aborts_at_random(seed: int) -> None:
    rng = random.Random(seed)
    names: tuple[RoleName, ...] = tuple(rng.choice((("prefill", "prefill", "decode"), ("prefill", "decode", "decode"))))
    cluster = watched(
        *names, pages=rng.choice((70, 120, 400)), drain_ms=rng.choice((5, 1000)), until=600 * MS,
        page_bytes_per_ms=rng.choice((1e9, 200.0, 30.0)),
        settings={"prefix_caching": rng.choice(("off", "active", "cached"))},
    )  # fmt: skip
    asked = some(40, seed)
    for one in asked:
        cluster.ask(one, at=rng.randrange(500 * MS))
    for one in asked[::6]:
        cluster.abort(one.seq, rng.randrange(500 * MS))
        del cluster.requests[one.seq]
    others = {"prefill": "decode", "decode": "prefill"}
    for _ in range(8):
        device = f"d{rng.randrange(3)}"

        def leave(device: str = device) -> None:
            now, names = cluster.scheduler.devices.roles, cluster.scheduler.devices
            if device in names.living and not now.leaving:
                now.leaving[device] = others[now[device].name]  # type: ignore[assignment]

        cluster.at(rng.randrange(600 * MS), leave)
    for _ in range(rng.choice((0, 3))):
        cluster.at(rng.randrange(500 * MS), lambda: cluster.kill(f"d{rng.randrange(3)}"))
    cluster.run()
    cluster.expect()
    assert changes(cluster)
