"""Loans between real agents, over their side links: contexts of many times a pool, deaths, and links that fail.

Engines count, so that one wrong page changes every later token. Only the first device can load the model, which does
not fit its pool; creditors have no weights.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from runtime.chains import Array
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, SideServer, side_messengers
from runtime.cluster.agents.lifecycle import LifeConfig
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.cluster.launch.threads import ThreadLauncher
from runtime.config import ClusterConfig
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel, counting_model, expected
from runtime.lending_config import LendingConfig, LoanShape
from runtime.loans import LoanQuery
from runtime.messages import Heartbeat
from runtime.transport.messenger import Messenger
from runtime.types import LoanLost, SequenceRequest, TokenEvent
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import LIMIT, answered, eventually, request

M = counting_model("org/m", "1* 2 3* 4* 5", max_model_len=8000)
#: Pages of the first device, and of the creditors.
FEW, MANY = 30, 300
SETTINGS = AgentSettings(report_seconds=0.05, loan_seconds=5.0)


def holds(device: str) -> list[IntegerModel]:
    """Return the models that a device can load: the creditors have no weights."""
    return [M] if device == "d0" else []


def launcher(kind: str, names: Sequence[str]) -> ProcessLauncher | ThreadLauncher:
    pools = {name: MANY if at else FEW for at, name in enumerate(names)}
    if kind == "threads":
        return ThreadLauncher(
            lambda device: lambda: IntegerEngine(holds(device), pools[device], device=device), None, SETTINGS, 0.1
        )
    sockets: dict[str, Any] = {"host": "127.0.0.1"} if kind == "tcp" else {}
    return ProcessLauncher(
        ProcessConfig(counting([M], MANY, pools=pools, holders=["d0"]), settings=SETTINGS, beat_seconds=0.1, **sockets)
    )


@contextmanager
def lending(
    kind: str, devices: int, shape: LoanShape = "tokens"
) -> Iterator[tuple[ClusterDriver, ProcessLauncher | ThreadLauncher]]:
    names = [f"d{at}" for at in range(devices)]
    made = launcher(kind, names)
    config = ClusterConfig(
        devices=devices, placement="replicate", prefill_chunk=16, lending=LendingConfig("planned", 1.0, shape=shape)
    )
    lives = LifeConfig(starts=10_000, backoff_most=0.25)
    driver = ClusterDriver([M.chain()], M.blocks(), names, made, config, lives)
    try:
        yield driver, made
    finally:
        assert driver.shutdown(LIMIT)


def long(seq: str, tokens: int, answer: int = 20, seed: int = 0) -> SequenceRequest:
    rng = random.Random(seed)
    return request(seq, [rng.randrange(97) for _ in range(tokens)], "org/m", answer)


def right(asked: SequenceRequest, events: Sequence[TokenEvent]) -> bool:
    """Return whether each token came once, in order, as from the model alone."""
    tokens = [event.token for event in events if event.token is not None]
    return tokens == expected(M, asked.prompt, asked.sampling) and events[-1].finish == "length"


@pytest.mark.parametrize(
    ("kind", "devices", "times"), [("processes", 2, 8), ("processes", 3, 19), ("processes", 4, 19), ("threads", 3, 19)]
)
@pytest.mark.parametrize("shape", ["tokens", "layers"])
def test_contexts_of_many_times_a_pool(kind: str, devices: int, times: int, shape: LoanShape) -> None:
    tokens = FEW * times // M.spec.kv_layers * M.spec.page_tokens - 20
    with lending(kind, devices, shape) as (driver, _):
        asked = long("a", tokens)
        assert right(asked, answered(driver, [asked])["a"])
        counters = driver.state().counters
        assert counters.loans > 0 and counters.preemptions == counters.failed_steps == 0
        assert eventually(lambda: all_free(driver))


def test_over_tcp_with_keys() -> None:
    with lending("tcp", 2) as (driver, _):
        asked = long("a", 300)
        assert right(asked, answered(driver, [asked])["a"]) and driver.state().counters.loans > 0


@pytest.mark.parametrize("victim", ["d0", "d1", "d2"])
def test_a_killed_agent_costs_no_token(victim: str) -> None:
    """An agent is killed while loans stand; the answer is computed again from its tokens.

    Twice each, or `BLOCKZOO_FAULTS` times.
    """
    with lending("processes", 3) as (driver, _):
        for turn in range(int(os.environ.get("BLOCKZOO_FAULTS", "2"))):
            asked, got = long(f"a{turn}", 500, 60, turn), dict[str, list[TokenEvent]]()
            before = driver.state().counters.loans
            client = threading.Thread(target=lambda: got.update(answered(driver, [asked])))  # noqa: B023
            client.start()
            assert eventually(lambda: driver.state().counters.loans > before + turn % 10)  # noqa: B023
            os.kill(driver._scheduler.devices[victim].facts.pid, signal.SIGKILL)
            client.join(LIMIT)
            assert right(asked, got[asked.seq])
            assert eventually(lambda: all_free(driver))


def all_free(driver: ClusterDriver) -> bool:
    """Return whether all devices are alive, and all their pages free by the scheduler's count and their own."""
    devices, reports = list(driver._scheduler.devices), driver.view.reports()
    return all(
        each.alive and not each.pages.used and reports[each.name].pages_free == each.pages.capacity
        for each in devices
        if each.name in reports
    ) and len(reports) == len(devices)


