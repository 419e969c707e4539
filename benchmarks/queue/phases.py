"""`zoo serve` that is killed, or an agent of which is, in a named phase of a request's way.

    python -m benchmarks.queue.phases PHASE AT VICTIMS serve …

The process passes the phase AT times; then it kills the processes of which VICTIMS, a file, has the ids, or itself
where the file has none. Before the file is there, nothing is counted. Swaps and loads are phases of agents: they are
passed where the agent is in the server's process, with one device.
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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.queue.servers import KeyedStream, KillableServer, serving
from runtime.agent.sequences.host_copies import HostCopies
from runtime.cluster.agent_process.commands import CommandExecutor
from runtime.cluster.driver.plan_thread import PlanThread
from runtime.queueing import requests
from runtime.queueing.broker import RabbitIntake
from runtime.server.durable.store import RequestStore
from runtime.server.openai.sse import Outlet

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


class PhaseLives:
    """The lives of a server with the streams of one seed: in each but the last one, a process is killed in a phase.

    Attributes:
        reached: Lives in which the phase was reached, so that a process was killed.
    """

    def __init__(self, seed: int, given: Sequence[dict[str, Any]], phase: str, victim: str, kills: int) -> None:
        self._draw = random.Random(f"{seed} {phase} {victim}")
        self._phase, self._victim, self._kills = phase, victim, kills
        self.streams = [KeyedStream(f"{seed}-{number}", body) for number, body in enumerate(given)]
        self.output: list[bytes] = []
        self.reached = 0

    def run(self, store: str, model: str, options: Sequence[str]) -> None:
        """Run all lives; the last one ends everything. Each begins with its share of the streams."""
        share = -(-len(self.streams) // self._kills)
        for life in range(self._kills):
            came = [stream for stream in self.streams[: share * (life + 1)] if not stream.ended]
            with tempfile.TemporaryDirectory() as folder:
                victims = Path(folder) / "victims"
                phase, at = self._phase, str(self._draw.randint(1, PHASES[self._phase][3]))
                if phase == "fetch" and life % 2 == 0:
                    phase, at = "send", "1"  # there is nothing to fetch behind a server that ended everything
                prefix = ["-m", "benchmarks.queue.phases", phase, at, str(victims)]
                if self._victim == "server" and phase == "fetch":
                    victims.touch()  # it fetches while it starts
                try:
                    self._live(store, model, options, prefix, victims, came)
                except RuntimeError:  # it was killed before it took requests
                    self.reached += 1
        with serving(store, model, options) as server:
            _follow([stream for stream in self.streams if not stream.ended], server)

    def _live(
        self, store: str, model: str, options: Sequence[str], prefix: Sequence[str], victims: Path,
        came: Sequence[KeyedStream],
    ) -> None:  # fmt: skip
        with serving(store, model, options, prefix) as server:
            if self._victim == "agent":
                with server.http() as http:
                    agents = http.get("/zoo/state").json()["agents"]
                victims.with_name("new").write_text(str(self._draw.choice([each["pid"] for each in agents])))
                victims.with_name("new").rename(victims)
            else:
                victims.touch()
            _follow(came, server)
            if self._victim == "server":
                self.reached += _ended(server)
                return
            with server.http() as http:
                self.reached += any(each["deaths"] for each in http.get("/health").json()["agents"])


def _ended(server: KillableServer) -> bool:
    """Return whether a server that closed its connections was killed."""
    try:
        return server.process.wait(1) == -signal.SIGKILL
    except subprocess.TimeoutExpired:
        return False


def _follow(streams: Sequence[KeyedStream], server: KillableServer) -> None:
    threads = [threading.Thread(target=stream.follow, args=(server,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main() -> None:
    import cli.app

    phase, at, victims = sys.argv[1:4]
    arm(phase, int(at), Path(victims))
    sys.argv[1:] = sys.argv[4:]
    cli.app.main()


if __name__ == "__main__":
    main()
