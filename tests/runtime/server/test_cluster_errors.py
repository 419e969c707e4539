"""Faults of a cluster as its clients see them: refused with a reason, or queued; no hang, no wrong token.

Real processes run behind the HTTP server; impostors speak their protocol over sockets of their own.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx
import msgspec
import pytest

from runtime.chains import Array, devices_of
from runtime.cluster.agent_process.loop import AgentSettings
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.launch.processes import ProcessConfig, ProcessLauncher
from runtime.cluster.version import own_version
from runtime.config import AgentConfig, ClusterConfig, ServerConfig
from runtime.engine.fakes.integer_model import expected
from runtime.frontend.tokenizer import Tokenizer
from runtime.messages import (
    PROTOCOL,
    AgentHello,
    CloseSequences,
    FinishMigration,
    ForwardRows,
    Message,
    PageData,
    PageRequest,
    RowsDone,
)
from runtime.transport.messenger import Messenger, PeerCut
from runtime.types import Sampled, SamplingParams
from tests.runtime.cluster.agent_programs import counting
from tests.runtime.cluster.clusters import blocks, eventually
from tests.runtime.server.harness import FakeSource, Running, serving
from tests.runtime.server.test_cluster import CUTS, MODELS

DEVICES = ("a", "b")
#: Pages of one device.
PAGES = 60
BASE = MODELS[0]
#: Incarnation numbers of impostors.
LIVES = itertools.count(50)
#: Seconds after which a client without an answer counts as left hanging.
LIMIT = 60.0


@contextmanager
def served(tokenizer: Tokenizer, pages: int = PAGES, weights: int = 0) -> Iterator[Running]:
    """Serve over agent processes with the integer engine.

    `weights`: bytes of weights that a device holds, 0 for no limit.
    """
    launcher = ProcessLauncher(
        ProcessConfig(
            counting(MODELS, pages, pace=1.0),
            AgentConfig(fetch_window=1),
            AgentSettings(weights, report_seconds=0.05),
            beat_seconds=0.1,
            warm=False,
        )
    )
    driver = ClusterDriver(
        [model.chain(*CUTS) for model in MODELS],
        blocks(MODELS, CUTS),
        DEVICES,
        launcher,
        ClusterConfig(placement="partition"),
    )
    with (
        driver,
        serving(driver, FakeSource(tokenizer, known=[model.spec for model in MODELS]), ServerConfig()) as server,
    ):
        yield server


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with served(tokenizer) as running:
        yield running


def ask(server: Running, prompt: Sequence[int], count: int = 20) -> httpx.Response:
    body = {
        "model": "org/base",
        "prompt": list(prompt),
        "max_tokens": count,
        "temperature": 0,
        "return_token_ids": True,
        "ignore_eos": True,
    }
    with server.http() as http:
        return http.post("/v1/completions", json=body, timeout=LIMIT)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    return list(answer.json()["choices"][0]["token_ids"])


def own(prompt: Sequence[int], count: int = 20) -> list[int]:
    return expected(BASE, prompt, SamplingParams(count, ignore_eos=True))


class Asked:
    """Requests in progress, one thread each."""

    def __init__(self, server: Running, prompts: Sequence[Sequence[int]], count: int) -> None:
        self.prompts, self.count = prompts, count
        self.answers: list[Any] = [None] * len(prompts)
        self._threads = [
            threading.Thread(target=self._ask, args=(server, at), daemon=True) for at in range(len(prompts))
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, server: Running, at: int) -> None:
        self.answers[at] = ask(server, self.prompts[at], self.count)

    def expect(self) -> None:
        for thread in self._threads:
            thread.join(LIMIT)
        assert [tokens(answer) for answer in self.answers] == [own(prompt, self.count) for prompt in self.prompts]


def address_of(driver: Any, device: str) -> tuple[int, str]:
    """Return incarnation and address of an agent."""
    return driver._remote_agents._addresses[device]  # type: ignore[no-any-return]


@contextmanager
def impostor(server: Running, name: str, *devices: str, life: int | None = None) -> Iterator[Messenger]:
    """Open a messenger under another agent's or device's name, with an incarnation not denied before."""
    driver: Any = server.driver
    post = Messenger(name, next(LIVES) if life is None else life)
    post.learn("scheduler", 0, driver._remote_agents._messenger.address)
    for device in devices:
        post.learn(device, *address_of(driver, device))
    yield post
    post.close()


def denied(post: Messenger) -> str:
    """Return the reason with which the peer that the impostor sent to refuses it."""
    said: list[str] = []

    def heard() -> bool:
        said.extend(item.reason for item in post.receive(0.05) if isinstance(item, PeerCut) and item.denied)
        return bool(said)

    assert eventually(heard, LIMIT)
    return said[0]


# -- agents that cannot belong to the cluster --------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "protocol"), [("0.0.other", PROTOCOL), (own_version(), PROTOCOL + 1)])
def test_an_agent_of_another_version_is_refused_and_the_cluster_goes_on(
    server: Running, version: str, protocol: int
) -> None:
    asked = Asked(server, [[5, 6, 7]], 40)
    driver: Any = server.driver
    driver._remote_agents._messenger.admit(lambda name, life: True)  # as if this agent had been started
    with impostor(server, "z") as post:
        post.send("scheduler", AgentHello("z", protocol, version, PAGES, 64, 0, "ipc:///nowhere"))
        assert "it is of version" in denied(post)
    driver._remote_agents._messenger.admit(driver._remote_agents.lifecycles.begun)
    asked.expect()
    with server.http() as http:
        assert [each["device"] for each in http.get("/health").json()["agents"]] == [*DEVICES]


@pytest.mark.parametrize("name", ["z", "b"])
def test_an_agent_that_nobody_has_started_takes_nobodys_place(server: Running, name: str) -> None:
    """An impostor that announces itself as an agent's next incarnation is denied; the real agent goes on."""
    asked = Asked(server, [[5, 6, 7]], 40)
    with impostor(server, name) as post:
        post.send("scheduler", AgentHello(name, PROTOCOL, own_version(), PAGES, 64, 0, "ipc:///nowhere"))
        assert f"{name} is not expected" in denied(post)
    asked.expect()
    assert tokens(ask(server, [4, 5])) == own([4, 5])
    driver: Any = server.driver
    assert [(each.phase, each.incarnation, each.deaths) for each in driver.agents()] == [("up", 1, 0)] * 2


