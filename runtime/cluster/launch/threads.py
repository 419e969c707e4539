"""Run agents as threads of this process, with the same loop and the same transport, which then copies nothing.

For a single machine with low load, for tests, and for engines that cannot run in processes. A thread cannot be killed:
`kill` ends it after the running step. Two agents of one device never overlap.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable

import zmq

from runtime.chains import StageEngine
from runtime.cluster.agent_process.exit_status import AgentEnded, AgentExit
from runtime.cluster.agent_process.loop import AgentLoop, AgentSettings
from runtime.cluster.agent_process.main import Identity, be
from runtime.cluster.launch.launcher import AgentDied, AgentSlot
from runtime.config import AgentConfig


class ThreadLauncher:
    """Launches agents as threads. `make`: returns what makes a device's engine, on the thread that will run it."""

    def __init__(
        self,
        make: Callable[[str], Callable[[], StageEngine]],
        agent: AgentConfig | None = None,
        settings: AgentSettings | None = None,
        beat_seconds: float = 0.5,
    ) -> None:
        self._make, self._agent, self._settings = make, agent or AgentConfig(), settings or AgentSettings()
        self._beat_seconds = beat_seconds
        self._name = uuid.uuid4().hex
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.seat = AgentSlot(f"inproc://{self._name}.scheduler", context=self._context)
        self._listener: Callable[[AgentDied], None] = lambda died: None
        self._scheduler = ""
        self._lock = threading.Lock()
        self._loops: dict[tuple[str, int], AgentLoop] = {}
        self._killed: set[tuple[str, int]] = set()
        self._threads: dict[str, threading.Thread] = {}

    def attach(self, listener: Callable[[AgentDied], None], scheduler: str) -> None:
        self._listener, self._scheduler = listener, scheduler

    def start(self, device: str, incarnation: int) -> None:
        before = self._threads.get(device)
        self._threads[device] = thread = threading.Thread(
            target=self._run, args=(device, incarnation, before), name=f"zoo-agent-{device}", daemon=True
        )
        thread.start()

    def kill(self, device: str, incarnation: int) -> None:
        with self._lock:
            self._killed.add((device, incarnation))
            loop = self._loops.get((device, incarnation))
        if loop is not None:
            loop.stop()

    def shutdown(self, timeout: float) -> None:
        with self._lock:
            loops = list(self._loops.values())
        for loop in loops:
            loop.stop()
        for thread in self._threads.values():
            thread.join(timeout)
        if not any(thread.is_alive() for thread in self._threads.values()):
            self._context.term()

    def _run(self, device: str, incarnation: int, before: threading.Thread | None) -> None:
        if before is not None:
            before.join()
        who = device, incarnation
        bind = f"inproc://{self._name}.{device}.{incarnation}"
        identity = Identity(
            device, incarnation, self._scheduler, bind, self._settings, self._agent, None, self._beat_seconds
        )

        def begun(loop: AgentLoop) -> None:
            with self._lock:
                self._loops[who] = loop
                if who in self._killed:
                    loop.stop()

        try:
            make = self._make(device)
            ended = be(identity, lambda _: make(), self._context, begun)
        except Exception as error:
            ended = AgentEnded(AgentExit.DEFECT, type(error).__name__)
        with self._lock:
            self._loops.pop(who, None)
        self._listener(AgentDied(device, incarnation, int(ended.code), ended.reason))
