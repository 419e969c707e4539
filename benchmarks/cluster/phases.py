"""Kill an agent (`kill -9`) in each phase of its work: `python -m benchmarks.cluster.chaos --phase NAME|all`.

The agents are processes that stop at a chosen moment (`benchmarks.cluster.holding`), so that a phase is hit reliably
and repeatably. Clients send requests all the time; each answer is compared with its model's own, and `/health` is
watched until the dead agent is replaced.

Phases:
- `idle`: no request, nothing in progress.
- `prefill`, `decode`: an agent in a step with such rows.
- `give`, `take`: the source or the destination of a migration, while pages are read or written.
- `copied-source`, `copied-target`, `copied-third`: a migration has copied everything but is not committed; killed is
  the source, the destination, or the agent that has the sequence's row meanwhile.
- `passed-before`, `passed-behind`: a row is at a device; killed is the agent before or after it on the path.
- `drain`: an agent ends after its step; another one is killed meanwhile.
- `standby`: the replacement of a killed agent, while it loads its first stage.
- `update`: an agent that loads the stages of a new version.
- `predict`: an agent that runs a stand-in ahead.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.cluster.chaos import CUTS, MODELS, PAGES, PATIENCE, Chaos, Clients, Kill, free_pages, spread
from runtime.chains import Surrogate, devices_of
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.main import Preparation
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.config import ClusterConfig, SpeculationConfig
from runtime.control.scheduler_io import ServeModel, Tick
from runtime.engine.fakes.integer_model import IntegerModel, surrogate_of

DEVICES = ("d0", "d1", "d2")
#: A stand-in for a part of the first model.
STAND_IN = surrogate_of(MODELS[0], "org/m~", 4, 3)


def _version(number: int) -> IntegerModel:
    parts = MODELS[0].parts
    return replace(
        MODELS[0],
        spec=replace(MODELS[0].spec, name=f"org/m-{number}"),
        parts=(*parts[:-1], replace(parts[-1], seed=20 + number)),
    )


VERSIONS = tuple(_version(number) for number in range(1, 3))


@dataclass
class Scene:
    """A cluster under load, and the folder with the pipes that stop its agents.

    Fields:
        versions: How many of `VERSIONS` have been served.
    """

    driver: ClusterDriver
    fleet: ProcessLauncher
    clients: Clients
    folder: Path
    versions: int = 0
    kills: list[Kill] = field(default_factory=list)

    @contextmanager
    def held(self, moment: str, meanwhile: Callable[[], object] = lambda: None) -> Iterator[int]:
        """Stop the first agent that reaches `moment` and yield its process id.

        After the block it continues, if it is alive.

        `meanwhile` is called repeatedly until an agent has stopped.
        """
        pipe, go = self.folder / moment, self.folder / f"{moment}.go"
        made = self.folder / f"{moment}.made"  # renamed once it is open for reading, because an agent takes it at once
        os.mkfifo(made)
        os.mkfifo(go)
        reader = os.open(made, os.O_RDONLY | os.O_NONBLOCK)
        made.rename(pipe)
        pid = 0
        try:
            pid = self._first(reader, moment, meanwhile)
            yield pid
        finally:
            os.close(reader)
            _let_go(go, pid)
            for each in self.folder.iterdir():
                each.unlink()

    def _first(self, reader: int, moment: str, meanwhile: Callable[[], object]) -> int:
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end and not self.clients.wrong:
            meanwhile()
            if select.select([reader], [], [], 0.005)[0] and (said := os.read(reader, 64)):
                return int(said)
        raise TimeoutError(f"nobody came to {moment}")

    def device_of(self, pid: int) -> str:
        return next(
            each.device for each in self.driver.agents() if self.fleet.pid(each.device, each.incarnation) == pid
        )

    def on_scheduler(self, act: Callable[[Any, int], Any]) -> Any:
        """Call a function on the scheduler's thread between two events, and return its result."""
        done = threading.Event()
        said: list[Any] = []

        def run(now: int) -> None:
            said.append(act(self.driver._scheduler, now))
            self.driver._scheduler_loop._handle_events([Tick()], now)  # sends the commands that `act` produced
            done.set()

        self.driver._scheduler_loop.run_soon(run)
        done.wait(PATIENCE)
        return said[0]

    def move_some(self, avoid: str = "") -> None:
        """Start migrations of what running sequences have on their first device to another one, except `avoid`.

        Migrations that fail are ignored.
        """

        def move(scheduler: Any, now: int) -> None:
            for sequence in list(scheduler.sequences.values()):
                if sequence.path and not sequence.waits.move and sequence.phase == "decode":
                    devices = devices_of(sequence.chain, sequence.path)
                    last = next((at for at, name in enumerate(devices) if name != devices[0]), len(devices))
                    target = next(name for name in DEVICES if name not in (devices[0], avoid))
                    scheduler.migrations.start(sequence, range(last), target, now)

        self.on_scheduler(move)


