"""A sequence whose rows kill the devices that run them ends with an error; sequences beside it are unharmed."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from runtime.chains import Array, StageResult
from runtime.config import ClusterConfig
from runtime.control.scheduler_io import AgentDown, PauseSequence, ResumeSequence
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import counting_model
from runtime.scheduler.sequences.parts import Failures
from runtime.types import StepPlan
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster
from tests.runtime.virtual import request

M = counting_model("m", "1 2* 3* 4", max_model_len=128)


def killing(*bad: str, at: int = 0, devices: int = 2) -> VirtualCluster:
    """A cluster in which a step with a row of sequences `bad`, at token `at` or later, kills its device."""

    class Killed(IntegerEngine):
        def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
            if any(row.seq.partition("@")[0].startswith(bad) and row.start + len(row.tokens) > at for row in plan.rows):
                cluster.at(cluster.now, lambda: cluster.kill(self.device))
            return super().run(plan, inputs)

    cluster = VirtualCluster(
        [M],
        [(2,)],
        devices=devices,
        config=ClusterConfig(devices=devices, placement="partition", hop_cost=0.0),
        restart=5 * MS,
        make_engine=lambda name: Killed([M], 256, device=name),
    )
    return cluster


@pytest.mark.parametrize("at", [0, 12])
def test_what_kills_devices_ends_with_the_reason_and_all_others_have_their_tokens(at: int) -> None:
    cluster = killing("bad", at=at)
    cluster.ask(*(request(f"s{number}", range(3 + number), "m", max_tokens=20) for number in range(6)))
    cluster.ask(request("bad", range(5), "m", max_tokens=30), at=MS)
    cluster.ask(*(request(f"t{number}", range(3 + number), "m", max_tokens=20) for number in range(6)), at=60 * MS)
    cluster.run()
    told = cluster.told["bad"]
    assert (
        told.last.finish == "error"
        and "4 devices in a row died" in (told.last.error or "")
        and "killed" in (told.last.error or "")
    )
    assert len(cluster.trace.named("fault")) == 4 and len(told.tokens) == max(0, at - 5 + 1)
    del cluster.requests["bad"]
    cluster.expect()


def test_two_that_do_are_told_apart_from_whoever_ran_beside_them() -> None:
    cluster = killing("bad")
    cluster.ask(*(request(name, range(4), "m", max_tokens=20) for name in ("bad1", "s0", "bad2", "s1", "s2")))
    cluster.run()
    for name in ("bad1", "bad2"):
        assert cluster.told[name].last.finish == "error"
        del cluster.requests[name]
    cluster.expect()


def test_deaths_between_which_tokens_come_end_nobody() -> None:
    cluster = killing()
    cluster.ask(request("s", range(5), "m", max_tokens=60))
    for number in range(12):
        cluster.at((20 + 40 * number) * MS, lambda: cluster.kill("d0"))
    cluster.run()
    assert len(cluster.trace.named("fault")) > 4
    cluster.expect()


def test_whoever_has_no_row_under_way_is_no_suspect() -> None:
    """It is paused when its device dies; one more counted death would end it."""
    cluster = killing()
    cluster.ask(request("s", range(5), "m", max_tokens=60))
    cluster.run(until=12 * MS)
    sequence = cluster.scheduler.sequences["s"]
    cluster.tell(PauseSequence("s"))
    cluster.run(until=20 * MS)
    assert sequence.path and not sequence.flying
    sequence.failures = Failures(deaths=3)
    cluster.kill("d0")
    cluster.run(until=40 * MS)
    cluster.tell(ResumeSequence("s"))
    cluster.run()
    cluster.expect()


def test_devices_that_are_told_to_go_are_nobodys_fault() -> None:
    """A rolling restart that is faster than the computation of a prompt."""
    cluster = killing()
    cluster.ask(request("s", range(90), "m", max_tokens=6))
    cluster.costs = lambda plan: 40 * MS

    def restart(name: str) -> None:
        cluster.nodes[name].alive = False
        cluster.tell(AgentDown(name, "it was restarted", planned=True))

    for number in range(8):
        cluster.at((20 + 30 * number) * MS, lambda name=f"d{number % 2}": restart(name))
    cluster.run(until=230 * MS)
    assert cluster.scheduler.state().counters.preemptions > 4 and not cluster.told["s"].events
    cluster.run()
    cluster.expect()


def test_whoever_is_saved_by_a_move_was_there_when_the_device_died_all_the_same() -> None:
    cluster = VirtualCluster(
        [M],
        devices=2,
        config=ClusterConfig(devices=2, placement="replicate", max_crashes=1),
        restart=5 * MS,
        page_bytes_per_ms=1.0,
    )
    cluster.ask(request("s", range(40), "m", max_tokens=30))
    while not cluster.told["s"].tokens:
        cluster.run_one()
    sequence = cluster.scheduler.sequences["s"]
    (source,) = sequence.place.devices
    target = "d1" if source == "d0" else "d0"
    while cluster.migrate("s", range(1), target) is not None or not sequence.flying:
        cluster.run_one()
    assert cluster.scheduler.migrations.survives(sequence, source)
    cluster.kill(source)
    cluster.run()
    assert cluster.told["s"].last.finish == "error" and "1 devices in a row" in (cluster.told["s"].last.error or "")
    cluster.expect_empty()