@pytest.mark.parametrize("name", ["b", "scheduler"])
def test_nobody_takes_a_peers_place_at_an_agent(server: Running, name: str) -> None:
    asked = Asked(server, [[5, 6, 7]], 60)
    one = running(server)
    with impostor(server, name, "a") as post:
        for message in (
            CloseSequences((one.seq,), (one.epoch,)),
            PageRequest(9, one.seq, one.epoch, (0, 1), 0, 4, "z"),
        ):
            post.send("a", message)
        post.receive(0.3)
    asked.expect()
    assert tokens(ask(server, [4, 5])) == own([4, 5])
    driver: Any = server.driver
    assert [(each.phase, each.incarnation, each.deaths) for each in driver.agents()] == [("up", 1, 0)] * 2


def test_what_an_earlier_life_of_an_agent_says_is_not_heard(server: Running) -> None:
    asked = Asked(server, [[5, 6, 7]], 40)
    one = running(server)
    with impostor(server, "b", life=0) as post:
        post.send("scheduler", AgentHello("b", PROTOCOL, own_version(), PAGES, 64, 0, "ipc:///nowhere"))
        post.send("scheduler", RowsDone("b", (one.seq,), (one.epoch,), (1,), (Sampled(one.seq, 7),)))
        post.receive(0.2)
    asked.expect()
    driver: Any = server.driver
    assert [(each.phase, each.incarnation, each.deaths) for each in driver.agents()] == [("up", 1, 0)] * 2


# -- forged or stale handles -------------------------------------------------------------------------------------------


def running(server: Running) -> Any:
    """Return the first running sequence."""
    driver: Any = server.driver
    assert eventually(
        lambda: any(each.path and each.output for each in list(driver._scheduler.sequences.values())), LIMIT
    )
    return next(each for each in list(driver._scheduler.sequences.values()) if each.path)


def test_forged_and_stale_handles_do_nothing(server: Running) -> None:
    """Rows and pages of a running sequence with a wrong epoch, an unknown move or a foreign hop are ignored."""
    asked = Asked(server, [[5, 6, 7, 8, 9], [1, 2, 3]], 60)
    one = running(server)
    seq, epoch = one.seq, one.epoch
    row = Array("int64", (1, 1), (7).to_bytes(8, "little"))
    page = Array("uint8", (1, 64), bytes(64))
    digest = "0" * 64
    with impostor(server, "z", *DEVICES) as post:
        for device in DEVICES:
            for stale in (0, epoch - 1, epoch + 7):
                post.send(device, ForwardRows((seq,), (stale,), (1,), (3,), (1,), (True,), (1,)), (row,))
                post.send(device, PageRequest(9, seq, stale, (0, 1), 0, 4, "z"))
                post.send(device, PageData(9, seq, stale, 0, 4, digest), (page,))
            post.send(device, ForwardRows((seq,), (epoch,), (7,), (3,), (1,), (True,), (1,)), (row,))
            post.send(device, PageRequest(9, seq, epoch, (5, 9), 0, 4, "z"))
            post.send(device, PageRequest(9, "nobody", epoch, (0, 1), 0, 4, "z"))
        answers: list[Any] = []

        def heard() -> bool:
            answers.extend(item.message for item in post.receive(0.05) if not isinstance(item, PeerCut))
            return len(answers) >= 2

        assert eventually(heard, LIMIT)
        assert all(isinstance(each, PageData) and each.error for each in answers)
    asked.expect()


