"""Clusters of real models over real agents for tests, and each model's expected answers.

The models are two foundations of two families, an adapter, a stitched chain and a stand-in. Answers of foundations
are `generate`'s of transformers; those of the adapter and the stitched chain come from one engine with the whole
model (`tests/runtime/engine` compares that with a recomputation of the stack without any cache).
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.launcher import AgentLauncher
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import AgentConfig, ClusterConfig, DirectConfig, EngineConfig
from runtime.control.scheduler_io import Tick
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.catalog.surrogates import surrogates_of
from runtime.engine.models.registry import half_page
from runtime.scheduler.scheduler import Scheduler
from runtime.types import SamplingParams, SequenceRequest, TokenEvent
from tests.chains import put_chain, put_stitch
from tests.runtime.engine.conftest import Bench
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import prompts
from tests.runtime.virtual import ListTrace
from zoo.records import Equivalence, ScoredRun

Backend = Literal["processes", "ray"]
MODELS = ("llama", "neox", "lora", "stitched")
COUNT = 20
SAMPLING = SamplingParams(COUNT, ignore_eos=True)
CONFIG = EngineConfig(kv_cache_memory_bytes=1 << 20, page_tokens=4)
LENGTHS = (3, 11, 26)
#: Pages of a device: enough for what runs at once, and little more.
PAGES = 160
LIMIT = 60.0

#: A model's name and the number of its prompt.
Question = tuple[str, int]


def put_family(bench: Bench) -> None:
    """Store two foundations of two families, an adapter, a stitched chain, and a stand-in for one layer."""
    bench.family("llama", "llama", num_hidden_layers=3, num_key_value_heads=2, seed=1)
    wide = dict(hidden_size=96, intermediate_size=80, num_attention_heads=6, num_key_value_heads=3, head_dim=32)
    bench.family("llama", "wide", num_hidden_layers=2, seed=2, **wide)
    bench.family("llama", "slim", num_hidden_layers=3, num_key_value_heads=2, intermediate_size=16, seed=3)
    bench.family("gpt_neox", "neox", num_hidden_layers=6, seed=4)
    bench.lora("llama", "lora", seed=6)
    put_stitch(bench.store, "llama", "wide")
    put_chain(bench.store, "stitched", ("llama", 0, 2), ("wide", 0, 2))
    put_chain(bench.store, "cheaper", ("llama", 0, 1), ("slim", 1, 2), ("llama", 2, 3), embedding="llama", head="llama")
    with bench.store.catalog.writing() as writer:  # components 3 and 4 are those of its second layer
        writer.put_equivalences(
            [Equivalence("surrogate", ScoredRun("llama", 3, 5), ScoredRun("cheaper", 3, 5), "probe", 0.5)]
        )


def questions() -> dict[Question, tuple[int, ...]]:
    """Return all prompts by model and number."""
    return {(model, number): prompt for model in MODELS for number, prompt in enumerate(prompts(len(model), LENGTHS))}


def answers_of(bench: Bench) -> dict[Question, list[int]]:
    """Return each model's own answers; those of foundations are checked against transformers."""
    answers: dict[Question, list[int]] = {}
    for model in MODELS:
        engine = PagedDevice(bench.store, CONFIG, [model])
        stock = reference(bench.folders[model]) if model in ("llama", "neox") else None
        for question, prompt in questions().items():
            if question[0] != model:
                continue
            asked = {0: [SequenceRequest("a", "a", model, prompt, SAMPLING)]}
            answers[question] = drive(engine, asked, Limits(8)).tokens("a")
            if stock is not None:
                assert same_tokens(stock, prompt, greedy(stock, prompt, COUNT), answers[question]) == COUNT
    return answers


