"""The clients against the real server and driver with the integer engine, and against servers that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import runtime.bench.wire as wire
from runtime.bench.answers import Answer
from runtime.bench.drive import WallClock, drive
from runtime.bench.http import HttpClient, base_of
from runtime.bench.inside import DriverClient
from runtime.bench.memory import listener, peak_bytes
from runtime.bench.summary import Slo, summarize
from runtime.bench.workload import Workload, WorkloadRequest, WorkloadSettings, build
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.cluster.whole import WholeEngine, inline
from tests.runtime.server.conftest import tokenizer  # noqa: F401
from tests.runtime.server.harness import BASE, FINE, running
from zoo.errors import InputError, Unavailable

SETTINGS = WorkloadSettings(12, vocabulary=256, clients=5)


def over_http(address: str, workload: Workload, key: str | None = None, timeout: float = 20.0) -> list[Answer]:
    async def all_of_it() -> list[Answer]:
        clock = WallClock()
        async with HttpClient.connected(address, clock, key, timeout) as client:
            return await drive(workload, client, clock)

    return asyncio.run(all_of_it())


def listed(address: str) -> list[str]:
    async def models() -> list[str]:
        async with HttpClient.connected(address, WallClock(), timeout=5) as client:
            return await client.models()

    return asyncio.run(models())


def test_every_token_of_a_server_is_heard(tokenizer: Tokenizer) -> None:  # noqa: F811
    with running(tokenizer, pace=lambda _: time.sleep(0.002)) as server:
        assert listed(server.address) == [BASE.name, FINE.name]
        answers = over_http(server.address, build(SETTINGS, (BASE.name, FINE.name)))
        assert listener(int(server.address.rpartition(":")[2])) == os.getpid()
    assert [answer.error for answer in answers] == [None] * 12
    assert all(answer.tokens == sum(answer.heard.lots) == 32 and answer.heard.prompt_tokens == 32 for answer in answers)
    assert all(0 < answer.ttft < answer.e2e and answer.tpot > 0 for answer in answers)  # type: ignore[operator]
    # Each token takes a step of 2 ms: the time stamps cannot all come at the end.
    assert all(len(answer.heard.stamps) > 8 and answer.e2e > 31 * 0.002 for answer in answers)
    assert summarize(answers, Slo())["tokens"] == 12 * 32


def test_texts_can_be_asked_and_are_counted_by_the_server(tokenizer: Tokenizer) -> None:  # noqa: F811
    with running(tokenizer) as server:
        (answer,) = over_http(server.address, Workload((WorkloadRequest(0, 0.0, BASE.name, "hello there", 5),)))
    assert (answer.error, answer.tokens) == (None, 5) and answer.heard.prompt_tokens > 0


def test_refusals_are_counted_by_their_status(tokenizer: Tokenizer) -> None:  # noqa: F811
    asks = (
        WorkloadRequest(0, 0.0, "nobody", (5,), 2),
        WorkloadRequest(1, 0.0, BASE.name, (5,) * 400, 2),
        WorkloadRequest(2, 0.0, BASE.name, (5,), 2),
    )
    with running(tokenizer, config=ServerConfig(api_key="k3y")) as server:
        found = summarize(over_http(server.address, Workload(asks), "k3y"), Slo())
        locked = summarize(over_http(server.address, Workload(asks)), Slo())
    assert found["errors"] == {"http 400": 1, "http 404": 1} and found["completed"] == 1
    assert "nobody" in found["first_error"]
    assert locked["errors"] == {"http 401": 3}


def test_an_engine_that_fails_is_a_server_error_in_the_stream(tokenizer: Tokenizer) -> None:  # noqa: F811
    with running(tokenizer, fail_at=(6,), pace=lambda _: time.sleep(0.02)) as server:
        (answer,) = over_http(server.address, Workload((WorkloadRequest(0, 0.0, BASE.name, (5, 6), 20),)))
    assert answer.error == "server error" and 0 < len(answer.heard.stamps) < 20 and answer.ttft is not None


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        (answer,) = over_http(address, Workload((WorkloadRequest(0, 0.0, "m", (5,), 2),)))
        assert answer.error == "connect"
        with pytest.raises(Unavailable, match="does not say what it serves"):
            listed(address)


CHUNK = b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n'
LAST = b'data: {"choices": [{"text": "y", "finish_reason": "length"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 7}}\n\n'


@contextmanager
def raw_server(*pieces: bytes, head: bytes = b"HTTP/1.1 200 OK\r\n", stall: float = 0.0) -> Iterator[str]:
    """Send these bytes to the first client, then close the connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                # Unread input turns a close into a reset, which may overtake the data sent.
                asked = b""
                while not asked.endswith(b"}"):
                    asked += connection.recv(65536)
                connection.sendall(head + b"Content-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                for piece in pieces:
                    connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece) if piece else b"0\r\n\r\n")
                    time.sleep(0.02)
                time.sleep(stall)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        thread.join(5)


