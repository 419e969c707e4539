"""Run a baseline of engines (PM, PS) on a scenario's devices and requests."""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.sim.baselines.deployment import EngineDeployment, EngineDevice
from runtime.sim.cost.steps import Pricing
from runtime.sim.experiments.policy import Policy
from runtime.sim.experiments.scenario import Scenario
from runtime.sim.models.family import family_of
from runtime.sim.results.played import Played
from runtime.sim.run.loading import Host
from runtime.sim.run.network import Network
from runtime.sim.run.node import Cost
from runtime.sim.workload.requests import Demand
from zoo.errors import InputError


def deploy(scenario: Scenario, policy: Policy) -> EngineDeployment:
    """Build the deployment. Raises InputError for a policy without engines, or if an engine fits no device."""
    if policy.engines is None or policy.cutting.provision == "blocks":
        raise InputError("a baseline of engines has provision pm or ps")
    hardware, cluster = scenario.cluster, scenario.cluster.cluster()
    family = family_of(scenario.apps.apps(), policy.cutting)
    hosts = [Host(server, hardware.host_cache * server.count) for server in cluster.servers]
    prices = {server.gpu: Pricing(server.gpu, family) for server in cluster.servers}
    devices = {
        name: EngineDevice(hosts[at], prices[hosts[at].server.gpu], hardware.usable_bytes(hosts[at].server.gpu))
        for name, at in cluster.devices()
    }
    return EngineDeployment(family, devices, policy.engines, scenario.pace.tick)


def play_engines(
    scenario: Scenario, policy: Policy, demand: Demand, progress: Callable[[int], None] | None = None
) -> Played:
    """Run a baseline on a demand. Raises InputError as `deploy`."""
    made = deploy(scenario, policy)
    begin, used = time.perf_counter(), time.process_time()
    ledger = made.run(demand.requests(), progress, demand.clients)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    devices = made.devices
    hosts = {id(each.host): each.host for each in devices.values()}.values()
    return Played(
        ledger,
        Network(scenario.cluster.cluster()),
        {name: each.busy for name, each in devices.items()},
        sum(each.launching for each in devices.values()),
        made.counts(),
        sum(host.disk_bytes for host in hosts),
        sum(each.steps for each in devices.values()),
        made.clock.now,
        made.clock.played,
        seconds,
        used,
        Cost(),
    )