@pytest.mark.parametrize(
    "order",
    [CloseSequences(("s",), (9,)), FinishMigration(1, "s", 1, True), RowsDone("z", ("s",), (1,), (1,), (None,))],
    ids=lambda o: type(o).__name__,
)
def test_orders_of_whoever_is_not_the_scheduler_are_denied(server: Running, order: Message) -> None:
    asked = Asked(server, [[5, 6, 7, 8, 9]], 60)
    one = running(server)
    if not isinstance(order, RowsDone):
        names = {"seqs": (one.seq,)} if isinstance(order, CloseSequences) else {"seq": one.seq}
        order = msgspec.structs.replace(order, **names)  # type: ignore[arg-type]
    with impostor(server, "z", "a") as post:
        post.send("a", order)
        assert "the scheduler's to send" in denied(post)
    asked.expect()


# -- pages that do not verify ------------------------------------------------------------------------------------------


def test_pages_that_do_not_verify_are_not_used(server: Running) -> None:
    """Forged pages arrive before the real ones of a moving sequence: they are not written, and the answer is right."""
    driver: Any = server.driver
    prompt = list(range(12))
    asked = Asked(server, [prompt], 40)  # few enough for one device
    one = running(server)
    devices = devices_of(one.chain, one.path)
    last = [at for at, name in enumerate(devices) if name == devices[-1]]
    target = next(name for name in DEVICES if name != devices[-1])
    with impostor(server, "z", target) as post:
        assert eventually(lambda: driver.move(one.seq, range(last[0], last[-1] + 1), target) is None, LIMIT)
        move = next(iter(driver._scheduler.migrations), None)
        number, layers = (1, 1) if move is None else (move.number, move.parts[0].pages)
        forged = Array("uint8", (layers, 64), bytes(64 * layers))
        for _ in range(20):
            for lo in range(0, 60, 4):
                post.send(target, PageData(number, one.seq, one.epoch, lo, lo + 4, "0" * 64), (forged,))
            post.receive(0.001)
    asked.expect()
    assert driver.view.moves().started >= 1
    assert eventually(lambda: not len(driver._scheduler.migrations), LIMIT)


# -- out of room -------------------------------------------------------------------------------------------------------


def test_a_prompt_that_no_device_has_room_for_is_refused_with_the_reason(server: Running) -> None:
    answer = ask(server, [at % 90 for at in range(180)])
    assert answer.status_code >= 400
    assert "maximum context length is 160 tokens" in answer.json()["error"]["message"], "as many as its pages hold"


def test_more_than_there_is_room_for_is_queued(server: Running) -> None:
    """Twelve requests are sent where two or three fit at once."""
    driver: Any = server.driver
    asked = Asked(server, [[at + 1, at + 2, at + 3] * 4 for at in range(12)], 40)
    assert eventually(lambda: driver.state().waiting > 0, LIMIT)
    asked.expect()


def test_a_device_without_room_takes_no_move(server: Running) -> None:
    driver: Any = server.driver
    asked = Asked(server, [[at + 1, at + 2, at + 3] * 4 for at in range(6)], 40)
    said: set[str] = set()

    def refused() -> bool:
        for seq in [seq for seq, each in list(driver._scheduler.sequences.items()) if each.path]:
            for device in DEVICES:
                said.add(str(driver.move(seq, range(2), device)))
        return any("no room" in why for why in said)

    assert eventually(refused, LIMIT), said
    asked.expect()


def test_a_chain_that_the_cluster_cannot_hold_is_refused_with_the_reason(tokenizer: Tokenizer) -> None:
    """Each agent has room for 3 of the 8 components: no placement holds the chain."""
    with served(tokenizer, weights=3000) as server:
        answer = ask(server, [1, 2, 3])
        assert answer.status_code >= 400
        assert "cannot hold org/base" in answer.json()["error"]["message"]
        with server.http() as http:
            assert http.get("/health").json()["status"] == "ok"
