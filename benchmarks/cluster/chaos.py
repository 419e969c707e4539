"""Kill agents of a cluster (`kill -9`) at random moments under load, while sequences migrate at random.

    python -m benchmarks.cluster.chaos [--kills N] [--agents N] [--clients N] [--seed S] [--phase NAME|all]
                               [--tensor-transport host|direct] [--output FILE]

Processes, scheduler, driver and agents are real; the engines use integers (`runtime.engine.fakes.integer_engine`), so
that every token depends on every page and hidden state before it. Every request must get each token of its model once,
in order. Clients notice only a delay.

Printed: requests, tokens, errors (none expected), and per kill the seconds until a new agent was up on the device
(`up_s`) and until every request in progress had its next token or its end (`served_s`).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.reports import deliver
from runtime.chains import Block
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig, DirectConfig
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.types import SamplingParams, SequenceRequest

#: Two fine-tunes of one foundation; two of their stages have attention.
MODELS = tuple(
    counting_model(name, f"1 2* 3 4* 5 6* 7 {last}", max_model_len=512) for name, last in (("org/m", 8), ("org/n", 9))
)
CUTS = (3, 5)
PAGES = 600
#: Seconds; longer than any recovery may take.
PATIENCE = 60.0
#: Seconds until `/health` must report a dead agent.
NOTICE = 1.0


@dataclass
class Kill:
    """One kill and its consequences.

    Fields:
        phase: Phase of the agent's life when it was killed.
        running: Sequences in the cluster at that time.
        moving: Migrations in progress at that time.
        at: When, in seconds of the monotonic clock.
        open: Sequences in progress at that time.
        up_s: Seconds until a new agent was up on the device.
        served_s: Seconds until each sequence in `open` had its next token or its end.
    """

    device: str
    incarnation: int
    phase: str
    running: int
    moving: int
    at: float
    open: set[str]
    up_s: float | None = None
    served_s: float | None = None


@dataclass
class Clients:
    """Threads that send requests one after the other until stopped, and compare the answers with the expected tokens.

    Fields:
        done: Requests answered.
        tokens: Tokens received.
        wrong: Descriptions of wrong answers.
        heard: When each open sequence started or had its latest token.
        over: Set to end the threads.
        awake: Cleared to pause them.
    """

    driver: ClusterDriver
    count: int
    seed: int
    done: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    heard: dict[str, float] = field(default_factory=dict)
    over: threading.Event = field(default_factory=threading.Event)
    awake: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def rest(self) -> None:
        """Send no new requests, and wait until all are answered."""
        self.awake.clear()
        end = time.monotonic() + PATIENCE
        while self.heard and time.monotonic() < end:
            time.sleep(0.005)

    def go_on(self) -> None:
        self.awake.set()

    def __enter__(self) -> Clients:
        self.awake.set()
        self._threads = [
            threading.Thread(target=self._run, args=(number,), daemon=True) for number in range(self.count)
        ]
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.awake.set()
        end = time.monotonic() + PATIENCE
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                self.wrong.append("a request hangs")

    def _run(self, number: int) -> None:
        chance = random.Random(self.seed * 1000 + number)
        count = 0
        while not self.over.is_set():
            self.awake.wait()
            count += 1
            model = chance.choice(MODELS)
            prompt = tuple(chance.randrange(97) for _ in range(chance.randrange(1, 80)))
            sampling = SamplingParams(chance.randrange(1, 120), ignore_eos=True)
            one = SequenceRequest(f"c{number}-{count}", f"r{number}-{count}", model.spec.name, prompt, sampling)
            wrong = self._check_answer(one, expected(model, prompt, sampling))
            if wrong:
                self.wrong.append(f"{one.seq}: {wrong}")
                return

    def _check_answer(self, one: SequenceRequest, wanted: Sequence[int]) -> str:
        """Run one request. Return what is wrong with its answer, empty if nothing is."""
        got: list[int] = []
        ends = 0
        with self._lock:
            self.heard[one.seq] = time.monotonic()
        for event in self.driver.run([one]):
            if event.token is not None:
                if event.index != len(got):
                    return f"token {event.index} came where {len(got)} was due"
                got.append(event.token)
            if event.finish is not None:
                ends += 1
                if event.finish != "length":
                    return f"{event.finish}: {event.error}"
            self.heard[one.seq] = time.monotonic()
        with self._lock:
            del self.heard[one.seq]
            self.done += 1
            self.tokens += len(got)
        return "" if got == list(wanted) and ends == 1 else f"{len(got)} tokens that are not the model's, {ends} ends"

    def open_requests(self) -> set[str]:
        with self._lock:
            return set(self.heard)

    def served_since(self, seqs: set[str], moment: float) -> bool:
        """Return whether each of the sequences has had a token or its end since `moment`."""
        return all(self.heard.get(seq, moment + 1.0) > moment for seq in seqs)


@dataclass
class Mover:
    """A thread that starts migrations of random blocks of sequences; failed ones are ignored."""

    driver: ClusterDriver
    clients: Clients
    seed: int
    over: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Mover:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join(PATIENCE)

    def _run(self) -> None:
        chance = random.Random(self.seed)
        while not self.over.wait(0.01):
            seqs = sorted(self.clients.open_requests())
            if not seqs:
                continue
            first = chance.randrange(3)
            seq, blocks, device = (
                chance.choice(seqs),
                range(first, chance.randrange(first, 3) + 1),
                chance.choice(self.driver.agents()).device,
            )
            for _ in range(5):  # the stage may have to be loaded on the target first
                if self.driver.move(seq, blocks, device) is None or self.over.wait(0.005):
                    break


class Chaos:
    """Kills agents and checks what `health` reports meanwhile.

    Fields:
        lies: Reports in which a dead agent was missed.
    """

    def __init__(self, driver: ClusterDriver, fleet: ProcessLauncher, clients: Clients, seed: int) -> None:
        self._driver, self._fleet, self._clients, self._chance = driver, fleet, clients, random.Random(seed)
        self.kills: list[Kill] = []
        self.lies: list[str] = []

    def run(self, kills: int) -> None:
        while len(self.kills) < kills and not self._clients.wrong:
            self._watch(self._chance.uniform(0.0, 0.5))
            self._kill()
            if self._chance.random() < 0.6:  # otherwise the next kill hits a cluster that has not recovered
                self._until(lambda: all(kill.up_s is not None for kill in self.kills))
        self._until(lambda: all(kill.up_s is not None and kill.served_s is not None for kill in self.kills))

    def _kill(self) -> None:
        facts = self._chance.choice(self._driver.agents())
        pid = self._fleet.pid(facts.device, facts.incarnation)
        if pid is None:
            return
        running, moving = self._driver.state().running, self._driver.view.moving()
        kill = Kill(
            facts.device,
            facts.incarnation,
            facts.phase,
            running,
            moving,
            time.monotonic(),
            self._clients.open_requests(),
        )
        os.kill(pid, signal.SIGKILL)
        self.kills.append(kill)

    def _watch(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() > end)

    def _until(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition() and not self._clients.wrong:
            if time.monotonic() > end:
                self._clients.wrong.append("the cluster does not recover")
                return
            self._look()
            time.sleep(0.002)

    def _look(self) -> None:
        now = time.monotonic()
        health = self._driver.health()
        agents = {each["device"]: each for each in health["agents"]}
        for kill in self.kills:
            agent = agents[kill.device]
            if kill.up_s is None and agent["incarnation"] > kill.incarnation and agent["phase"] == "up":
                kill.up_s = now - kill.at
            if kill.served_s is None and self._clients.served_since(kill.open, kill.at):
                kill.served_s = now - kill.at
            noticed = agent["incarnation"] > kill.incarnation or agent["phase"] != "up"
            if not noticed and now - kill.at > NOTICE:
                self.lies.append(
                    f"{kill.device} was killed {now - kill.at:.2f} s ago, and health says {health['status']}"
                )


def chaos(
    kills: int, agents: int = 3, clients: int = 6, seed: int = 0, pace: float = 0.5, direct: bool = False
) -> dict[str, Any]:  # fmt: skip
    """Run the benchmark and return its document.

    With `direct`, tensors go from device to device (BL-33). `wrong` and `lies` must be empty, and `free` must be
    `capacity` for each agent.
    """
    settings = {"models": [msgspec.to_builtins(model) for model in MODELS], "pages": PAGES, "pace": pace}
    known = AgentSettings(report_seconds=0.1, direct=DirectConfig() if direct else None)
    fleet = ProcessLauncher(ProcessConfig(Preparation("counting", settings), settings=known, beat_seconds=0.2))
    lives = LifeConfig(starts=1000, steady_seconds=0.05, backoff_seconds=0.02, backoff_most=0.1)
    blocks: list[Block] = list({block.id: block for model in MODELS for block in model.blocks(*CUTS)}.values())
    devices = [f"d{number}" for number in range(agents)]
    with ClusterDriver(
        [model.chain(*CUTS) for model in MODELS],
        blocks,
        devices,
        fleet,
        ClusterConfig(placement="partition", prefill_chunk=32),
        lives,
    ) as driver:
        with Clients(driver, clients, seed) as load, Mover(driver, load, seed):
            storm = Chaos(driver, fleet, load, seed)
            storm.run(kills)
        free = free_pages(driver, agents)
        counts = asdict(driver.view.moves())
        health = driver.health()["status"]
    return {
        "kills": len(storm.kills),
        "phases": _phases(storm.kills),
        "requests": load.done,
        "tokens": load.tokens,
        "wrong": load.wrong,
        "lies": storm.lies,
        "moves": counts,
        "free": free,
        "capacity": PAGES,
        "health": health,
        "up_s": spread([kill.up_s for kill in storm.kills]),
        "served_s": spread([kill.served_s for kill in storm.kills]),
    }


def free_pages(driver: ClusterDriver, agents: int) -> list[int]:
    """Return each agent's count of free pages once all requests have ended; after 10 s, the last reported counts."""
    end = time.monotonic() + 10.0
    while time.monotonic() < end:
        state, free = driver.state(), [report.pages_free for report in driver.view.reports().values()]
        if (
            state.running == state.waiting == 0
            and state.pages.free == state.pages.capacity
            and free == [PAGES] * agents
        ):
            break
        time.sleep(0.05)
    return free


def _phases(kills: Sequence[Kill]) -> dict[str, int]:
    return {
        "starting": sum(kill.phase == "starting" for kill in kills),
        "up": sum(kill.phase == "up" for kill in kills),
        "moving": sum(kill.moving > 0 for kill in kills),
    }


def spread(seconds: Sequence[float | None]) -> dict[str, float]:
    known = sorted(each for each in seconds if each is not None)
    if not known:
        return {}
    return {"p50": statistics.median(known), "p95": known[int(0.95 * (len(known) - 1))], "max": known[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--agents", type=int, default=3)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--phase",
        help="kill in this phase of an agent's work instead, or in `all` of them (`benchmarks.cluster.phases`)",
    )
    parser.add_argument(
        "--tensor-transport", choices=("host", "direct"), default="host", help="as of `zoo serve`; not with --phase"
    )
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    if given.phase:
        from benchmarks.cluster.phases import PHASES, phases

        document = phases(list(PHASES) if given.phase == "all" else [given.phase], given.clients, given.seed)
    else:
        document = chaos(
            given.kills, given.agents, given.clients, given.seed, direct=given.tensor_transport == "direct"
        )
    deliver(document, given.output)


if __name__ == "__main__":
    main()