@contextmanager
def cluster(
    bench: Bench,
    backend: Backend,
    agents: int,
    config: ClusterConfig,
    trace: ListTrace,
    boundary_bytes: int = 0,
    direct: DirectConfig | None = None,
) -> Iterator[tuple[ClusterDriver, Any]]:
    """Run these models over so many agents; yield the driver and the launcher."""
    half = half_page(bench.store, CONFIG, [*MODELS, "wide", "slim"])
    # Each device can hold the longest sequence alone, so any block can go to any device without shortening an answer.
    engine = replace(CONFIG, kv_cache_memory_bytes=2 * half * PAGES, max_model_len=96)
    described = [describe_chain(bench.store, name, engine, half, 1) for name in MODELS]
    settings = {
        "store": str(bench.store.root),
        "database": None,
        "config": msgspec.to_builtins(engine),
        "half_page": half,
        "threads": 1,
    }
    launcher = _launcher(backend, Preparation("staged", settings), boundary_bytes, direct)
    driver = ClusterDriver(
        [each.chain for each in described],
        list({block.id: block for each in described for block in each.blocks}.values()),
        [f"agent-{number}" for number in range(agents)],
        launcher,
        config,
        LifeConfig(backoff_seconds=0.05),
        trace=trace,
        surrogates={"llama": surrogates_of(bench.store, "llama")} if config.speculation.mode != "off" else {},
    )
    try:
        yield driver, launcher
    finally:
        assert driver.shutdown(LIMIT)


def _launcher(
    backend: Backend, preparation: Preparation, boundary_bytes: int, direct: DirectConfig | None
) -> AgentLauncher:
    settings, agent = (
        AgentSettings(report_seconds=0.05, direct=direct),
        AgentConfig(recompute_chunk=8, fetch_window=1, activation_cache_bytes=boundary_bytes),
    )
    if backend == "processes":
        return ProcessLauncher(ProcessConfig(preparation, agent, settings, beat_seconds=0.1))
    from cli.serving.agent_engines import ENGINES
    from runtime.cluster.launch.ray_actors import RayConfig, RayLauncher

    return RayLauncher(RayConfig(preparation, ENGINES, None, agent, settings))


def asked(question: Question, seq: str) -> SequenceRequest:
    return SequenceRequest(seq, f"r-{seq}", question[0], questions()[question], SAMPLING)


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    """Return the tokens of one sequence, after asserting that each came once, in order, with one finish."""
    assert [event.finish for event in events if event.finish] == ["length"], events[-1:]
    assert [event.index for event in events if event.token is not None] == list(range(COUNT))
    return [event.token for event in events if event.token is not None]


def on_scheduler(driver: ClusterDriver, act: Callable[[Scheduler, int], Any]) -> Any:
    """Call `act` with the scheduler on its thread, between two events; return its result."""
    answer: Future[Any] = Future()

    def run(now: int) -> None:
        try:
            answer.set_result(act(driver._scheduler, now))
            # sends what `act` has queued, with an event's commands
            driver._scheduler_loop._handle_events([Tick()], now)
        except BaseException as error:
            answer.set_exception(error)

    driver._scheduler_loop.run_soon(run)
    return answer.result(LIMIT)


@dataclass
class Load:
    """Clients in threads that send one question after the other until `over` is set.

    Every answer is compared with the model's own.
    """

    driver: ClusterDriver
    answers: Mapping[Question, list[int]]
    clients: int = 6
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
        rng, count = random.Random(number), 0
        while not self.over.is_set():
            count += 1
            question = rng.choice(sorted(self.answers))
            try:
                got = tokens(list(self.driver.run([asked(question, f"c{number}-{count}")])))
                assert got == self.answers[question], f"{got} for {self.answers[question]}"
                with self._lock:
                    self.done += 1
            except BaseException as error:
                self.wrong.append(f"{question}: {error!r}")
                return

    def running(self) -> list[str]:
        """Return the sequences that run now."""
        return on_scheduler(
            self.driver, lambda scheduler, now: [seq for seq, each in scheduler.sequences.items() if each.path]
        )
