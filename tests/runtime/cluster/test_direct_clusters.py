"""Whole clusters with direct tensor transport (gloo on a CPU): tokens, kills, lost and corrupted tensors.

It also tests the fallback to the host path.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import Any

import pytest

from runtime.chains import Stage
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.cluster.launch.threads import ThreadLauncher
from runtime.config import DirectConfig
from runtime.engine.fakes.integer_links import LinkedIntegerEngine
from runtime.engine.tensors.links import DirectLinks
from runtime.engine.tensors.process_groups import Gloo
from runtime.messages import CloseSequences, FinishMigration, MigrationFailed, MigrationReady, StartMigration
from tests.runtime.cluster.agent_process.test_loop import (
    GREEDY,
    LENGTH,
    decode,
    expected,
    hop,
    opened,
    provide,
)
from tests.runtime.cluster.agent_process.test_loop import request as asked
from tests.runtime.cluster.agent_programs import MODEL, counting, threads
from tests.runtime.cluster.clusters import (
    DEVICES,
    LIMIT,
    MODELS,
    Load,
    answered,
    at_rest,
    cluster,
    eventually,
    request,
    verify,
)
from tests.runtime.engine.links import Faulty

DIRECT = DirectConfig(receive_timeout_s=1.0)


class Counting(LinkedIntegerEngine):
    """A counting engine whose links use the process group `process_group`."""

    process_group: Gloo

    def direct(self, config: DirectConfig, host: str = "") -> DirectLinks:
        return DirectLinks(self.process_group, config, as_bytes=True)


def with_rail(process_group: Gloo, models: Any = MODELS, pages: int = 400) -> Counting:
    engine = Counting(models, pages)
    engine.process_group = process_group
    return engine


def in_threads(rails: dict[str, Gloo]) -> ThreadLauncher:
    settings = AgentSettings(report_seconds=0.05, direct=DIRECT)
    return ThreadLauncher(
        lambda device: lambda: with_rail(rails.get(device) or Gloo()), settings=settings, beat_seconds=0.1
    )


def links(driver: Any) -> dict[str, dict[str, str]]:
    return {each["device"]: each["links"] for each in driver.snapshot()["devices"]}


def test_tokens_are_the_models_own_and_kills_lose_nothing() -> None:
    """A killed process has tensors under way to and from it; its next incarnation gets new links."""
    settings = AgentSettings(report_seconds=0.05, direct=DirectConfig())
    launcher = ProcessLauncher(ProcessConfig(counting(MODELS, 400), settings=settings, beat_seconds=0.1))
    with cluster(launcher, prefix_caching="off") as driver:
        with Load(driver, clients=6) as load:
            assert eventually(
                lambda: any("direct" in each.values() for each in links(driver).values()) and load.done > 10
            )
            for round_, device in enumerate(DEVICES):
                pid = launcher.pid(device, driver._remote_agents.lifecycles.incarnation(device))
                assert pid is not None
                os.kill(pid, signal.SIGKILL)
                before = load.done
                assert eventually(lambda round_=round_: sum(each.deaths for each in driver.agents()) == round_ + 1)
                assert eventually(lambda: driver.health()["status"] == "ok")
                assert eventually(lambda before=before: load.done > before + 10 or bool(load.wrong))
            assert eventually(lambda: any(set(each.values()) == {"direct"} for each in links(driver).values()))
        assert load.wrong == [] and load.done > 30
        assert eventually(lambda: at_rest(driver))


def test_a_tensor_that_never_comes_costs_its_rows_a_second_try_and_then_all_goes_by_the_host() -> None:
    swallows = tuple(range(8, 60))  # per link: some tensors arrive before
    with cluster(in_threads({name: Faulty(swallows=swallows) for name in DEVICES}), prefix_caching="off") as driver:
        begin, wrong = time.monotonic(), 0
        while not any(
            "did not" in why or "Timed out" in why or "other end" in why
            for each in links(driver).values()
            for why in each.values()
        ):
            assert time.monotonic() < begin + LIMIT, links(driver)
            ones = [request(f"s{wrong}-{number}", range(number, number + 20)) for number in range(4)]
            got = answered(driver, ones)
            for one in ones:
                verify(one, got[one.seq])
            wrong += 1
        state = driver.state()
        one = request("last", range(30))
        verify(one, answered(driver, [one])["last"])
        assert state.counters.preemptions + driver.state().counters.preemptions > 0  # rows that were lost ran again
        assert all(each.deaths == 0 for each in driver.agents())
        assert eventually(lambda: at_rest(driver))


@pytest.mark.parametrize("fault", ["none", "changed", "swallowed"])
def test_pages_that_move_directly_are_verified(fault: str) -> None:
    """A corrupted page is not written: the move fails, and the source goes on.

    A page that never comes ends the link, and is sent over the host if the move has not failed by then.
    """
    one, whole, there = asked("s", *range(1, 30)), (hop("a", 0, LENGTH),), (hop("b", 0, LENGTH),)
    tags = tuple(range(2, 100))
    process_group = {"none": Faulty(), "changed": Faulty(changes=tags), "swallowed": Faulty(swallows=tags)}[fault]
    process_group.sound = True  # pages of the first move go over the host while the link is made, some perhaps directly
    made = [with_rail(process_group, [MODEL], 200), with_rail(Gloo(), [MODEL], 200)]
    with threads("a", "b", engines=made, direct=replace(DIRECT, receive_timeout_s=0.5)) as (end, _):
        end.welcome("a", "b")
        provide(end, whole)
        provide(end, there)
        opened(end, one, whole)
        tokens = list(one.prompt)
        decode(end, one, whole, 3, tokens)
        upto = len(tokens) - 1

        def move(number: int) -> MigrationReady | MigrationFailed:
            end.messenger.send(
                "b",
                StartMigration(
                    number,
                    "s",
                    1,
                    Stage(MODEL.spec.name, 0, LENGTH),
                    (0, 2),
                    MODEL.spec.page_tokens,
                    "a",
                    upto,
                    (),
                    True,
                    one,
                ),
            )
            end.until(lambda: any(isinstance(each.message, MigrationReady | MigrationFailed) for each in end.envelope))
            found = next(each for each in end.envelope if isinstance(each.message, MigrationReady | MigrationFailed))
            end.envelope.remove(found)
            assert isinstance(found.message, MigrationReady | MigrationFailed)
            return found.message

        first = move(1)
        assert isinstance(first, MigrationReady)  # it makes the link
        end.messenger.send("b", FinishMigration(1, "s", 1, False))
        end.until(lambda: ("b", "direct") in end.reports["a"].links)
        process_group.sound = False
        second = move(2)
        assert isinstance(
            second,
            {"none": MigrationReady, "changed": MigrationFailed, "swallowed": MigrationReady | MigrationFailed}[fault],
        )
        if fault == "swallowed":
            end.until(lambda: dict(end.reports["a"].links)["b"] != "direct")
        if isinstance(second, MigrationReady):
            assert second.copied == ((0, upto),)
            end.messenger.send("b", FinishMigration(2, "s", 2, True))
            opened(end, one, there, 2, tuple(tokens[29:]), keep=True, computed=upto)
            end.messenger.send("a", CloseSequences(("s",), (1,)))
            decode(end, one, there, 5, tokens, 2)
        else:
            decode(end, one, whole, 5, tokens)
        assert tokens[29:] == expected(MODEL, one.prompt, GREEDY)
        if fault == "swallowed" and isinstance(second, MigrationFailed):
            assert isinstance(move(3), MigrationReady)  # over the host again


def test_agents_whose_tensors_cannot_meet_go_by_the_host() -> None:
    class Elsewhere(Gloo):
        name = "gloo/another machine"  # type: ignore[assignment]

    with cluster(in_threads({"a": Elsewhere(), "b": Elsewhere()}), prefix_caching="off") as driver:
        ones = [request(f"s{number}", range(number, number + 20)) for number in range(6)]
        got = answered(driver, ones)
        for one in ones:
            verify(one, got[one.seq])
        made = links(driver)
        assert not made["c"] and not any("c" in each for each in made.values())
