"""Run agents as subprocesses: each gets its identity over a pipe, and its end is noticed at once.

One process stands by with everything imported, so that a killed agent is replaced in the time it takes to load weights.
It is started after all other processes have finished their imports, so that it does not slow them down. Sockets lie in
a folder that only this user can enter; over the network (`host`) everything is encrypted with the cluster's keys.

- Children are started by one thread that lives as long as the launcher, because the kernel ends them when that thread
  ends (PR_SET_PDEATHSIG). On other systems they end when their pipe closes. No agent outlives this process.
- If a process cannot be started, the agent ends with the reason, whatever it is, and the thread continues.
- Nothing is written to a child under the lock.
"""

from __future__ import annotations

import logging
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Identity, Preparation, Word
from runtime.cluster.launch.launcher import AgentDied, AgentSlot
from runtime.config import AgentConfig
from runtime.transport.keys import Keys
from runtime.transport.socket_dir import SocketFolder

_log = logging.getLogger(__name__)

#: Starts an agent's process; the arguments contain nothing else.
PROGRAM = (sys.executable, "-m", "cli.serving.agent_engines")
#: Number of standby processes in a row that die unused before no more are started.
_MAX_SPOILED = 3


@dataclass(frozen=True, slots=True)
class ProcessConfig:
    """Settings of a process launcher.

    Fields:
        preparation: The engine of every agent.
        agent: Limits of the agents.
        settings: Settings of the agents' loops.
        beat_seconds: Period of heartbeats.
        host: Listen and connect over tcp at this address, instead of sockets in a folder.
        sockets: Kind of the sockets in the folder (`transport.channels.sockets`).
        warm: Whether one process stands by.
        program: Command that starts an agent's process.
        environments: By agent, environment variables that it sets before its engine is made.
    """

    preparation: Preparation
    agent: AgentConfig = field(default_factory=AgentConfig)
    settings: AgentSettings = field(default_factory=AgentSettings)
    beat_seconds: float = 0.5
    host: str | None = None
    sockets: Literal["unix", "ipc"] = "unix"
    warm: bool = True
    program: Sequence[str] = PROGRAM
    environments: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


class _Child:
    """One process, and from `begin` on the thread that reads its output until it ends.

    `life` is (device, incarnation), or None while the process stands by. `warm`: whether its imports are done.
    """

    def __init__(
        self, program: Sequence[str], warmed: Callable[[], None], ended: Callable[[_Child, int, str], None]
    ) -> None:
        self.life: tuple[str, int] | None = None
        self.warm = False
        self._warmed, self._ended = warmed, ended
        self.process = subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        self._thread = threading.Thread(target=self._read, name=f"zoo-agent-{self.process.pid}", daemon=True)

    def begin(self) -> None:
        """Start the thread. Raises RuntimeError, and kills the process, if no thread can be started."""
        try:
            self._thread.start()
        except RuntimeError:
            self.process.kill()
            self.process.wait()
            raise

    def write_line(self, line: msgspec.Struct) -> None:
        """Write a line to its standard input. If it has died, its thread reports that."""
        pipe = self.process.stdin
        with suppress(OSError, ValueError):
            if pipe is not None:
                pipe.write(msgspec.json.encode(line) + b"\n")
                pipe.flush()

    def _read(self) -> None:
        reason = ""
        pipe = self.process.stdout
        for line in pipe or ():
            try:
                word = msgspec.json.decode(line, type=Word)
            except msgspec.MsgspecError:
                continue
            reason = word.reason or reason
            if word.warm:
                self.warm = True
                self._warmed()
        code = self.process.wait()
        for each in (self.process.stdin, pipe):
            if each is not None:
                with suppress(OSError):  # unflushed input
                    each.close()
        self._ended(self, code, reason or _meaning(code))


