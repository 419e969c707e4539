"""Errors that Ray raises end the agent concerned, and neither the caller nor the watching thread.

Ray is replaced by a fake.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from runtime.cluster.launch import ray_actors as rays
from runtime.cluster.launch.launcher import AgentDied
from runtime.cluster.launch.ray_actors import RayConfig, RayLauncher
from tests.runtime.cluster.agent_programs import counting
from zoo.errors import InputError

LIMIT = 60.0


class Lost(Exception):
    """The error that the fake Ray raises."""


class Actor:
    """A fake actor; the next item of `outcome` is the result of its `run`."""

    def __init__(self, ray: Ray) -> None:
        self.outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.prepare = SimpleNamespace(remote=lambda preparation: 1)
        self.run = SimpleNamespace(remote=lambda identity: ray.failing("run") or self)


class Ray:
    """A fake of the `ray` module. `broken`: names of the calls that fail."""

    def __init__(self) -> None:
        self.broken: set[str] = set()
        self.actors: list[Actor] = []
        self.waits = 0
        self.util = SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1")

    def failing(self, name: str) -> None:
        if name in self.broken:
            raise Lost(name)

    def is_initialized(self) -> bool:
        return True

    def init(self, **options: Any) -> None:
        raise ConnectionError("no token was found\nand much more")

    def remote(self, kind: type) -> Any:
        def made(engines: Any) -> Actor:
            self.failing("make")
            self.actors.append(Actor(self))
            return self.actors[-1]

        return SimpleNamespace(options=lambda **_: SimpleNamespace(remote=made))

    def wait(self, runs: list[Actor], num_returns: int, timeout: float) -> tuple[list[Actor], list[Actor]]:
        self.waits += 1
        self.failing("wait")
        threading.Event().wait(0.01)
        return [run for run in runs if not run.outcome.empty()][:num_returns], []

    def get(self, run: Actor) -> Any:
        outcome = run.outcome.get()
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def kill(self, actor: Actor, no_restart: bool) -> None:
        self.failing("kill")
        actor.outcome.put(Lost("killed"))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RayLauncher, Ray, queue.SimpleQueue[AgentDied]]]:
    ray, deaths = Ray(), queue.SimpleQueue[AgentDied]()
    monkeypatch.setattr(rays, "_ray", lambda: ray)
    monkeypatch.setattr(rays, "_require_tokens", lambda address: None)
    monkeypatch.setattr(rays, "_LOOK", 0.01)
    launcher = RayLauncher(RayConfig(counting(), {}))
    launcher.attach(deaths.put, "tcp://127.0.0.1:1")
    yield launcher, ray, deaths
    ray.broken.clear()
    launcher.shutdown(LIMIT)
    assert not launcher._thread.is_alive()


@pytest.mark.parametrize(
    ("address", "where"), [(None, "cannot be started"), ("10.0.0.1:6379", "at 10.0.0.1:6379 cannot be joined")]
)
def test_a_cluster_that_does_not_let_it_in_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, address: str | None, where: str
) -> None:
    ray = Ray()
    ray.is_initialized = lambda: False  # type: ignore[method-assign]
    monkeypatch.setattr(rays, "_ray", lambda: ray)
    monkeypatch.setattr(rays, "_require_tokens", lambda address: None)
    with pytest.raises(InputError, match=f"{where}: no token was found$"):
        RayLauncher(RayConfig(counting(), {}, address))


Made = tuple[RayLauncher, Ray, "queue.SimpleQueue[AgentDied]"]


@pytest.mark.parametrize("broken", ["make", "run"])
def test_what_cannot_be_started_is_an_end_with_the_reason(made: Made, broken: str) -> None:
    launcher, ray, deaths = made
    ray.broken = {broken}
    launcher.start("a", 1)
    assert deaths.get(timeout=LIMIT) == AgentDied("a", 1, None, "Ray does not start it: Lost")
    ray.broken = set()
    launcher.start("a", 2)
    ray.actors[-2].outcome.put((0, "it was told to stop"))  # the last one is the warm standby
    assert deaths.get(timeout=LIMIT) == AgentDied("a", 2, 0, "it was told to stop")


def test_what_cannot_be_killed_is_left_to_its_silence(made: Made) -> None:
    launcher, ray, deaths = made
    launcher.start("a", 1)
    ray.broken = {"kill"}
    launcher.kill("a", 1)
    ray.actors[0].outcome.put(ValueError("its answer cannot be read"))
    assert deaths.get(timeout=LIMIT) == AgentDied("a", 1, None, "its actor has ended: ValueError")


def test_who_watches_goes_on_when_ray_is_back(made: Made) -> None:
    launcher, ray, deaths = made
    ray.broken = {"wait"}
    launcher.start("a", 1)
    while ray.waits < 3:
        threading.Event().wait(0.01)
    ray.broken = set()
    launcher.kill("a", 1)
    assert deaths.get(timeout=LIMIT) == AgentDied("a", 1, None, "its actor has ended: Lost")


def test_without_one_that_stands_by_it_goes_on(made: Made) -> None:
    launcher, ray, deaths = made
    launcher.start("a", 1)
    launcher._spare = None
    ray.broken = {"make"}
    launcher.start("b", 1)
    assert deaths.get(timeout=LIMIT).device == "b"
    launcher.kill("a", 1)
    assert deaths.get(timeout=LIMIT).device == "a"
