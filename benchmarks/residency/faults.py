"""Kill agents and let reads of the store fail at random moments, while models that do not fit together come and go.

    python -m benchmarks.residency.faults FOLDER STORE [--full 4] [--lora 2] [--kills 30] [--reads 30] [--load-kills 0]
        [--agents 2] [--room 2] [--clients 4] [--pause 4] [--seed S] [--output FILE]

FOLDER is a Llama checkpoint, best a tiny one; STORE is filled with fine-tunes of it (`benchmarks.residency.family`).
The agents, in processes of their own, have room for the weights of `--room` models each. Clients ask random models;
every answer is compared with the one of its model alone in an engine. An answer may be an error only if a read failed
that a stage of its model needed; a killed agent costs time only.

Before each fault a stage comes on demand, so that models come and go between any two. `--kills` end an agent at a
random moment, `--load-kills` in the midst of the tensors of a stage that comes; reads fail there anyway.

Printed: requests, errors by reason, answers that were wrong (none expected), kills, failed reads, loads and unloads.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reports import deliver
from benchmarks.residency.family import make
from benchmarks.residency.faulty_agents import FAULTS
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig, EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.models.registry import half_page
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo

#: Prompts of each model, and tokens of an answer.
_PROMPTS, _ANSWER = 3, 8
_PAGES = 1 << 20
#: A stage is killed behind at most so many of its tensors.
_TENSORS = 12
#: Seconds that a load on demand is awaited for.
_SWAP = 5.0
#: What a failed read makes of requests for its model.
_ALLOWED = "cannot be loaded: OSError"
#: Seconds; longer than a recovery takes.
_PATIENCE = 120.0
_PROGRAM = (sys.executable, "-m", "benchmarks.residency.faulty_agents")

Question = tuple[str, tuple[int, ...]]


@dataclass
class CheckingClients:
    """Threads that send requests one after the other, and compare the answers.

    Fields:
        wanted: The answer of every question.
        answered: Requests answered with the right tokens.
        failed: Errors, by reason.
        wrong: Descriptions of wrong answers.
    """

    driver: ClusterDriver
    wanted: Mapping[Question, Sequence[int]]
    count: int
    seed: int
    answered: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> CheckingClients:
        self._threads = [threading.Thread(target=self._run, args=(at,), daemon=True) for at in range(self.count)]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for thread in self._threads:
            thread.join(_PATIENCE)
            if thread.is_alive():
                self.wrong.append("a request hangs")

    def _run(self, client: int) -> None:
        chance, number, questions = random.Random(self.seed * 1000 + client), 0, sorted(self.wanted)
        while not self.over.is_set():
            number += 1
            question, name = chance.choice(questions), f"c{client}-{number}"
            params = SamplingParams(max_tokens=_ANSWER, ignore_eos=True)
            events = list(self.driver.run([SequenceRequest(name, name, *question, params)]))
            tokens = [event.token for event in events if event.token is not None]
            last = events[-1]
            with self._lock:
                if last.finish == "error":
                    self.failed[(last.error or "").replace(question[0], "MODEL")] += 1
                    if _ALLOWED not in (last.error or ""):
                        self.wrong.append(f"{name}: {last.error}")
                    if tokens != list(self.wanted[question])[: len(tokens)]:
                        self.wrong.append(f"{name}: other tokens before its error")
                elif tokens == list(self.wanted[question]):
                    self.answered += 1
                else:
                    self.wrong.append(f"{name}: {len(tokens)} tokens, not those of {question[0]}")
            if last.finish == "error":
                time.sleep(0.05)


def faults(
    store: Path,
    names: Sequence[str],
    kills: int,
    reads: int,
    clients: int = 4,
    seed: int = 0,
    agents: int = 2,
    pause: float = 1.0,
    load_kills: int = 0,
    room: float = 2.0,
) -> dict[str, Any]:
    """Run the benchmark, with up to `pause` seconds between faults, and return its document. `wrong` must be empty."""
    wanted = own_answers(store, names, seed)
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory() as orders, Zoo(store, create=False) as zoo:
        driver, fleet = _cluster(zoo, names, Path(orders), agents, room)
        with driver, CheckingClients(driver, wanted, clients, seed) as load:
            done: Counter[str] = Counter()
            events = ["kill"] * kills + ["read"] * reads + ["load-kill"] * load_kills
            for event in chance.sample(events, len(events)):
                done["swapped"] += _await_load(driver)
                time.sleep(chance.uniform(0.0, pause))
                if event == "kill":
                    done[event] += _kill(driver, fleet, chance)
                elif event == "read":
                    done[event] += _order(Path(orders), load, "fail", "failed", "")
                else:
                    done[event] += _order(Path(orders), load, "kill", "killed", str(chance.randrange(_TENSORS)))
            _await_answers(load, 2 * len(names))
        counters = driver.state().counters
    return {
        "kills": done["kill"], "load_kills": done["load-kill"], "failed_reads": done["read"],
        "swapped": done["swapped"], "answered": load.answered, "errors": dict(load.failed), "wrong": load.wrong,
        "loads": counters.stage_loads, "unloads": counters.stage_unloads,
    }  # fmt: skip


def own_answers(store: Path, names: Sequence[str], seed: int) -> dict[Question, list[int]]:
    """Return questions to all models with each model's own answers, alone in an engine."""
    chance, found = random.Random(seed), dict[Question, list[int]]()
    with Zoo(store, create=False) as zoo:
        for name in names:
            with start_driver(zoo, ServeOptions(kv_cache_memory_bytes=_PAGES), choose(zoo, [name])) as driver:
                vocabulary = driver.models()[0].vocab_size
                for _ in range(_PROMPTS):
                    prompt = tuple(chance.randrange(3, vocabulary) for _ in range(chance.randrange(1, 20)))
                    request = SequenceRequest("a", "a", name, prompt, SamplingParams(_ANSWER, ignore_eos=True))
                    found[name, prompt] = [e.token for e in driver.run([request]) if e.token is not None]
    return found