class ProcessLauncher:
    """Launches agents as processes of this machine."""

    def __init__(self, config: ProcessConfig) -> None:
        """Raises InputError if there is no place for its sockets."""
        self._config = config
        self._folder = SocketFolder()
        keys = Keys.make() if config.host is not None else None
        self.seat = AgentSlot(self._bind("scheduler"), keys)
        self._listener: Callable[[AgentDied], None] = lambda died: None
        self._scheduler = ""
        self._lock = threading.Condition()
        self._children: dict[tuple[str, int], _Child] = {}
        self._all: set[_Child] = set()
        self._spare: _Child | None = None
        self._spoiled = 0
        self._closing = False
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="zoo-fleet", daemon=True)
        self._thread.start()

    def attach(self, listener: Callable[[AgentDied], None], scheduler: str) -> None:
        self._listener, self._scheduler = listener, scheduler

    def start(self, device: str, incarnation: int) -> None:
        self._work.put(lambda: self._start(device, incarnation))
        self._warmed()

    def kill(self, device: str, incarnation: int) -> None:
        with self._lock:
            child = self._children.get((device, incarnation))
        if child is not None:
            child.process.kill()

    def pid(self, device: str, incarnation: int) -> int | None:
        """Return the process id of a running agent; None if it is not running."""
        with self._lock:
            child = self._children.get((device, incarnation))
            return None if child is None else child.process.pid

    def shutdown(self, timeout: float) -> None:
        with self._lock:
            self._closing = True
            for child in self._all:
                child.process.terminate()  # ends after the running step; at once if it has not joined yet
            if not self._lock.wait_for(lambda: not self._all, timeout):
                for child in self._all:
                    child.process.kill()
                self._lock.wait_for(lambda: not self._all, timeout)
        self._work.put(None)
        self._thread.join(timeout)
        self._folder.remove()

    def _warmed(self) -> None:
        """Start a standby process if it is time. From any thread."""
        if self._config.warm:
            self._work.put(self._stand_by)

    # -- inside: the launcher's thread ---------------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:  # if this thread ended, all agents would end
                _log.critical("the fleet could not do what it was to do", exc_info=True)

    def _start(self, device: str, incarnation: int) -> None:
        with self._lock:
            if self._closing:
                return
            child, self._spare = self._spare, None
        try:
            child = child or self._spawn()
        except (OSError, RuntimeError) as error:
            self._listener(AgentDied(device, incarnation, None, f"its process cannot be started: {_strerror(error)}"))
            return
        with self._lock:
            self._spoiled = 0
            child.life = device, incarnation
            ended = child not in self._all
            if not ended:
                self._children[child.life] = child
        if ended:
            self._listener(AgentDied(device, incarnation, child.process.returncode, "it ended while it stood by"))
            return
        child.write_line(self._identity(device, incarnation))

    def _stand_by(self) -> None:
        """Start one more process than is needed, once the running ones have finished their imports."""
        with self._lock:
            busy = any(not child.warm for child in self._all)
            if self._closing or busy or self._spare is not None or self._spoiled >= _MAX_SPOILED:
                return
        try:
            child = self._spawn()
        except (OSError, RuntimeError) as error:
            _log.warning("no agent can stand by: %s", _strerror(error))
            return
        with self._lock:
            self._spare = child if child in self._all else None

    def _spawn(self) -> _Child:
        """Start a process. Raises OSError, and RuntimeError if no thread can be started for it."""
        child = _Child(self._config.program, self._warmed, self._child_exited)
        with self._lock:
            self._all.add(child)
        try:
            child.begin()
        except RuntimeError:
            with self._lock:
                self._all.discard(child)
            raise
        child.write_line(self._config.preparation)
        with self._lock:
            if self._closing:  # `shutdown` may have run before this child was in `_all`
                child.process.terminate()
        return child

    def _bind(self, name: str) -> str:
        config = self._config
        return f"tcp://{config.host}:*" if config.host is not None else f"{config.sockets}://{self._folder.path}/{name}"

    def _identity(self, device: str, incarnation: int) -> Identity:
        config, keys = self._config, self.seat.keys
        bind = self._bind(f"{device}.{incarnation}")
        pair = None if keys is None else (keys.public, keys.secret)
        return Identity(
            device, incarnation, self._scheduler, bind, config.settings, config.agent, pair, config.beat_seconds,
            dict(config.environments.get(device, {})),
        )  # fmt: skip

    # -- inside: a child's thread ------------------------------------------------------------------------------------

    def _child_exited(self, child: _Child, code: int, reason: str) -> None:
        with self._lock:
            self._all.discard(child)
            life = child.life
            if life is not None:
                self._children.pop(life, None)
            spoiled = child is self._spare
            if spoiled:
                self._spare = None
                self._spoiled += 1
            self._lock.notify_all()
        if life is not None:
            self._listener(AgentDied(*life, code, reason))
            self._warmed()
        elif spoiled and not self._closing:
            _log.warning("an agent that stood by has ended: %s", reason)
            self._work.put(self._stand_by)


def _strerror(error: OSError | RuntimeError) -> str:
    return (error.strerror or "") if isinstance(error, OSError) else str(error)


def _meaning(code: int) -> str:
    """Return the meaning of an exit code without a reason."""
    return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"
