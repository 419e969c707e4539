"""Build a cluster for `zoo serve`: chains of stored models, agents, and the driver over them.

Agents are processes, threads, Ray actors, or one inline. torch and transformers are imported only when needed; the
sizes of K and V come from the models' configs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from cli.serving.gpus import gpus_of_agents, visible_to
from cli.serving.memory import agent_pools
from cli.serving.models import Chosen, check_device, start_engine
from cli.serving.options import ServeOptions
from runtime.cluster.driver.driver import ClusterDriver
from runtime.control.scheduler_io import ServeModel
from runtime.policy.profiles import DeviceProfile
from runtime.processors import count_usable
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.tracing.sink import TraceSink
from zoo.errors import NotServable

if TYPE_CHECKING:
    from runtime.chains import StageEngine
    from runtime.cluster.agent_process.loop import AgentSettings
    from runtime.cluster.agents.inline import InlineAgent
    from runtime.cluster.launch.launcher import AgentLauncher
    from runtime.config import EngineConfig
    from runtime.engine.models.servable import Executor
    from zoo.api import Zoo

#: Blocks are cut so that each agent gets about so many pieces: enough to balance load, few enough to plan with.
_PIECES = 4
_WHOLE = 1 << 62


def start_cluster(
    zoo: Zoo, options: ServeOptions, chosen: Chosen, database: str | None, trace: TraceSink | None,
    log: Callable[[bytes], object] | None = None, made: Callable[[StageEngine], object] | None = None,
) -> ClusterDriver:  # fmt: skip
    """Start a cluster with these models and return its driver. `log` receives the lines of the scheduler's log.

    `made` is called with each engine of an inline agent before it is used.

    Raises InputError, Unavailable if agents cannot be started, and the errors of loading.
    """
    from runtime.engine.catalog.block_profiles import measured_links, measured_pieces
    from runtime.engine.catalog.describe import describe_chain
    from runtime.engine.catalog.equivalents import equivalents_in
    from runtime.engine.catalog.surrogates import surrogates_of
    from runtime.engine.catalog.variants import DescribedVariant, rewriting_of, variants_in
    from runtime.engine.models.registry import half_page, longest_sequence

    names, executor = chosen.names, chosen.executor
    if executor == "dense":
        options = replace(options, executor="dense")
    config, inline = options.engine(), options.backend == "inline"
    check_device(config.device)
    devices = [config.device] if inline else [f"agent-{number}" for number in range(options.agents)]
    gpus = {} if inline or options.backend == "ray" else gpus_of_agents(config.device, devices)  # Ray assigns its own
    limits = options.adaptation()
    measured = chosen.measured or names
    half = half_page(zoo.store, config, measured, executor)
    if config.device_memory_bytes:
        least = max(min(config.kv_cache_memory_bytes, longest_sequence(zoo.store, config, measured, half)), 2 * half)
        config = replace(config, kv_cache_memory_bytes=least)
    piece = _WHOLE
    if not inline or config.gpu_memory_utilization:
        found_whole = [describe_chain(zoo.store, name, config, half, _WHOLE, None, executor) for name in measured]
        whole = sum({block.id: block.nbytes for each in found_whole for block in each.blocks}.values())
        adapters = sum(use.adapter_bytes for each in found_whole for use in each.chain.uses)
        config = replace(config, weights_bytes=weights_on_device(options, whole, adapters))
        piece = _WHOLE if inline else max(whole // (_PIECES * options.agents), 1)
    threads = _threads() if inline else max(count_usable() // options.agents, 1)
    settings = {
        "store": str(zoo.store.root),
        "database": database,
        "config": msgspec.to_builtins(config),
        "half_page": half,
        "threads": threads,
        "pools": dict(zip(devices, agent_pools(options), strict=False)),
    }

    sources = {*names, *(each.name for each in chosen.on_demand)}

    def describe(name: str) -> ServeModel:
        found = describe_chain(zoo.store, name, config, half, piece, None, executor)
        chain, variants = found.chain, tuple[DescribedVariant, ...]()
        if options.serve_deltas:
            variants = variants_in(zoo.store, chain, name, config, half, piece, limits, executor)
        variants += equivalents_in(zoo.store, chain, name, config, half, piece, sources, limits, executor)
        if options.serve_deltas:
            chain = replace(chain, rewriting=rewriting_of(zoo.store, name))
        cut = {zoo.model(name).name: chain, **{each.variant.name: each.variant.chain for each in variants}}
        return ServeModel(
            chain,
            (*found.blocks, *(block for each in variants for block in each.blocks)),
            tuple(v.variant for v in variants),
            measured_pieces(zoo.store, cut, config.device, threads),
        )

    served = [describe(name) for name in names]
    blocks = {block.id: block for each in served for block in each.blocks}
    profiled = tuple({profile.block: profile for each in served for profile in each.profiles}.values())
    profiles = DeviceProfile(config.device, profiled, measured_links(zoo.store, config.device, threads))
    adaptation = VariantChoice(tuple(variant for each in served for variant in each.variants), limits, profiles)
    cluster = options.cluster()
    if executor == "dense" and not options.decode_credit:
        cluster = replace(cluster, stride=1)  # the dense executor launches no step ahead
    known = {
        each.chain.model: surrogates_of(zoo.store, each.chain.model)
        for each in served
        if cluster.speculation.mode != "off"
    }
    launcher = (
        _alone(zoo, options, config, half, executor, trace, made)
        if inline
        else _launcher(options, agent_settings(options, config, half), settings, gpus)
    )
    driver = ClusterDriver(
        [each.chain for each in served], list(blocks.values()), devices, launcher, cluster, trace=trace,
        adaptation=adaptation, describe=describe, surrogates=known, log=log,
    )  # fmt: skip
    try:
        driver.require_loaded()
    except NotServable:
        driver.shutdown()
        raise
    return driver


def weights_on_device(options: ServeOptions, blocks: int, adapters: int) -> int:
    """Return the bytes of weights for which a GPU's page pool leaves room.

    That is the limit of an agent's weights if one is given, else all models: every device may come to load every block.
    Adapters are kept once, and joined twice: for recorded steps, and for the last other one.
    """
    return options.weights_limit or blocks + 3 * adapters


def agent_settings(options: ServeOptions, config: EngineConfig, half_page: int) -> AgentSettings:
    """Return an agent's settings. Weights that share their memory with pages leave `kv_cache_memory_bytes` to these."""
    from runtime.cluster.agent_process.loop import AgentSettings
    from runtime.kv.pool import PagePool

    loans = 0.0 if options.lending == "off" else options.loans.timeout_s
    beats = options.loans.beat_ms / 1000 if options.lending == "negotiated" else 0.0
    budget = config.device_memory_bytes and config.device_memory_bytes - PagePool.SPARE * 2 * half_page
    weights = budget - config.kv_cache_memory_bytes if budget else options.weights_limit
    return AgentSettings(
        weights,
        budget,
        loan_seconds=loans,
        loan_shipping=options.loans.ship,
        loan_native=options.loans.native,
        pool_beat_seconds=beats,
        watch_layers=options.roles is not None and options.handoff_grain != "request",
    )