def _cluster(
    zoo: Zoo, names: Sequence[str], orders: Path, agents: int, room: float
) -> tuple[ClusterDriver, ProcessLauncher]:
    config = EngineConfig(kv_cache_memory_bytes=_PAGES)
    half = half_page(zoo.store, config, names)
    found = [describe_chain(zoo.store, name, config, half, 1 << 62) for name in names]
    largest = max(sum(tensor.nbytes for tensor in zoo.model(name).manifest.tensors) for name in names)
    settings = {
        "store": str(zoo.store.root), "database": None, "config": msgspec.to_builtins(config), "half_page": half,
        "threads": 1,
    }  # fmt: skip
    limits = AgentSettings(weights=int(room * largest), report_seconds=0.1)
    environment = {f"agent-{number}": {FAULTS: str(orders)} for number in range(agents)}
    fleet = ProcessLauncher(
        ProcessConfig(Preparation("staged", settings), settings=limits, program=_PROGRAM, environments=environment)
    )
    blocks = {block.id: block for each in found for block in each.blocks}
    lives = LifeConfig(starts=1000, steady_seconds=0.05, backoff_seconds=0.02, backoff_most=0.1)
    cluster = ClusterConfig(residency="swap", swap_patience_ms=20)
    chains = [each.chain for each in found]
    return ClusterDriver(chains, list(blocks.values()), list(environment), fleet, cluster, lives), fleet


def _kill(driver: ClusterDriver, fleet: ProcessLauncher, chance: random.Random) -> int:
    """Kill the process of a random agent, once one is up; return how many were killed."""
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        up = [each for each in driver.agents() if each.phase == "up"]
        if up:
            facts = chance.choice(up)
            pid = fleet.pid(facts.device, facts.incarnation)
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                return 1
        time.sleep(0.01)
    return 0


def _order(orders: Path, load: CheckingClients, order: str, done: str, how: str) -> int:
    """Write an order for the agents, and wait until one has obeyed; return how many did."""
    before, end = len(list(orders.glob(f"{done}-*"))), time.monotonic() + _PATIENCE
    (orders / "new").write_text(how)
    (orders / "new").rename(orders / order)
    while time.monotonic() < end and not load.wrong:
        if len(list(orders.glob(f"{done}-*"))) > before:
            return 1
        time.sleep(0.01)
    return 0


def _await_load(driver: ClusterDriver) -> int:
    """Wait until a stage has come on demand, at most `_SWAP` seconds; return how many came."""
    before, end = driver.state().counters.stage_loads, time.monotonic() + _SWAP
    while time.monotonic() < end:
        if driver.state().counters.stage_loads > before:
            return 1
        time.sleep(0.005)
    return 0


def _await_answers(load: CheckingClients, count: int) -> None:
    """Wait until so many more requests are answered: the cluster has recovered."""
    before, end = load.answered, time.monotonic() + _PATIENCE
    while load.answered < before + count and not load.wrong:
        if time.monotonic() > end:
            load.wrong.append("the cluster does not recover")
        time.sleep(0.05)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--full", type=int, default=4)
    parser.add_argument("--lora", type=int, default=2)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--reads", type=int, default=30)
    parser.add_argument("--load-kills", type=int, default=0, help="agents that are killed while they load a stage")
    parser.add_argument("--agents", type=int, default=2)
    parser.add_argument("--room", type=float, default=2.0, help="models that an agent has room for")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--pause", type=float, default=4.0, help="most seconds between faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    names = make(given.folder, given.store, given.full, given.lora)
    made = faults(
        given.store, names, given.kills, given.reads, given.clients, given.seed, given.agents, given.pause,
        given.load_kills, given.room,
    )  # fmt: skip
    deliver(made, given.output)


if __name__ == "__main__":
    main()
