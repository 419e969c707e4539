"""Speculated hops over real agents: messages over sockets, the choice by reports, the chain's own tokens, counters."""

from __future__ import annotations

import time

from runtime.chains import Surrogate
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.threads import ThreadLauncher
from runtime.config import ClusterConfig, SpeculationConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import surrogate_of
from tests.runtime.cluster.clusters import CUTS, DEVICES, MODELS, Load, at_rest, blocks, eventually


def test_exact_tokens_over_real_agents() -> None:
    """New sequences have the bottleneck hop speculated; its device is by far the slowest."""
    stand_in = surrogate_of(MODELS[0], "org/m~", 4, 3)

    def engine(device: str) -> IntegerEngine:
        seconds = 0.006 if device == "a" else 0.0002
        return IntegerEngine([*MODELS, stand_in], 400, rewrites=True, pace=lambda ns: time.sleep(seconds))

    engines = ThreadLauncher(
        lambda device: lambda: engine(device), settings=AgentSettings(report_seconds=0.02), beat_seconds=0.1
    )
    config = ClusterConfig(placement="partition", speculation=SpeculationConfig("exact", top=0.5))
    chains = [model.chain(*CUTS) for model in MODELS]
    known = {"org/m": [Surrogate("org/m~", 4, 5, 1)]}
    with ClusterDriver(chains, blocks(), DEVICES, engines, config, surrogates=known) as driver:
        with Load(driver, clients=5, max_tokens=10) as load:
            assert eventually(
                lambda: driver.view.speculation().hits > 5 and driver.view.speculation().misses > 5, 20.0
            ), driver.view.speculation()
        assert not load.wrong and load.done
        counters = driver.state().counters
        assert counters.speculations >= counters.speculation_hits + counters.speculation_misses > 10
        assert eventually(lambda: at_rest(driver))
