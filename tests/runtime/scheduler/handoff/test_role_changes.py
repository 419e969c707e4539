"""Roles change while a cluster serves (TI-27): nothing that runs is lost or altered, and nothing half changed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

from runtime.config import AgentConfig, ClusterConfig, SpeculationConfig
from runtime.control.scheduler_io import RolesChanged, SetRoles
from runtime.messages import LoadStages, UnloadStages
from tests.runtime.scheduler.handoff.apart import Apart
from tests.runtime.scheduler.handoff.test_handoffs import moves, reach
from tests.runtime.scheduler.test_scheduler import some
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request


def change(cluster: VirtualCluster, roles: Mapping[str, str]) -> str:
    """Change roles now; return the error of the answer."""
    commands = cluster.scheduler.handle(SetRoles(tuple(roles.items())), cluster.now)
    cluster.carry_out(commands)
    (answer,) = (each for each in commands if isinstance(each, RolesChanged))
    return answer.error


def roles_of(cluster: VirtualCluster) -> list[str]:
    return [cluster.scheduler.devices.roles[device.name].name for device in cluster.scheduler.devices]


def up(cluster: VirtualCluster) -> VirtualCluster:
    cluster.run()
    return cluster


@pytest.mark.parametrize(
    ("roles", "why"),
    [
        ({"d9": "decode"}, "there is no agent 'd9'; there are d0, d1"),
        ({"d0": "idle"}, "'idle' is no role"),
        ({"d0": "decode"}, "m would not be whole on devices for prompts"),
        ({"d1": "prefill"}, "m would not be whole on devices that decode"),
        ({"d1": "both", "d9": "decode"}, "there is no agent"),
    ],
)
def test_what_cannot_be_changes_nothing(roles: Mapping[str, str], why: str) -> None:
    cluster = up(Apart("prefill", "decode"))
    assert why in change(cluster, roles) and roles_of(cluster) == ["prefill", "decode"]


def test_a_chain_cut_over_devices_needs_all_of_them_in_each_phase() -> None:
    cluster = up(Apart("prefill", "prefill", "decode", "decode", settings={"placement": "partition"}))
    assert "on devices for prompts" in change(cluster, {"d1": "decode"})
    assert change(cluster, {"d1": "both"}) == ""


def test_settings_that_exclude_roles_refuse_a_change() -> None:
    config = ClusterConfig(devices=2, speculation=SpeculationConfig("exact"))
    cluster = up(VirtualCluster(config=config, devices=2))
    assert "speculation" in change(cluster, {"d0": "prefill"}) and roles_of(cluster) == ["both", "both"]
    assert change(cluster, {"d0": "both"}) == ""


def test_models_that_come_by_demand_refuse_a_change() -> None:
    config = ClusterConfig(devices=2, residency="swap")
    cluster = up(VirtualCluster(config=config, devices=2, limits=(1 << 20, 1 << 20)))
    assert "--residency fixed" in change(cluster, {"d0": "prefill", "d1": "decode"})


def test_what_runs_finishes_where_it_is_and_what_comes_goes_where_its_phase_runs() -> None:
    cluster = Apart("both", "both", settings={"prefill_chunk": 4}, pages=1000)
    cluster.ask(*(request(f"s{at}", range(20), "m", max_tokens=20) for at in range(6)))
    reach(cluster, lambda: len(cluster.told["s0"].tokens) > 3)
    sent, before = len(cluster.sent), len(cluster.ran)
    assert change(cluster, {"d0": "prefill", "d1": "decode"}) == ""
    cluster.roles.update(d0="prefill", d1="decode")
    late = [request(f"t{at}", range(at, 20), "m", max_tokens=20) for at in range(6)]
    cluster.ask(*late, at=cluster.now)
    cluster.run()
    cluster.expect()
    assert not [each for each in cluster.sent[sent:] if isinstance(each[3], UnloadStages)]
    loads = [(to, stage) for _, _, to, each in cluster.sent if isinstance(each, LoadStages) for stage in each.stages]
    assert len(loads) == len(set(loads)), "nothing is loaded again"
    cluster.ran = [each for each in cluster.ran[before:] if each[1].startswith("t")]
    cluster.expect_phases()
    flips = [(event.dev, event.extra["was"], event.extra["role"]) for event in cluster.trace.named("role.flip")]
    assert flips == [("d0", "both", "prefill"), ("d1", "both", "decode")]


def test_what_waits_for_its_hand_off_decodes_where_it_is_if_that_decodes_now() -> None:
    cluster = Apart("prefill", "decode", settings={"max_num_seqs": 1}, pages=400)
    cluster.ask(request("a", range(9), "m", max_tokens=30), request("b", range(8), "m", max_tokens=30))
    reach(cluster, lambda: len(cluster.told["b"].tokens) == 1 and cluster.scheduler.sequences["b"].waits.handoff)
    assert change(cluster, {"d0": "both"}) == ""
    cluster.run()
    cluster.expect()
    assert cluster.scheduler.state().counters.handoffs == 1


@pytest.mark.parametrize("roles", [{"d1": "both"}, {"d0": "both"}, {"d0": "decode", "d1": "prefill"}])
def test_a_change_while_k_and_v_are_under_way(roles: Mapping[str, str]) -> None:
    cluster = Apart("prefill", "decode", page_bytes_per_ms=20.0)
    cluster.ask(request("a", range(20), "m", max_tokens=20))
    reach(cluster, lambda: moves(cluster))
    assert change(cluster, roles) == ""
    cluster.run()
    cluster.expect()


@pytest.mark.parametrize("seed", range(8))
def test_changes_aborts_and_deaths_at_random(seed: int) -> None:
    rng = random.Random(seed)
    names = ("prefill", "decode", "both")
    devices, pages = rng.choice((2, 3, 4)), rng.choice((70, 120, 400))
    fields: dict[str, Any] = dict(pages=pages, page_bytes_per_ms=rng.choice((1e9, 200.0, 30.0)))
    settings = {"prefill_chunk": rng.choice((4, 64)), "prefix_caching": rng.choice(("off", "active", "cached"))}
    if rng.random() < 0.5:
        fields["agent_config"] = AgentConfig(recompute_chunk=8, fetch_window=1, host_memory_bytes=1 << 20)
        settings["preemption_mode"] = "swap"
    cluster = Apart(*("both",) * devices, settings=settings, **fields)
    asked = some(24, seed)
    for one in asked:
        cluster.ask(one, at=rng.randrange(60 * MS))
    for one in asked[::6]:
        cluster.abort(one.seq, rng.randrange(100 * MS))
        del cluster.requests[one.seq]
    changed = []
    for _ in range(12):
        wanted = {f"d{at}": rng.choice(names) for at in range(devices) if rng.random() < 0.7}
        cluster.at(rng.randrange(2, 120) * MS, lambda wanted=wanted: changed.append(change(cluster, wanted)))
    for _ in range(rng.choice((0, 3))):
        cluster.at(rng.randrange(150 * MS), lambda: cluster.kill(f"d{rng.randrange(devices)}"))
    cluster.run()
    cluster.expect()
    assert "" in changed
