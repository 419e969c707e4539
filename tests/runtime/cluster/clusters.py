"""Whole clusters for tests: real scheduler, driver and agents with counting engines, in processes or threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from runtime.chains import Block
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.launcher import AgentLauncher
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.cluster.launch.threads import ThreadLauncher
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel, counting_model, expected
from runtime.types import SamplingParams, SequenceRequest, TokenEvent
from tests.runtime.cluster.agent_programs import counting

LIMIT = 60.0
#: Two fine-tunes of one foundation; only the last part of each is its own.
MODELS = (
    counting_model("org/m", "1 2* 3 4* 5 6* 7 8", max_model_len=512),
    counting_model("org/n", "1 2* 3 4* 5 6* 7 9", max_model_len=512),
)
CUTS = (3, 5)
DEVICES = ("a", "b", "c")


def blocks(models: Sequence[IntegerModel] = MODELS, cuts: Sequence[int] = CUTS) -> list[Block]:
    """Return the distinct blocks of the models."""
    return list({block.id: block for model in models for block in model.blocks(*cuts)}.values())


def processes(
    pages: int = 400, pace: float = 0.0, models: Sequence[IntegerModel] = MODELS, **others: Any
) -> ProcessLauncher:
    """Return a launcher of agent processes with counting engines."""
    settings = AgentSettings(report_seconds=0.05)
    return ProcessLauncher(
        ProcessConfig(counting(models, pages, pace=pace), settings=settings, **{"beat_seconds": 0.1} | others)
    )


def in_threads(pages: int = 400) -> ThreadLauncher:
    """Return a launcher of agents in threads with counting engines."""
    return ThreadLauncher(
        lambda device: lambda: IntegerEngine(MODELS, pages),
        settings=AgentSettings(report_seconds=0.05),
        beat_seconds=0.1,
    )


@contextmanager
def cluster(
    launcher: AgentLauncher | Literal["processes", "threads"] = "processes",
    lifecycles: LifeConfig | None = None,
    devices: Sequence[str] = DEVICES,
    log: Callable[[bytes], object] | None = None,
    **config: Any,
) -> Iterator[ClusterDriver]:
    """Run a cluster of `MODELS`; fail if its shutdown takes longer than `LIMIT`."""
    made = (processes() if launcher == "processes" else in_threads()) if isinstance(launcher, str) else launcher
    chains = [model.chain(*CUTS) for model in MODELS]
    driver = ClusterDriver(
        chains, blocks(), devices, made, ClusterConfig(placement="partition", **config), lifecycles, log=log
    )
    try:
        yield driver
    finally:
        assert driver.shutdown(LIMIT)


def request(seq: str, prompt: Sequence[int], model: str = "org/m", max_tokens: int = 12) -> SequenceRequest:
    return SequenceRequest(seq, f"r-{seq}", model, tuple(prompt), SamplingParams(max_tokens, ignore_eos=True))


def oracle(one: SequenceRequest) -> list[int]:
    """Return the request's tokens as its model gives them."""
    return expected(next(model for model in MODELS if model.spec.name == one.model), one.prompt, one.sampling)


def verify(one: SequenceRequest, events: Sequence[TokenEvent]) -> None:
    """Assert that each token came once, in order, as from the model alone, with one finish."""
    assert [event.finish for event in events if event.finish is not None] == ["length"], events[-1]
    assert events[-1].finish is not None
    assert [event.index for event in events if event.token is not None] == list(range(one.sampling.max_tokens))
    assert [event.token for event in events if event.token is not None] == oracle(one)


def answered(driver: ClusterDriver, requests: Sequence[SequenceRequest]) -> dict[str, list[TokenEvent]]:
    """Run requests to their ends, and return the token events of each."""
    got: dict[str, list[TokenEvent]] = {one.seq: [] for one in requests}
    for event in driver.run(requests):
        got[event.seq].append(event)
    return got


@dataclass
class Load:
    """Clients in threads, each with one request after the other until `over` is set; every answer is verified."""

    driver: ClusterDriver
    clients: int = 4
    max_tokens: int = 40
    done: int = 0
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> Load:
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(LIMIT)
            assert not thread.is_alive(), "a request hangs"

    def _run(self, number: int) -> None:
        count = 0
        while not self.over.is_set():
            count += 1
            prompt = [(number * 31 + count * 7 + at) % 97 for at in range(5 + (number * 13 + count) % 60)]
            one = request(f"c{number}-{count}", prompt, MODELS[(number + count) % 2].spec.name, self.max_tokens)
            try:
                verify(one, answered(self.driver, [one])[one.seq])
                with self._lock:
                    self.done += 1
            except BaseException as error:
                self.wrong.append(f"{one.seq}: {error!r}")
                return


def eventually(condition: Callable[[], bool], seconds: float = LIMIT) -> bool:
    """Wait until the condition holds; return whether it does in the end."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def at_rest(driver: ClusterDriver) -> bool:
    """Return whether no sequence runs and every page is free, by the scheduler's and each agent's count."""
    state = driver.state()
    devices = [device for device in driver._scheduler.devices if device.alive]
    return (
        state.running == state.waiting == 0
        and state.pages.free == state.pages.capacity
        and len(devices) == len(DEVICES)
    )
