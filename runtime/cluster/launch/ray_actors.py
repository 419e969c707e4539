"""Run agents as Ray actors on several machines: Ray (>= 2.52) places and starts them and reports when they end.

Messages and tensors use this package's own messengers, over tcp, encrypted with the cluster's keys: a Ray call takes
milliseconds, and pickles. Ray's token authentication must be on; it is switched on for a cluster that is started here
(CVE-2023-48022). The cluster's keys reach actors through Ray, so access to Ray's token gives access to the cluster.

Ray restarts nothing (`max_restarts=0`): restarts are decided by `agents.lifecycle`, as for every launcher. One actor
stands by with everything imported. If Ray itself fails on an agent, that agent ends with the reason; nothing is raised
to callers, and watching continues. Needs the extra `ray`.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Engines, Identity, Preparation, be
from runtime.cluster.launch.launcher import AgentDied, AgentSlot
from runtime.config import AgentConfig
from runtime.transport.keys import Keys
from zoo.errors import InputError

_log = logging.getLogger(__name__)

#: Longest wait for the end of an actor before the next check, in seconds.
_LOOK = 0.2
#: Length to which messages of Ray are cut, in characters.
_SAID = 300


@dataclass(frozen=True, slots=True)
class RayConfig:
    """Settings of a Ray launcher.

    Fields:
        preparation: The engine of every agent.
        engines: The table of engines, imported by name where actors run.
        address: Of a running Ray cluster; None starts one here.
        agent: Limits of the agents.
        settings: Settings of the agents' loops.
        beat_seconds: Period of heartbeats.
        cpus, gpus: What Ray reserves per agent.
        warm: Whether an actor stands by; never if it would occupy a GPU.
    """

    preparation: Preparation
    engines: Engines
    address: str | None = None
    agent: AgentConfig = field(default_factory=AgentConfig)
    settings: AgentSettings = field(default_factory=AgentSettings)
    beat_seconds: float = 0.5
    cpus: float = 0.0
    gpus: float = 0.0
    warm: bool = True


class _Agent:
    """The actor: `prepare` imports what the engine needs, `run` runs the agent until it ends."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines

    def prepare(self, preparation: bytes) -> int:
        """Import what the engine needs and return the actor's process id."""
        chosen = msgspec.json.decode(preparation, type=Preparation)
        self._make = self._engines[chosen.engine](chosen.settings)
        return os.getpid()

    def run(self, identity: bytes) -> tuple[int, str]:
        import ray

        known = msgspec.json.decode(identity, type=Identity)
        ended = be(msgspec.structs.replace(known, bind=f"tcp://{ray.util.get_node_ip_address()}:*"), self._make)
        return int(ended.code), ended.reason


