"""Run one policy of a scenario: the real scheduler and agents over simulated engines and links.

The same scenario, policy and seed give the same trace, byte for byte. Real time is measured separately and never
affects the simulation.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TextIO

from runtime.agent.agent import Agent
from runtime.agent.steps.queue import Lane
from runtime.chains import Surrogate
from runtime.policy.routing.variants import DispatchLimits
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.scheduler.observe.replay_log import Handler, ReplayRecorder, head_of
from runtime.scheduler.scheduler import Scheduler
from runtime.sim.cost.hardware import Gpu
from runtime.sim.cost.steps import Pricing
from runtime.sim.experiments.engines import play_engines
from runtime.sim.experiments.policy import Policy
from runtime.sim.experiments.scenario import Scenario
from runtime.sim.models.family import SimulatedFamily, family_of
from runtime.sim.models.size_variants import ladder_of
from runtime.sim.models.stand_ins import with_stand_ins, with_variants
from runtime.sim.results.played import COUNTED, Played
from runtime.sim.run.engine import SimEngine
from runtime.sim.run.loading import Host, Loader
from runtime.sim.run.network import Network
from runtime.sim.run.node import Node
from runtime.sim.run.simulation import Simulation
from runtime.sim.workload.predictions import HiddenAnswers
from runtime.sim.workload.requests import Demand
from runtime.tracing.sink import TraceSink, line_of
from runtime.types import TraceEvent
from zoo.errors import InputError


class Lines:
    """A trace sink that writes events as lines of a file, in order, without loss."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def emit(self, event: TraceEvent) -> None:
        self._file.write(line_of(event))


def play(
    scenario: Scenario,
    policy: str,
    demand: Demand,
    trace: Path | None = None,
    log: Path | None = None,
    faults: Sequence[tuple[int, str]] = (),
    progress: Callable[[int], None] | None = None,
) -> Played:
    """Run one policy of a scenario on a demand.

    Args:
        trace: File for the trace.
        log: File for the scheduler's log, for `scheduler.observe.replay_log.replay`.
        faults: Devices that die: (time in ns, name).
        progress: Called now and then with the number of requests that have ended since the last call.

    Devices of a baseline of engines do not die. Raises InputError for an unknown policy, a file that cannot be written,
    or a trace or log of a baseline.
    """
    if policy not in scenario.policies:
        raise InputError(f"{scenario.name} has no policy {policy!r}; it has {', '.join(scenario.policies)}")
    if scenario.policies[policy].engines is not None:
        if trace is not None or log is not None:
            raise InputError(f"{policy} has no scheduler of this project, so there is no trace and no log of it")
        return play_engines(scenario, scenario.policies[policy], demand, progress)
    with ExitStack() as files:
        try:
            sink = None if trace is None else Lines(files.enter_context(trace.open("w", encoding="utf-8")))
            record = None if log is None else files.enter_context(log.open("wb")).write
            return _played(
                assemble(scenario, scenario.policies[policy], sink, record),
                demand,
                faults,
                progress,
                bool(scenario.apps.ladder) or scenario.policies[policy].adaptive,
            )
        except OSError as error:
            raise InputError(f"{error.filename or trace or log} cannot be written: {error.strerror}") from None