def _let_go(go: Path, pid: int) -> None:
    """Let the stopped agent continue; return at once if it is dead."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end and Path(f"/proc/{pid}").exists():
        try:
            os.close(os.open(go, os.O_WRONLY | os.O_NONBLOCK))
            return
        except OSError:  # it has not opened the pipe yet
            time.sleep(0.001)


#: A phase: kills one or more agents in it.
Phase = Callable[[Scene], None]


def _kill(scene: Scene, device: str) -> None:
    incarnation = scene.driver._remote_agents.lifecycles.incarnation(device)
    pid = scene.fleet.pid(device, incarnation)
    if pid is not None:
        running, moving = scene.driver.state().running, scene.driver.view.moving()
        phase = next(each.phase for each in scene.driver.agents() if each.device == device)
        scene.kills.append(
            Kill(device, incarnation, phase, running, moving, time.monotonic(), scene.clients.open_requests())
        )
        os.kill(pid, signal.SIGKILL)


def _at(moment: str, meanwhile: Callable[[Scene], object] = lambda scene: None) -> Phase:
    """Return the phase that kills the agent stopped at `moment`."""

    def phase(scene: Scene) -> None:
        with scene.held(moment, lambda: meanwhile(scene)) as pid:
            _kill(scene, scene.device_of(pid))

    return phase


def _idle(scene: Scene) -> None:
    """Kill an agent while there are no requests."""
    scene.clients.rest()
    _kill(scene, "d1")


def _passed_on(which: int) -> Phase:
    """Return the phase in which a row is at one device and the agent before or after it is killed."""

    def phase(scene: Scene) -> None:
        with scene.held("decode") as pid:
            at = DEVICES.index(scene.device_of(pid))
            _kill(scene, DEVICES[(at + which) % 3])

    return phase


def _all_copied(victim: str) -> Phase:
    """Return the phase in which a migration has copied everything but cannot be committed.

    Its sequence's row is held at another device.
    """

    def phase(scene: Scene) -> None:
        for _ in range(100):
            with scene.held("decode") as pid:
                third = scene.device_of(pid)
                if third not in scene.on_scheduler(
                    lambda scheduler, now: {m.path[0].device for m in scheduler.sequences.values() if m.path}
                ):
                    _kill(scene, {"third": third, **_copied(scene, third)}[victim])
                    return
        raise TimeoutError("nobody behind a first hop was held")

    return phase


def _copied(scene: Scene, third: str) -> dict[str, str]:
    """Return source and target of a migration that has copied everything and waits for a row at the third device."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        scene.move_some(third)
        found = scene.on_scheduler(
            lambda scheduler, now: [
                (m.source, m.target) for m in scheduler.migrations if not m.awaits_answer and m.sequence.waits.held
            ]
        )
        if found:
            return dict(zip(("source", "target"), found[0], strict=True))
    raise TimeoutError("no move was held up")


def _drain(scene: Scene) -> None:
    """Restart an agent after its step, and kill another one meanwhile."""
    with scene.held("decode") as pid:
        device = scene.device_of(pid)
        roll = threading.Thread(target=lambda: scene.driver.restart(device, PATIENCE), daemon=True)
        roll.start()
        _kill(scene, DEVICES[(DEVICES.index(device) + 1) % 3])
    roll.join(PATIENCE)


def _standby(scene: Scene) -> None:
    """Kill an agent, then its replacement while it loads."""
    before = len(scene.kills)
    with scene.held("load", lambda: None if len(scene.kills) > before else _kill(scene, "d0")) as pid:
        _kill(scene, scene.device_of(pid))


def _update(scene: Scene) -> None:
    """Load a new version and kill the agent that loads it; the version must be served nevertheless."""
    model = VERSIONS[scene.versions]
    scene.versions += 1
    chain = model.chain(*CUTS)
    serve = ServeModel(
        replace(chain, spec=replace(chain.spec, name="org/v"), source=model.spec.name), model.blocks(*CUTS)
    )
    update = threading.Thread(target=lambda: scene.driver.serve(serve), daemon=True)
    with scene.held("load", lambda: None if update.ident else update.start()) as pid:
        _kill(scene, scene.device_of(pid))
    update.join(PATIENCE)
    if update.is_alive():
        scene.clients.wrong.append("the update hangs")