class RayLauncher:
    """Launches agents as Ray actors."""

    def __init__(self, config: RayConfig) -> None:
        """Join or start a Ray cluster.

        Raises InputError without the extra, with authentication off, or if Ray refuses.
        """
        _require_tokens(config.address)
        self._config, self._ray = config, _ray()
        self._started_ray = not self._ray.is_initialized()
        if self._started_ray:
            self._join(config.address)
        self.seat = AgentSlot(f"tcp://{self._ray.util.get_node_ip_address()}:*", Keys.make())
        self._listener: Callable[[AgentDied], None] = lambda died: None
        self._scheduler = ""
        self._lock = threading.Condition()
        self._actors: dict[tuple[str, int], Any] = {}
        self._pids: dict[tuple[str, int], Any] = {}
        self._runs: dict[Any, tuple[str, int]] = {}
        self._spare: tuple[Any, Any] | None = None
        self._closing = self._ended = False
        self._thread = threading.Thread(target=self._watch, name="zoo-rays", daemon=True)
        self._thread.start()

    def attach(self, listener: Callable[[AgentDied], None], scheduler: str) -> None:
        self._listener, self._scheduler = listener, scheduler

    def start(self, device: str, incarnation: int) -> None:
        keys = self.seat.keys
        config, who = self._config, (device, incarnation)
        pair = None if keys is None else (keys.public, keys.secret)
        identity = Identity(
            device, incarnation, self._scheduler, "", config.settings, config.agent, pair, config.beat_seconds
        )
        with self._lock:
            if self._closing:
                return
            try:
                actor, pid = self._spare or self._make()
                self._spare = None
                run = actor.run.remote(msgspec.json.encode(identity))
            except Exception as error:
                _log.warning("Ray does not start an agent of %s", device, exc_info=True)
                self._spare = None
                self._listener(AgentDied(device, incarnation, None, f"Ray does not start it: {type(error).__name__}"))
                return
            self._actors[who], self._pids[who], self._runs[run] = actor, pid, who
            self._lock.notify_all()
            self._stand_by()

    def kill(self, device: str, incarnation: int) -> None:
        with self._lock:
            actor = self._actors.get((device, incarnation))
        if actor is not None:
            self._end(actor)

    def pid(self, device: str, incarnation: int, timeout: float = 30.0) -> int | None:
        """Return the process id of an agent on its machine; None if it is not running. Waits for its
        process to exist.
        """
        with self._lock:
            pid = self._pids.get((device, incarnation))
        return None if pid is None else int(self._ray.get(pid, timeout=timeout))

    def shutdown(self, timeout: float) -> None:
        with self._lock:
            self._closing = True
            self._lock.wait_for(lambda: not self._runs, timeout)
            left = [*self._actors.values(), *([self._spare[0]] if self._spare else [])]
        for actor in left:
            self._end(actor)
        with self._lock:
            self._lock.notify_all()
        self._thread.join(timeout)
        self._ended = True
        if self._started_ray:
            self._ray.shutdown()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _join(self, address: str | None) -> None:
        """Join or start Ray. Raises InputError, with Ray's own message."""
        try:
            self._ray.init(address=address, log_to_driver=False, include_dashboard=False)
        except Exception as error:
            said = (str(error).splitlines() or [""])[0][:_SAID]
            where = "Ray cannot be started" if address is None else f"the Ray cluster at {address} cannot be joined"
            raise InputError(f"{where}: {said or type(error).__name__}") from error

    def _make(self) -> tuple[Any, Any]:
        """Start an actor that prepares itself; return it with the future of its process id."""
        config = self._config
        kind = self._ray.remote(_Agent).options(
            num_cpus=config.cpus, num_gpus=config.gpus, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD"
        )
        actor = kind.remote(config.engines)
        return actor, actor.prepare.remote(msgspec.json.encode(config.preparation))

    def _stand_by(self) -> None:
        """Start one more actor than is needed. The lock is held."""
        if self._spare is None and self._config.warm and not self._config.gpus:
            try:
                self._spare = self._make()
            except Exception:
                _log.warning("no agent can stand by", exc_info=True)

    def _end(self, actor: Any) -> None:
        """Kill an actor. Failures are only logged: an agent out of reach is given up when its heartbeats stop."""
        try:
            self._ray.kill(actor, no_restart=True)
        except Exception:
            _log.warning("Ray does not end an agent", exc_info=True)

    def _watch(self) -> None:
        """Report every run that has ended, however it did."""
        deaf = False
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._runs or self._closing)
                runs = list(self._runs)
                if not runs or self._ended:
                    return
            try:
                ended, _ = self._ray.wait(runs, num_returns=1, timeout=_LOOK)
            except Exception:
                if not deaf:
                    _log.warning("Ray does not tell of agents' ends; those that are silent are given up", exc_info=True)
                deaf = True
                time.sleep(_LOOK)
                continue
            deaf = False
            for run in ended:
                self._report_exit(run)

    def _report_exit(self, run: Any) -> None:
        code: int | None = None
        try:
            code, reason = self._ray.get(run)
        except Exception as error:
            reason = f"its actor has ended: {type(error).__name__}"
        with self._lock:
            who = self._runs.pop(run)
            self._pids.pop(who, None)
            actor = self._actors.pop(who)
            self._lock.notify_all()
        self._end(actor)
        self._listener(AgentDied(*who, code, reason))


def _ray() -> Any:
    """Import Ray. Raises InputError without the extra."""
    try:
        import ray
    except ImportError:
        raise InputError("agents on Ray need the extra: pip install 'blockzoo[ray]'") from None
    return ray


def _require_tokens(address: str | None) -> None:
    """Check Ray's token authentication. Raises InputError if it is off.

    Ray reads it from the environment when it is imported. A cluster that starts here gets a token of its own.
    """
    if "ray" in sys.modules and "RAY_AUTH_MODE" not in os.environ:
        raise InputError("Ray was imported without authentication: set RAY_AUTH_MODE=token before")
    mode = os.environ.setdefault("RAY_AUTH_MODE", "token")
    if mode != "token":
        raise InputError(f"Ray's authentication is {mode!r}: agents need RAY_AUTH_MODE=token")
    if address is None:
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