def assemble(
    scenario: Scenario, policy: Policy, trace: TraceSink | None = None, record: Callable[[bytes], object] | None = None
) -> Simulation:
    """Build the simulation of a policy. `record`: receives the lines of the scheduler's log."""
    cluster = scenario.cluster.cluster()
    servers = dict(cluster.devices())
    policy = replace(policy, scheduler=policy.scheduler_of(tuple(servers)))
    family = family_of(scenario.apps.apps(), policy.cutting)
    chains = [family.chain(name) for name in scenario.models()]
    blocks = family.blocks()
    family, adaptation = _adaptation(scenario, policy, family, cluster.servers[0].gpu)
    surrogates: Mapping[str, tuple[Surrogate, ...]] = {}
    if policy.scheduler.speculation.mode != "off":
        family, surrogates = with_stand_ins(family, policy.stand_ins)
    deciding = Scheduler(chains, blocks, policy.scheduler, trace, surrogates, adaptation)
    scheduler: Handler = deciding
    if record is not None:
        if scenario.apps.ladder:
            raise InputError("a run with a ladder keeps no log")
        scheduler = ReplayRecorder(deciding, head_of(chains, blocks, policy.scheduler, surrogates, adaptation), record)
    hosts = [Host(server, scenario.cluster.host_cache * server.count) for server in cluster.servers]
    prices = {server.gpu: Pricing(server.gpu, family) for server in cluster.servers}

    ends: dict[str, int] = {}

    def node(name: str) -> Node:
        host = hosts[servers[name]]
        return _node(name, scenario, policy, family, host, prices[host.server.gpu], ends)

    nodes = {name: node(name) for name in servers}
    return Simulation(
        scheduler,
        nodes,
        Network(cluster, scenario.cluster.hops),
        scenario.pace,
        node,
        timed=True,
        loads_stop_steps=scenario.cluster.loads == "stop",
        counts=lambda: _counts(deciding),
        answers=HiddenAnswers(policy.lengths, scenario.asked.longest, ends) if policy.lengths.hidden else None,
    )


def _counts(scheduler: Scheduler) -> dict[str, int]:
    """Return the scheduler's counters: predictions, migrations, tokens copied and recomputed."""
    counters = asdict(scheduler.state().counters)
    return {name: counters[name] for name in COUNTED} | asdict(scheduler.control.counts)


def _adaptation(
    scenario: Scenario, policy: Policy, family: SimulatedFamily, gpu: Gpu
) -> tuple[SimulatedFamily, VariantChoice | None]:
    """Return the family with its variants, and what adaptive requests may get."""
    ladder = scenario.apps.ladder
    if ladder:
        best = scenario.apps.accuracy[0]
        scores = tuple(min(1.0, each / best) for each in scenario.apps.accuracy)
        return family, ladder_of(family, ladder, scores, scenario.apps.step_ms / 1e3, gpu)
    if policy.cutting.equivalents:
        family, variants = with_variants(family, DispatchLimits().equivalent)
        return family, VariantChoice(variants)
    return family, None


def _node(
    name: str, scenario: Scenario, policy: Policy, family: SimulatedFamily, host: Host, pricing: Pricing,
    ends: Mapping[str, int],
) -> Node:  # fmt: skip
    gpu = host.server.gpu
    weights, usable = scenario.cluster.weight_bytes(gpu, family.nbytes), scenario.cluster.usable_bytes(gpu)
    budget = usable if scenario.cluster.pages == "rest" else 0
    pages = (budget or usable - weights) // family.page_bytes
    if pages < 1:
        raise InputError(f"a device of {gpu.name} has no room for a page of {family.page_bytes:,} bytes")
    engine = SimEngine(name, gpu, family, pages, pricing, policy.stand_ins.right, ends, policy.lengths.slows)
    lanes: tuple[Lane, ...] = ("real", "ahead") if policy.scheduler.speculation.own_lane else ("all",)
    agent = Agent(name, pages, policy.agent, engine.alike, strides=policy.strides, page_bytes=family.page_bytes)
    return Node(agent, engine, Loader(engine, host), weights, budget, lanes=lanes)


def _played(
    simulation: Simulation,
    demand: Demand,
    faults: Sequence[tuple[int, str]],
    progress: Callable[[int], None] | None,
    adaptive: bool,
) -> Played:
    begin, used = time.perf_counter(), time.process_time()
    with _uncollected():
        ledger = simulation.run(demand.requests(adaptive), faults, progress, demand.clients)
    seconds, used = time.perf_counter() - begin, time.process_time() - used
    nodes = simulation.nodes
    return Played(
        ledger,
        simulation.network,
        {name: node.busy for name, node in nodes.items()},
        sum(node.engine.launching for node in nodes.values()),
        simulation.counts(),
        sum(host.disk_bytes for host in {id(node.loader.host): node.loader.host for node in nodes.values()}.values()),
        sum(node.steps for node in nodes.values()),
        simulation.clock.now,
        simulation.clock.played,
        seconds,
        used,
        simulation.cost,
    )


@contextmanager
def _uncollected() -> Iterator[None]:
    """Disable the garbage collector: a run makes no cycles, and collection took a sixth of its time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
