"""Stored models over agents with direct tensor transport (gloo on a CPU): each model's own tokens.

Also covers moves, speculation and a death.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

import pytest

from cli.serving.cluster import start_cluster
from cli.serving.models import Chosen
from cli.serving.options import gather
from runtime.chains import devices_of
from runtime.config import ClusterConfig, DirectConfig, SpeculationConfig
from runtime.scheduler.scheduler import Scheduler
from tests.runtime.cluster.clusters import eventually
from tests.runtime.cluster.real import MODELS, Load, Question, answers_of, asked, cluster, on_scheduler, put_family
from tests.runtime.cluster.real import tokens as generated
from tests.runtime.cluster.test_real import DEVICES, NO_RAY, SOON, at_rest
from tests.runtime.engine.conftest import Bench, bench  # noqa: F401
from tests.runtime.virtual import ListTrace
from zoo import Zoo


@pytest.fixture(scope="module")
def family(bench: Bench) -> Bench:  # noqa: F811
    put_family(bench)
    return bench


@pytest.fixture(scope="module")
def answers(family: Bench) -> dict[Question, list[int]]:
    return answers_of(family)


def links(driver: Any) -> set[str]:
    return {state for each in driver.snapshot()["devices"] for state in each["links"].values()}


@pytest.mark.parametrize(
    ("backend", "tensors"),
    [("processes", "direct"), pytest.param("ray", "network", marks=NO_RAY)],
)
def test_two_agents_as_zoo_serve_makes_them(
    family: Bench, answers: dict[Question, list[int]], backend: str, tensors: str
) -> None:
    given = {
        "agents": 2,
        "backend": backend,
        "placement": "partition",
        "prefix_caching": "off",
        "kv_cache_memory_bytes": "8MiB",
        "tensor_transport": tensors,
    }
    with Zoo(family.store.root) as zoo:
        driver = start_cluster(zoo, gather(None, given), Chosen(tuple(MODELS), ()), None, None)
        try:
            for turn in ("first", "second"):  # the link is made while the first requests run
                ones = {f"{turn}{number}": question for number, question in enumerate(answers)}
                got: dict[str, list[Any]] = {seq: [] for seq in ones}
                for event in driver.run([asked(question, seq) for seq, question in ones.items()]):
                    got[event.seq].append(event)
                assert {question: generated(got[seq]) for seq, question in ones.items()} == answers
                assert eventually(lambda: links(driver) == {"direct"})
            assert eventually(lambda: at_rest(driver))
        finally:
            assert driver.shutdown(SOON)


def test_moves_of_pages_and_hidden_states_and_a_death(family: Bench, answers: dict[Question, list[int]]) -> None:
    """Three agents with a speculated hop: pages are copied, and recomputed from tokens and from kept inputs.

    One agent is killed meanwhile.
    """
    config = ClusterConfig(
        placement="partition",
        prefix_caching="off",
        prefill_chunk=8,
        migration_final_sets=1,
        speculation=SpeculationConfig("exact", top=0.5),
    )
    trace, rng = ListTrace(), random.Random(2)

    def move(scheduler: Scheduler, now: int, ends: dict[str, bool]) -> None:
        running = [each for each in scheduler.sequences.values() if len(each.path) > 1]
        if running:
            sequence = rng.choice(running)
            devices = devices_of(sequence.chain, sequence.path)
            first = rng.randrange(len(devices))
            scheduler.migrations.start(sequence, range(first, first + 1), rng.choice(DEVICES), now, **ends)

    with (
        cluster(family, "processes", 3, config, trace, 1 << 24, DirectConfig()) as (driver, launcher),
        Load(driver, answers, clients=4) as load,
    ):
        for ends, part in (({"recompute": False}, "copied"), ({}, "inputs"), ({"copy": False}, "recomputed")):
            start = getattr(driver.view.moves(), part)

            def moved(ends: dict[str, bool] = ends, part: str = part, start: int = start) -> bool:
                on_scheduler(driver, lambda scheduler, now: move(scheduler, now, ends))
                return getattr(driver.view.moves(), part) > start + 20 or bool(load.wrong)

            assert eventually(moved, SOON)
        assert "direct" in links(driver) and links(driver) <= {"direct", "making"}
        victim = launcher.pid("agent-1", driver._remote_agents.lifecycles.incarnation("agent-1"))
        os.kill(victim, signal.SIGKILL)
        assert eventually(lambda: driver.agents()[1].deaths == 1 and driver.health()["status"] == "ok", SOON)
        before = load.done
        assert eventually(lambda: load.done > before + 8 or bool(load.wrong), SOON)
        assert eventually(lambda: links(driver) == {"direct"} or bool(load.wrong))
    assert load.wrong == [] and load.done
    assert driver.view.moves().committed > 0
