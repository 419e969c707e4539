"""Start a driver for one device without the other options of `zoo serve`, for measurements and tests of stored models.

torch and transformers are imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from cli.serving.models import Chosen, start_engine
from zoo.errors import NotServable

if TYPE_CHECKING:
    from runtime.chains import StageEngine
    from runtime.cluster.driver.driver import ClusterDriver
    from runtime.config import EngineConfig, PrefixCaching
    from runtime.tracing.sink import TraceSink
    from zoo.api import Zoo

_WHOLE = 1 << 62


def start_one_device(
    zoo: Zoo,
    config: EngineConfig,
    chosen: Chosen,
    *,
    max_num_batched_tokens: int = 512,
    max_num_seqs: int = 256,
    prefix_caching: PrefixCaching = "active",
    shared_prompt_bytes: int = 256 << 20,
    credit: int = 1,
    trace: TraceSink | None = None,
    made: Callable[[StageEngine], object] | None = None,
) -> ClusterDriver:
    """Return a driver with one inline agent, as `zoo serve` has it on one device.

    `credit` is how many tokens the agent may decode before it reports. `made` is called with the engine before it is
    used. Raises InputError, NotServable, Unavailable and the errors of loading.
    """
    from runtime.cluster.agents.inline import InlineAgent
    from runtime.cluster.driver.driver import ClusterDriver
    from runtime.control.scheduler_io import ServeModel
    from runtime.engine.catalog.describe import describe_chain
    from runtime.engine.models.registry import half_page
    from runtime.shipped import SHIPPED_AGENT, SHIPPED_CLUSTER, Serving, agent_config, cluster_config

    half = half_page(zoo.store, config, chosen.names, chosen.executor)

    def describe(name: str) -> ServeModel:
        found = describe_chain(zoo.store, name, config, half, _WHOLE, None, chosen.executor)
        return ServeModel(found.chain, found.blocks)

    engines = [start_engine(zoo, config, half, chosen.executor)]
    if made is not None:
        made(engines[0])
    served = [describe(name) for name in chosen.names]
    blocks = {block.id: block for each in served for block in each.blocks}
    serving = Serving(inline=True, decode_credit=credit)
    agent = agent_config(
        serving,
        replace(SHIPPED_AGENT, max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs),
    )
    settings = replace(
        SHIPPED_CLUSTER, max_num_seqs=max_num_seqs, prefix_caching=prefix_caching,
        shared_prompt_bytes=shared_prompt_bytes,
    )  # fmt: skip
    cluster = cluster_config(serving, settings, max_num_batched_tokens)
    driver = ClusterDriver(
        [each.chain for each in served], list(blocks.values()), [config.device],
        InlineAgent(engines.pop, agent, device=config.device, trace=trace), cluster, trace=trace, describe=describe,
    )  # fmt: skip
    try:
        driver.require_loaded()
    except NotServable:
        driver.shutdown()
        raise
    return driver
