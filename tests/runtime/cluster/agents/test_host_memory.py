"""Host memory on a real agent's loop: copies there and back, the weights' share, and what can be seen of both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from runtime.chains import Array
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import AgentConfig, ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.types import Opened, SequenceRequest
from tests.runtime.cluster.clusters import CUTS, MODELS, answered, blocks, eventually, request, verify

HOST = 1 << 20
#: Six sequences, of which about three have room at full length.
ASKED = [request(f"s{at}", range(at + 1, at + 30), max_tokens=60) for at in range(6)]


class Hosting(IntegerEngine):
    """An engine with host memory, as real ones have it. `shares`: bytes of K and V that it was told of."""

    def __init__(self) -> None:
        super().__init__(MODELS, 210)
        self.shares: list[int] = []
        self.refuses: type[Exception] | None = None

    @property
    def host_weights(self) -> int:
        return 7

    def share_host_memory(self, kv: int) -> None:
        assert 0 <= kv <= HOST
        self.shares.append(kv)

    def copy_out(self, key: str, tokens: int, pages: Sequence[int]) -> Array:
        if self.refuses is not None:
            raise self.refuses("no room")
        return self.read_pages(pages)

    def copy_in(self, opened: Opened, tokens: int, pages: Sequence[int], data: Array) -> None:
        assert opened.request.seq.startswith("s") and len(pages) <= data.shape[0]
        self.write_pages(pages, data)


def driven(make: Callable[[], IntegerEngine], host: int = HOST) -> ClusterDriver:
    agent = AgentConfig(host_memory_bytes=host, chunk_prefill=True)
    only = InlineAgent(make, agent, AgentSettings(report_seconds=0.01))
    chains = [model.chain(*CUTS) for model in MODELS]
    return ClusterDriver(chains, blocks(), [only.device], only, ClusterConfig(preemption_mode="swap"))


def run(driver: ClusterDriver, asked: Sequence[SequenceRequest] = ASKED) -> None:
    for seq, events in answered(driver, asked).items():
        verify(next(each for each in asked if each.seq == seq), events)


def test_copies_come_back_and_both_shares_are_seen() -> None:
    engine = Hosting()
    with driven(lambda: engine) as driver:
        run(driver)
        counters = driver.state().counters
        assert counters.swapped_in == counters.swapped_out == counters.preemptions > 0 == counters.resumed_tokens
        assert max(engine.shares) > 0 == engine.shares[-1]
        assert eventually(lambda: driver.memory().host_weights == 7 and driver.memory().host_kv == 0)
        (device,) = driver.snapshot()["devices"]
        assert (device["host_memory"], device["host_kv"]) == (HOST, 0)
        kinds = {each["kind"] for each in driver.snapshot()["estimates"]}
        assert {"copy", "prefill"} <= kinds


def test_engines_without_host_memory_copy_pages() -> None:
    with driven(lambda: IntegerEngine(MODELS, 210)) as driver:
        run(driver)
        counters = driver.state().counters
        assert counters.swapped_in == counters.preemptions > 0


@pytest.mark.parametrize("error", [MemoryError, RuntimeError, ValueError])
def test_what_cannot_be_copied_is_computed_again(error: type[Exception]) -> None:
    engine = Hosting()
    engine.refuses = error
    with driven(lambda: engine) as driver:
        run(driver)
        counters = driver.state().counters
        assert counters.swapped_out == counters.swapped_lost > 0 and counters.resumed_tokens > 0
        assert engine.shares[-1] == 0


def test_without_the_setting_nothing_is_kept() -> None:
    engine = Hosting()
    with driven(lambda: engine, host=0) as driver:
        run(driver)
        assert driver.state().counters.preemptions > 0 and not engine.shares