# -- the link by itself ------------------------------------------------------------------------------------------------


class Answers:
    """An engine that answers queries as it is told to."""

    def __init__(self) -> None:
        self.delay = 0.0
        self.error: Exception | None = None

    def borrow(self, link: object, shipping: str = "query") -> None: ...

    def hold_loan(self, loan: int, groups: Sequence[Sequence[int]], tokens: int, debtor: str) -> None: ...

    def drop_loan(self, loan: int) -> None: ...

    def attend_loans(self, query: LoanQuery, arrays: Sequence[Array], debtor: str) -> tuple[Array, ...]:
        time.sleep(self.delay)
        if self.error is not None:
            raise self.error
        return (Array("int64", (1,), query.layer.to_bytes(8, "little")),)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[SideClient, Answers, SidePeers, SideServer]]:
    """A client of agent a in its first life, and the server of agent b."""
    engine, known = Answers(), SidePeers()
    (_, a), (b, spare) = (side_messengers(name, 1, f"unix://{tmp_path}/{name}", None, None) for name in "ab")
    server = SideServer(engine, b, known)
    known.update({"a": (1, ""), "b": (1, server.address)})
    client = SideClient(a, known, 2.0)
    yield client, engine, known, server
    client.close()
    server.close()
    spare.close()


def query(layer: int = 0) -> LoanQuery:
    return LoanQuery(((1,),), ((8,),), (1,), layer)


def number(arrays: tuple[Array, ...]) -> int:
    return int.from_bytes(bytes(arrays[0].data), "little")


def test_answers_come_to_their_queries(ends: tuple[SideClient, Answers, SidePeers, SideServer]) -> None:
    client, *_ = ends
    tickets = [client.send_query("b", query(layer), ()) for layer in range(5)]
    assert [number(client.collect(ticket)) for ticket in reversed(tickets)] == [4, 3, 2, 1, 0]


def test_an_answer_that_is_late_or_an_error_is_a_lost_loan(
    ends: tuple[SideClient, Answers, SidePeers, SideServer],
) -> None:
    client, engine, known, _ = ends
    for error in (LoanLost("loan 1 is not held here"), ValueError("secret"), RuntimeError("secret")):
        engine.error = error
        with pytest.raises(LoanLost) as lost:
            client.collect(client.send_query("b", query(), ()))
        assert "secret" not in str(lost.value)
    engine.error, engine.delay = None, 4.0
    ticket, begun = client.send_query("b", query(7), ()), time.monotonic()
    with pytest.raises(LoanLost, match="did not answer"):
        client.collect(ticket)
    assert time.monotonic() - begun < 3.9
    engine.delay = 0.0
    time.sleep(2.5)
    assert number(client.collect(client.send_query("b", query(3), ()))) == 3, (
        "the late answer is not taken for another one"
    )
    known.update({"a": (1, "")})
    with pytest.raises(LoanLost, match="is gone"):
        client.send_query("b", query(), ())


def test_only_agents_that_are_known_in_this_life_are_answered(
    ends: tuple[SideClient, Answers, SidePeers, SideServer], tmp_path: Path
) -> None:
    client, _, _, server = ends
    for name, life in (("a", 2), ("x", 1)):
        stranger = Messenger(name, life)
        own = SidePeers()
        own.update({"b": (1, server.address)})
        other = SideClient(stranger, own, 0.3)
        with pytest.raises(LoanLost):
            other.collect(other.send_query("b", query(), ()))
        other.close()
    assert number(client.collect(client.send_query("b", query(9), ()))) == 9


def test_other_messages_are_refused(ends: tuple[SideClient, Answers, SidePeers, SideServer]) -> None:
    client, _, known, server = ends
    known.update({"a": (1, ""), "b": (1, server.address), "c": (1, "")})
    stranger = Messenger("c", 1)
    stranger.learn("b", 1, server.address, calls=False)
    stranger.send("b", Heartbeat(1))
    seen: list[object] = []
    assert eventually(lambda: bool(seen.extend(stranger.receive(0.05)) or seen), 5.0)
    stranger.close()
    assert number(client.collect(client.send_query("b", query(2), ()))) == 2