def _alone(
    zoo: Zoo, options: ServeOptions, config: EngineConfig, half_page: int, executor: Executor,
    trace: TraceSink | None, made: Callable[[StageEngine], object] | None,
) -> InlineAgent:  # fmt: skip
    """Return one inline agent with an engine on this process's store and threads.

    Raises InputError if the engine does not fit the device.
    """
    from runtime.cluster.agents.inline import InlineAgent

    def make() -> StageEngine:
        engine = start_engine(zoo, config, half_page, executor)
        if made is not None:
            made(engine)
        return engine

    first = [make()]
    return InlineAgent(
        lambda: first.pop() if first else make(),
        options.agent(),
        agent_settings(options, config, half_page),
        config.device,
        trace=trace,
    )


def _threads() -> int:
    import torch

    return torch.get_num_threads()


def _launcher(
    options: ServeOptions, agent: AgentSettings, settings: dict[str, Any], gpus: Mapping[str, int]
) -> AgentLauncher:
    from cli.serving.agent_engines import ENGINES
    from runtime.cluster.agent_process.main import Preparation
    from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
    from runtime.cluster.launch.threads import ThreadLauncher
    from runtime.config import DirectConfig

    preparation = Preparation("staged", settings)
    own_lane = options.agents > 1 and options.cluster().speculation.own_lane
    direct = None if options.tensor_transport == "host" else DirectConfig(network=options.tensor_transport == "network")
    agents = replace(agent, own_lane=own_lane, direct=direct)
    if options.backend == "threads":
        return ThreadLauncher(
            lambda agent: partial(ENGINES["staged"](_on_gpu(settings, gpus.get(agent))), agent), options.agent(), agents
        )
    if options.backend == "ray":
        from runtime.cluster.launch.ray_actors import RayConfig, RayLauncher

        return RayLauncher(
            RayConfig(preparation, ENGINES, os.environ.get("RAY_ADDRESS"), options.agent(), agents, gpus=_gpus(options))
        )
    environments = {agent: visible_to(number) for agent, number in gpus.items()}
    if environments:
        preparation = Preparation("staged", _on_gpu(settings, 0))  # the only one that the process sees
    return ProcessLauncher(ProcessConfig(preparation, options.agent(), agents, environments=environments))


def _on_gpu(settings: dict[str, Any], number: int | None) -> dict[str, Any]:
    """Return the settings of an agent's engine on GPU `number`; None: unchanged."""
    return settings if number is None else settings | {"config": settings["config"] | {"device": f"cuda:{number}"}}


def _gpus(options: ServeOptions) -> float:
    """Return how many GPUs Ray reserves for each agent."""
    return 1.0 if options.engine().device.startswith("cuda") else 0.0