def _predict(scene: Scene) -> None:
    """Kill an agent that runs a stand-in ahead."""
    block = MODELS[0].chain(*CUTS).uses[1].block
    scene.on_scheduler(lambda scheduler, now: scheduler.speculation.pin([(block, name) for name in DEVICES]))
    _at("predict")(scene)
    scene.on_scheduler(lambda scheduler, now: scheduler.speculation.pin([]))


PHASES: dict[str, Phase] = {
    "idle": _idle,
    "prefill": _at("prefill"),
    "decode": _at("decode"),
    "give": _at("give", Scene.move_some),
    "take": _at("take", Scene.move_some),
    "copied-source": _all_copied("source"),
    "copied-target": _all_copied("target"),
    "copied-third": _all_copied("third"),
    "passed-before": _passed_on(-1),
    "passed-behind": _passed_on(1),
    "drain": _drain,
    "standby": _standby,
    "update": _update,
    "predict": _predict,
}


def phases(names: Sequence[str], clients: int = 4, seed: int = 0) -> dict[str, Any]:
    """Kill agents in each of these phases and return the document.

    `wrong` and `lies` must be empty, and `free` must be `capacity` for each agent.
    """
    with tempfile.TemporaryDirectory() as folder:
        known = [msgspec.to_builtins(model) for model in (*MODELS, *VERSIONS, STAND_IN)]
        fleet = ProcessLauncher(
            ProcessConfig(
                Preparation("holding", {"models": known, "pages": PAGES, "folder": folder}),
                settings=AgentSettings(report_seconds=0.05),
                beat_seconds=0.1,
                program=(sys.executable, "-m", "benchmarks.cluster.holding"),
            )
        )
        blocks = list({block.id: block for model in MODELS for block in model.blocks(*CUTS)}.values())
        config = ClusterConfig(
            placement="partition", prefix_caching="off", prefill_chunk=32, speculation=SpeculationConfig("exact")
        )
        lives = LifeConfig(starts=1000, steady_seconds=0.05, backoff_seconds=0.02, backoff_most=0.1)
        with ClusterDriver(
            [model.chain(*CUTS) for model in MODELS],
            blocks,
            DEVICES,
            fleet,
            config,
            lives,
            surrogates={"org/m": [Surrogate("org/m~", 4, 5, 1)]},
        ) as driver:
            return _run(names, driver, fleet, Path(folder), clients, seed)


def _run(
    names: Sequence[str], driver: ClusterDriver, fleet: ProcessLauncher, folder: Path, clients: int, seed: int
) -> dict[str, Any]:
    kills: dict[str, list[Kill]] = {}
    with Clients(driver, clients, seed) as load:
        scene, chaos = Scene(driver, fleet, load, folder), Chaos(driver, fleet, load, seed)
        for name in names:
            if load.wrong:
                break
            kills[name] = _one(PHASES[name], scene, chaos)
    free = free_pages(driver, len(DEVICES))
    every = [kill for some in kills.values() for kill in some]
    took = {
        name: {"up_s": spread([k.up_s for k in some]), "served_s": spread([k.served_s for k in some])}
        for name, some in kills.items()
    }
    return {
        "phases": took,
        "kills": len(every),
        "requests": load.done,
        "tokens": load.tokens,
        "wrong": load.wrong,
        "lies": chaos.lies,
        "free": free,
        "capacity": PAGES,
        "health": driver.health()["status"],
        "up_s": spread([kill.up_s for kill in every]),
        "served_s": spread([kill.served_s for kill in every]),
    }


def _one(phase: Phase, scene: Scene, chaos: Chaos) -> list[Kill]:
    """Run one phase, from a complete cluster until it is complete again."""
    before, done = len(scene.kills), scene.clients.done
    try:
        phase(scene)
    except TimeoutError as error:
        scene.clients.wrong.append(str(error))
    scene.clients.go_on()
    new = scene.kills[before:]
    chaos.kills += new
    chaos._until(lambda: all(kill.up_s is not None and kill.served_s is not None for kill in new))
    chaos._until(lambda: all(each.phase == "up" for each in scene.driver.agents()) and scene.clients.done > done)
    return new
