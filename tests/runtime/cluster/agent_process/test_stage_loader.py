"""Weights are prepared on a thread of their own: steps go on meanwhile, and errors reach the request for the load."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.chains import Stage
from runtime.cluster.agent_process.stage_loader import StageLoader
from runtime.cluster.agents.inline import InlineAgent
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ClusterConfig
from runtime.control.scheduler_io import ServeModel
from runtime.engine.fakes.integer_engine import IntegerEngine
from tests.runtime.cluster.clusters import CUTS, LIMIT, MODELS, answered, eventually, request, verify
from zoo.errors import NotServable

FIRST, SECOND = MODELS


class Slow(IntegerEngine):
    """An engine that prepares the second model's stages only when it is allowed to."""

    prepares = True

    def __init__(self, **options: object) -> None:
        super().__init__(MODELS, 400, **options)  # type: ignore[arg-type]
        self.may, self.begun = threading.Event(), threading.Event()
        self.threads: set[threading.Thread] = set()
        self.loaded_on: set[str] = set()
        self.error: Exception | None = None

    def prepare(self, stage: Stage) -> None:
        self.threads.add(threading.current_thread())
        if stage.model == SECOND.spec.name:
            self.begun.set()
            assert self.may.wait(LIMIT)
            if self.error is not None:
                raise self.error

    def load(self, stage: Stage):  # type: ignore[no-untyped-def]
        self.loaded_on.add(threading.current_thread().name)
        if stage.model == SECOND.spec.name and self.error is not None:
            raise self.error
        return super().load(stage)


def serving(engine: Slow) -> ClusterDriver:
    only = InlineAgent(lambda: engine)
    blocks = FIRST.blocks(*CUTS)
    return ClusterDriver(
        [FIRST.chain(*CUTS)], blocks, [only.device], only, ClusterConfig(),
        describe=lambda name: ServeModel(SECOND.chain(*CUTS), SECOND.blocks(*CUTS)),
    )  # fmt: skip


def test_requests_are_answered_while_another_model_is_prepared() -> None:
    engine = Slow()
    with serving(engine) as driver, ThreadPoolExecutor(1) as pool:
        coming = pool.submit(driver.load, SECOND.spec.name)
        assert engine.begun.wait(LIMIT)
        one = request("one", range(1, 9))
        verify(one, answered(driver, [one])["one"])
        assert not coming.done()
        engine.may.set()
        assert coming.result(LIMIT).name == SECOND.spec.name
        two = request("two", range(1, 9), SECOND.spec.name)
        verify(two, answered(driver, [two])["two"])
    assert {thread.name for thread in engine.threads} == {"zoo-loader"} and engine.loaded_on == {"zoo-scheduler"}
    # The threads of this engine: another test of the process may have one that still waits.
    assert eventually(lambda: not any(thread.is_alive() for thread in engine.threads))


def test_what_fails_is_reported_and_the_first_model_is_served_on() -> None:
    engine = Slow()
    engine.error = NotServable("a tensor of it is damaged")
    engine.may.set()
    with serving(engine) as driver:
        with pytest.raises(NotServable, match="damaged"):
            driver.load(SECOND.spec.name)
        one = request("one", range(1, 9))
        verify(one, answered(driver, [one])["one"])


class Ahead(Slow):
    """An engine that reads stages ahead, one step at a time, when it is allowed to."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)

    def read_ahead(self, stages: Sequence[Stage], stop: Callable[[], bool]) -> Iterator[tuple[Stage, tuple[str, ...]]]:
        for stage in stages:
            self.steps.put(f"read {stage.model}")
            assert self.go.acquire(timeout=LIMIT)
            if stop():
                return
            yield stage, (stage.model,)

    def prepare(self, stage: Stage) -> None:
        self.steps.put(f"prepare {stage.model}")


def test_stages_are_read_ahead_while_none_is_prepared() -> None:
    engine, woken = Ahead(), threading.Semaphore(0)
    loader = StageLoader(engine, woken.release)
    a, b, c = (Stage(name, 0, 3) for name in "abc")
    loader.read_ahead((a, b))
    assert engine.steps.get(timeout=LIMIT) == "read a"
    loader.submit(c)
    engine.go.release()
    assert [engine.steps.get(timeout=LIMIT) for _ in range(2)] == ["prepare c", "read a"], "the load first, then on"
    for _ in range(2):
        engine.go.release()
    assert engine.steps.get(timeout=LIMIT) == "read b"
    assert woken.acquire(timeout=LIMIT) and woken.acquire(timeout=LIMIT) and woken.acquire(timeout=LIMIT)
    assert loader.drain_ready() == [c] and loader.drain_read() == [(a, ("a",)), (b, ("b",))]
    loader.read_ahead((b, a))
    assert engine.steps.get(timeout=LIMIT) == "read b"
    loader.read_ahead((c,))
    engine.go.release()
    assert engine.steps.get(timeout=LIMIT) == "read c", "the latest list takes the place of the one before"
    engine.go.release()
    assert woken.acquire(timeout=LIMIT)
    loader.close()
    assert loader.drain_read() == [(c, ("c",))] and engine.steps.empty()