@pytest.mark.parametrize(
    ("pieces", "error", "lots", "tokens"),
    [
        ((CHUNK, CHUNK + LAST, b"data: [DONE]\n\n", b""), None, (1, 2), 3),  # no IDs or usage: one per event with text
        ((CHUNK, LAST, USAGE, b"data: [DONE]\n\n", b""), None, (1, 1), 7),
        ((CHUNK[:20], CHUNK[20:], b": a comment\n\n", LAST, b""), None, (1, 1), 2),  # cut in the middle; no [DONE]
        ((CHUNK, CHUNK), "broken stream", (1, 1), 2),  # connection lost
        ((CHUNK, b""), "broken stream", (1,), 1),  # well-formed end, but before the finish
        ((CHUNK, b'data: {"error": {"message": "out of\\nluck"}}\n\n', b""), "server error", (1,), 1),
        ((CHUNK, b"data: what\n\n", b""), "malformed", (1,), 1),
        ((b'data: {"object": "other"}\n\n', b""), "malformed", (), 0),
        ((b"data: " + b"x" * 1_100_000, b""), "malformed", (), 0),
        ((), "broken stream", (), 0),
    ],
)
def test_streams_of_other_servers(
    pieces: tuple[bytes, ...], error: str | None, lots: tuple[int, ...], tokens: int
) -> None:
    with raw_server(*pieces) as address:
        (answer,) = over_http(address, Workload((WorkloadRequest(0, 0.0, "m", (5,), 2),)))
    assert (answer.error, answer.heard.lots, answer.tokens) == (error, lots, tokens)
    assert "\n" not in (answer.heard.detail or "")


def test_a_server_that_stalls_times_out() -> None:
    with raw_server(CHUNK, stall=0.6) as address:
        (answer,) = over_http(address, Workload((WorkloadRequest(0, 0.0, "m", (5,), 2),)), timeout=0.3)
    assert answer.error == "timeout" and answer.heard.lots == (1,)


def test_a_refusal_without_json() -> None:
    with raw_server(b"go\naway", b"", head=b"HTTP/1.1 503 Service Unavailable\r\n") as address:
        (answer,) = over_http(address, Workload((WorkloadRequest(0, 0.0, "m", (5,), 2),)))
    assert (answer.error, answer.heard.detail) == ("http 503", "go away")


def test_an_answer_without_a_length_ends_when_the_server_hangs_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                while not connection.recv(65536).endswith(b"}"):
                    pass
                connection.sendall(
                    b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nConnection: close\r\n\r\n"
                    + CHUNK
                    + LAST
                )

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        (answer,) = over_http(
            f"http://127.0.0.1:{listening.getsockname()[1]}", Workload((WorkloadRequest(0, 0.0, "m", (5,), 2),))
        )
        thread.join(5)
    assert (answer.error, answer.heard.lots) == (None, (2,))


