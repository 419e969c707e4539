"""Weights are prepared on a thread of their own: steps go on meanwhile, and errors reach the request for the load."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from runtime.chains import Stage
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
