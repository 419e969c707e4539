"""`zoo serve` that is killed, or an agent or the broker of it, in a named phase of a request's way.

    python -m benchmarks.queue.phases PHASE AT VICTIMS serve …

The process passes the phase AT times; then it kills the processes of which VICTIMS, a file, has the ids (with a minus,
a group of processes), or itself where the file has none. Before the file is there, nothing is counted. Swaps and loads
are phases of agents: they are passed where the agent is in the server's process, with one device.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from benchmarks.queue.rabbitmq import Broker
from benchmarks.queue.servers import KeyedStream, KillableServer, serving
from runtime.agent.sequences.host_copies import HostCopies
from runtime.cluster.agent_process.commands import CommandExecutor
from runtime.cluster.driver.plan_thread import PlanThread
from runtime.queueing import requests
from runtime.queueing.broker import RabbitIntake
from runtime.server.durable.store import RequestStore
from runtime.server.openai.sse import Outlet

Victim = Literal["server", "agent", "broker"]
VICTIMS: tuple[Victim, ...] = get_args(Victim)

#: By phase: what is called there, whether the kill comes before it, and the most passes until the kill.
PHASES: Mapping[str, tuple[Any, str, bool, int]] = {
    "accept": (RequestStore, "put", True, 3),
    "offer": (RabbitIntake, "put", True, 3),
    "fetch": (RequestStore, "claim", False, 1),
    "journal": (requests, "append", False, 4),
    "send": (Outlet, "write", False, 4),
    "plan": (PlanThread, "_solve", True, 2),
    "swap-out": (HostCopies, "copied_out", True, 2),
    "swap-in": (HostCopies, "copied_in", True, 2),
    "load": (CommandExecutor, "_load", False, 2),
    "finalise": (requests, "finish", False, 2),
    "ack": (RabbitIntake, "ack", True, 2),
}
#: Phases that only servers with a broker have, and that those have not.
BROKERED, UNBROKERED = frozenset({"offer", "ack"}), frozenset({"accept"})
#: Phases of agents.
OF_AGENTS = frozenset({"swap-out", "swap-in", "load"})
#: Seconds for which a client comes back to a server that refuses its request, and between two attempts.
_PATIENCE, _AGAIN = 60.0, 0.2
#: Seconds between two looks at a broker, and after the streams: what follows an answer's end may be a phase, too.
_LOOK, _AFTER = 0.05, 1.0


def arm(phase: str, at: int, victims: Path) -> None:
    """Kill at the `at`th pass of a phase from now on."""
    owner, name, early, _ = PHASES[phase]
    original: Callable[..., Any] = getattr(owner, name)
    passed = 0

    def pass_by() -> None:
        nonlocal passed
        if not victims.exists():
            return
        passed += 1
        if passed == at:
            for pid in [int(each) for each in victims.read_text().split()] or [os.getpid()]:
                os.kill(pid, signal.SIGKILL)

    if asyncio.iscoroutinefunction(original):

        async def awaited(*args: Any, **options: Any) -> Any:
            if early:
                pass_by()
            result = await original(*args, **options)
            if not early:
                pass_by()
            return result

        setattr(owner, name, awaited)
        return

    def called(*args: Any, **options: Any) -> Any:
        if early:
            pass_by()
        result = original(*args, **options)
        if not early:
            pass_by()
        return result

    setattr(owner, name, called)


def phases_of(victim: Victim, brokered: bool) -> tuple[str, ...]:
    """Return the phases in which a process may be killed."""
    no = set(UNBROKERED if brokered else BROKERED)
    if victim == "agent":
        no |= OF_AGENTS if brokered else {*OF_AGENTS, "fetch"}
    return tuple(name for name in PHASES if name not in no)


class PhaseLives:
    """The lives of a server with the streams of one seed: in each but the last one, a process is killed in a phase.

    Args:
        broker: Of the servers, if they have one.

    Attributes:
        reached: Lives in which the phase was reached, so that a process was killed.
        next_token: Seconds from a server's announcement to the first new event of a stream that was under way.
        resumed: Of each server, the least of these: the other streams may wait for their models' turn.
    """

    def __init__(
        self, seed: int, given: Sequence[dict[str, Any]], phase: str, victim: Victim, kills: int,
        broker: Broker | None = None,
    ) -> None:  # fmt: skip
        self._draw = random.Random(f"{seed} {phase} {victim}")
        self._phase, self._victim, self._kills, self._broker = phase, victim, kills, broker
        self.streams = [KeyedStream(f"{phase}-{victim}-{seed}-{number}", body) for number, body in enumerate(given)]
        self.output: list[bytes] = []
        self.reached = 0
        self.next_token: list[float] = []
        self.resumed: list[float] = []

    @property
    def gap(self) -> float:
        """Longest time between two events of one connection, in seconds: servers outlive agents and brokers."""
        return max((stream.gap for stream in self.streams), default=0.0)

    @property
    def refused(self) -> int:
        """Answers 503."""
        return sum(stream.refused for stream in self.streams)

    def run(self, store: str, model: str, options: Sequence[str]) -> None:
        """Run all lives; the last one ends everything. Each begins with its share of the streams."""
        share = -(-len(self.streams) // self._kills)
        for life in range(self._kills):
            came = [stream for stream in self.streams[: share * (life + 1)] if not stream.ended]
            with tempfile.TemporaryDirectory() as folder:
                victims = Path(folder) / "victims"
                phase, most = self._phase, min(PHASES[self._phase][3], max(len(came), 1))
                at = str(self._draw.randint(1, most))
                if self._victim == "server" and phase == "fetch" and life % 2 == 0:
                    # There is nothing to fetch behind a server that ended everything; clients have events by then.
                    phase, at = "send", "4"
                prefix = ["-m", "benchmarks.queue.phases", phase, at, str(victims)]
                if self._victim == "server" and phase == "fetch":
                    victims.touch()  # it fetches while it starts
                try:
                    self._live(store, model, options, prefix, victims, came)
                except RuntimeError:  # it was killed before it took requests
                    self.reached += 1
        with serving(store, model, options) as server:
            self._follow([stream for stream in self.streams if not stream.ended], server)

    def _live(
        self, store: str, model: str, options: Sequence[str], prefix: Sequence[str], victims: Path,
        came: Sequence[KeyedStream],
    ) -> None:  # fmt: skip
        with serving(store, model, options, prefix) as server:
            if self._victim == "server":
                victims.touch()
                self._follow(came, server)
                self.reached += _ended(server)
            elif self._victim == "agent":
                with server.http() as http:
                    agents = http.get("/zoo/state").json()["agents"]
                _write(victims, self._draw.choice([each["pid"] for each in agents]))
                self._follow(came, server)
                with server.http() as http:
                    self.reached += any(each["deaths"] for each in http.get("/health").json()["agents"])
            else:
                self._live_with_broker(server, victims, came)

    def _live_with_broker(self, server: KillableServer, victims: Path, came: Sequence[KeyedStream]) -> None:
        """Start the broker again as often as it is killed."""
        broker, over = self._broker, threading.Event()
        if broker is None or broker.process is None:
            raise ValueError("servers without a broker outlive it")
        _write(victims, -broker.process.pid)

        def revive() -> None:
            while not over.wait(_LOOK):
                self._revive(broker)

        reviving = threading.Thread(target=revive)
        reviving.start()
        try:
            self._follow(came, server)
            time.sleep(_AFTER)
        finally:
            over.set()
            reviving.join()
            self._revive(broker)

    def _revive(self, broker: Broker) -> None:
        """Start the broker again if it was killed."""
        if broker.process is not None and broker.process.poll() is not None:
            broker.start()
            self.reached += 1

    def _follow(self, streams: Sequence[KeyedStream], server: KillableServer) -> None:
        """Follow streams until they end or the server dies; come back where it refuses a request."""
        before = {stream.key: (len(stream.arrivals), bool(stream.numbers)) for stream in streams}

        def follow(stream: KeyedStream) -> None:
            end = time.monotonic() + _PATIENCE
            refused = -1
            while refused != stream.refused and time.monotonic() < end:
                refused = stream.refused
                stream.follow(server)
                if refused != stream.refused:
                    time.sleep(_AGAIN)

        threads = [threading.Thread(target=follow, args=(stream,)) for stream in streams]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took = [
            stream.arrivals[count] - server.ready
            for stream in streams
            for count, resumed in (before[stream.key],)
            if resumed and len(stream.arrivals) > count
        ]
        self.next_token += took
        self.resumed += [min(took)] if took else []


def _write(victims: Path, pid: int) -> None:
    """Name what is to be killed; the file comes as a whole."""
    victims.with_name("new").write_text(str(pid))
    victims.with_name("new").rename(victims)


def _ended(server: KillableServer) -> bool:
    """Return whether a server that closed its connections was killed."""
    try:
        return server.process.wait(1) == -signal.SIGKILL
    except subprocess.TimeoutExpired:
        return False


def main() -> None:
    import cli.app

    phase, at, victims = sys.argv[1:4]
    arm(phase, int(at), Path(victims))
    sys.argv[1:] = sys.argv[4:]
    cli.app.main()


if __name__ == "__main__":
    main()