@pytest.mark.parametrize("head", [b"SSH-2.0-OpenSSH_9.2\r\n", b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 20_000])
def test_what_is_no_http_is_a_broken_stream(head: bytes) -> None:
    with raw_server(CHUNK, head=head) as address:
        (answer,) = over_http(address, Workload((WorkloadRequest(0, 0.0, "m", (5,), 2),)))
    assert answer.error == "broken stream"


def test_connections_are_kept_for_the_next_question(tokenizer: Tokenizer) -> None:  # noqa: F811
    asks = tuple(WorkloadRequest(number, 0.0, "nobody" if number == 3 else BASE.name, (5, 6), 3) for number in range(8))
    with running(tokenizer) as server, connections() as made:
        answers = over_http(server.address, Workload(asks, clients=1))
    assert [answer.error for answer in answers] == [None] * 3 + ["http 404"] + [None] * 4
    assert made == [1]


@contextmanager
def connections() -> Iterator[list[int]]:
    """Count the connections made within the block."""
    made = [0]
    with pytest.MonkeyPatch.context() as patch:
        before = wire._Connection.connection_made

        def count(self: wire._Connection, transport: asyncio.BaseTransport) -> None:
            made[0] += 1
            before(self, transport)

        patch.setattr(wire._Connection, "connection_made", count)
        yield made


def test_a_key_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(InputError, match="cannot be sent"):
        over_http("http://127.0.0.1:1", Workload((WorkloadRequest(0, 0.0, "m", (5,), 2),)), "k3y\r\nx-evil: 1")


def test_addresses() -> None:
    assert (
        base_of("http://h:1")
        == base_of("http://h:1/")
        == base_of("http://h:1/v1")
        == base_of("http://h:1/v1/")
        == "http://h:1/v1/"
    )
    assert base_of("https://h/prefix") == "https://h/prefix/v1/"
    for wrong in ("h:1", "ftp://h", "http://", "http://h:port"):
        with pytest.raises(InputError, match="no address"):
            base_of(wrong)
    with pytest.raises(InputError, match="ZOO_API_KEY"):
        base_of("http://me:secret@h:1")


def in_driver(engine: WholeEngine, act: Callable[[ClusterDriver], Coroutine[Any, Any, list[Answer]]]) -> list[Answer]:
    with inline(engine) as driver:
        return asyncio.run(act(driver))


def test_the_same_workload_straight_through_the_driver() -> None:
    workload = build(SETTINGS, (BASE.name, FINE.name))

    async def act(driver: ClusterDriver) -> list[Answer]:
        return await drive(workload, DriverClient(driver, WallClock()), WallClock())

    answers = in_driver(WholeEngine((BASE, FINE), 512), act)
    assert [(answer.error, answer.tokens, answer.number) for answer in answers] == [
        (None, 32, number) for number in range(12)
    ]
    failing = in_driver(WholeEngine((BASE, FINE), 512, fail_at=(2,)), act)
    kinds = {answer.error for answer in failing}
    assert kinds == {"engine", None} and all("FakeFault" in (answer.heard.detail or "FakeFault") for answer in failing)


def test_the_driver_takes_no_texts_and_refuses_what_does_not_fit() -> None:
    async def text(driver: ClusterDriver) -> list[Answer]:
        return await drive(
            Workload((WorkloadRequest(0, 0.0, BASE.name, "text", 2),)), DriverClient(driver, WallClock()), WallClock()
        )

    async def long(driver: ClusterDriver) -> list[Answer]:
        return await drive(
            Workload((WorkloadRequest(0, 0.0, BASE.name, (5,) * 999, 2),)),
            DriverClient(driver, WallClock()),
            WallClock(),
        )

    with pytest.raises(InputError, match="tokenizer"):
        in_driver(WholeEngine((BASE,), 512), text)
    (answer,) = in_driver(WholeEngine((BASE,), 512), long)
    assert answer.error == "engine" and answer.tokens == 0


def test_peaks_are_of_living_processes() -> None:
    own = peak_bytes(os.getpid())
    assert own is not None and own > 10 << 20
    assert peak_bytes(2**30) is None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        assert listener(free.getsockname()[1]) is None
