"""Kill devices while loans stand, in clusters of agents in processes; what was lost with them.

`lending` runs a small Llama in float32: its tokens are those of transformers.
"""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig, EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.models.registry import half_page
from runtime.scheduler.lending.loans import Loan
from runtime.scheduler.scheduler import Scheduler
from runtime.types import TraceEvent
from tests.runtime.cluster.clusters import LIMIT
from tests.runtime.engine.conftest import Bench
from tests.runtime.virtual import ListTrace

#: What of a loan is killed.
Victim = Literal["creditor", "debtor"]
#: Two layers, four tokens to a page: 80 pages of 170.
CONFIG, PAGES, CHUNK, COUNT = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4), 80, 16, 40
PROMPT = tuple(random.Random(1).choices(range(3, 90), k=300))


@dataclass
class Killing(ListTrace):
    """Kills a device of a loan, on the scheduler's thread, with a token of the loan's sequence.

    Fields:
        after: Number of the first token with which it may be; None: not now. It is None again afterwards.
        may: Whether it may be with this loan; asked of all loans of a sequence with each token.
        delay: Seconds from the token to the kill.
        paths: Devices of all paths.
    """

    scheduler: Scheduler | None = None
    victim: Victim = "creditor"
    after: int | None = None
    may: Callable[[Loan], bool] = lambda loan: True
    delay: float = 0.0
    killed: list[str] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def emit(self, event: TraceEvent) -> None:
        super().emit(event)
        if self.scheduler is None or event.ev != "token":
            return
        self.paths |= {hop.device for each in self.scheduler._state.running.values() for hop in each.path}
        loans = [each for each in self.scheduler.lending.loans if each.standing and each.sequence.seq == event.seq]
        loans = [each for each in loans if self.may(each)]
        if loans and self.after is not None and event.n is not None and event.n >= self.after:
            self.after = None
            loan = random.Random(len(self.killed)).choice(loans)
            device = loan.creditor if self.victim == "creditor" else loan.debtor
            pid = pid_of(self.scheduler, device)
            if self.delay:
                threading.Timer(self.delay, self._kill, (device, pid)).start()
            else:
                self._kill(device, pid)

    def _kill(self, device: str, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.killed.append(device)


def pid_of(scheduler: Scheduler, device: str) -> int:
    return scheduler.devices[device].facts.pid


def lost_tokens(trace: ListTrace, page_tokens: int, since: int = 0) -> int:
    """Return the tokens of which dead creditors held K and V, in some layers or in all, counted by hop.

    `since`: number of the first loss.
    """
    lost = defaultdict[tuple[int, str | None], set[int]](set)
    for event in trace.named("kv.lost")[since:]:
        lost[event.t, event.dev] |= set(range(*event.extra["groups"]))
    return page_tokens * sum(map(len, lost.values()))


def lends_layers(trace: ListTrace, seq: str) -> bool:
    """Return whether some layers of a sequence were lent, and not page sets of all."""
    return any("layers" in event.extra for event in trace.named("kv.lend") if event.extra["seq"] == seq)


def put_long(bench: Bench) -> None:
    """Store the model `long`."""
    bench.family(
        "llama", "long", num_hidden_layers=2, max_position_embeddings=1024, num_key_value_heads=2,
        initializer_range=0.5, seed=3,
    )  # fmt: skip


@contextmanager
def lending(
    bench: Bench, trace: Killing, config: ClusterConfig, settings: AgentSettings, pages: int = PAGES, **process: Any
) -> Iterator[ClusterDriver]:  # fmt: skip
    """Run `long` over agents in processes. `pages`: of each; `process`: fields of ProcessConfig."""
    half = half_page(bench.store, CONFIG, ["long"])
    engine = replace(CONFIG, kv_cache_memory_bytes=2 * half * pages)
    described = describe_chain(bench.store, "long", engine, half, 1)
    staged = {
        "store": str(bench.store.root), "database": None, "config": msgspec.to_builtins(engine), "half_page": half,
        "threads": 1,
    }  # fmt: skip
    made = ProcessConfig(Preparation("staged", staged), settings=settings, beat_seconds=0.1, **process)
    lives = LifeConfig(starts=10_000, backoff_seconds=0.05, backoff_most=0.25)
    driver = ClusterDriver(
        [described.chain], described.blocks, [f"agent-{at}" for at in range(config.devices)], ProcessLauncher(made),
        config, lives, trace=trace,
    )  # fmt: skip
    try:
        trace.scheduler = driver._scheduler
        yield driver
    finally:
        assert driver.shutdown(LIMIT)
