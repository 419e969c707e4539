"""Clients that are slow, silent or disconnected, tested without a network."""

from __future__ import annotations

import asyncio
import socket

import pytest
from starlette.requests import ClientDisconnect

import runtime.server.request_body as reading
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.openai.sse import Outlet
from runtime.server.request_body import while_connected
from tests.runtime.server.harness import eventually, running


async def leaves() -> dict[str, str]:
    await asyncio.sleep(0.01)
    return {"type": "http.disconnect"}


async def stays() -> dict[str, str]:
    await asyncio.sleep(60)
    return {"type": "http.disconnect"}


def test_a_block_ends_when_the_client_leaves() -> None:
    cleaned = []

    async def block() -> None:
        async with while_connected(leaves):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0)  # cleaning up may await: it is not cancelled again
                cleaned.append(True)

    with pytest.raises(ClientDisconnect):
        asyncio.run(block())
    assert cleaned


def test_a_block_that_ends_first_leaves_no_watcher() -> None:
    async def block() -> int:
        async with while_connected(stays):
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        return len(asyncio.all_tasks())

    assert asyncio.run(block()) == 1


def test_a_shutdown_is_no_disconnect() -> None:
    async def block() -> None:
        async with while_connected(stays):
            await asyncio.sleep(60)

    async def shut_down() -> None:
        task = asyncio.create_task(block())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(shut_down())


async def never(message: object) -> None:
    await asyncio.sleep(60)


async def at_once(message: object) -> None:
    pass


def test_a_client_that_does_not_read_counts_as_gone() -> None:
    async def stream() -> None:
        with Outlet(never, 0.05) as out:
            await out.write(b"data: {}\n\n")

    with pytest.raises(ClientDisconnect):
        asyncio.run(stream())


def test_a_stream_with_nothing_to_say_is_no_client_that_does_not_read() -> None:
    async def stream() -> str:
        with Outlet(at_once, 0.02) as out:
            await out.write(b"data: {}\n\n")
            await asyncio.sleep(0.1)
            await out.write(b"data: {}\n\n")
        await asyncio.sleep(0.05)
        return "ended"

    assert asyncio.run(stream()) == "ended"


def test_a_shutdown_while_a_client_does_not_read_is_no_disconnect() -> None:
    async def stream() -> None:
        with Outlet(never, 60) as out:
            await out.write(b"data: {}\n\n")

    async def shut_down() -> None:
        task = asyncio.create_task(stream())
        await asyncio.sleep(0)
        task.cancel()
        await task

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(shut_down())


def test_a_client_that_does_not_finish_its_body_is_told_so(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "READ_SECONDS", 0.1)
    with running(tokenizer) as server:
        host, port = server.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n{")
            assert raw.recv(65536).startswith(b"HTTP/1.1 408")
        assert server.gate.places_in_use == 0


@pytest.mark.parametrize(
    "endless",
    [
        b"GET /" + b"x" * 1_000_000,
        b"GET /live HTTP/1.1\r\nHost: x\r\nX: " + b"y" * 1_000_000,
        b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"X: y\r\n" * 200_000,
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: y\r\n" * 200_000,
    ],
)
def test_headers_and_trailers_have_an_end(tokenizer: Tokenizer, endless: bytes) -> None:
    with running(tokenizer) as server:
        host, port = server.address.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as raw:
            said = b""
            try:
                raw.sendall(endless)
                while part := raw.recv(65536):
                    said += part
            except ConnectionError:  # disconnected while data was still being sent
                pass
            assert not said or said.startswith((b"HTTP/1.1 400", b"HTTP/1.1 414", b"HTTP/1.1 431"))
        assert eventually(lambda: server.gate.places_in_use == 0)


def test_a_body_far_longer_than_headers_may_be_arrives(tokenizer: Tokenizer) -> None:
    with running(tokenizer) as server, server.http() as http:
        body = {"model": "org/base", "prompt": [5], "max_tokens": 2, "ignored": "x" * 500_000}
        assert http.post("/v1/completions", json=body).status_code == 200
