"""A client of any OpenAI-compatible server: streams completions and stamps what comes, lot by lot. What goes wrong has a kind.

    connect            nobody took the connection          http 404, http 429, …   refused with a status
    timeout            nothing came for too long           server error            the server said so in mid-stream
    broken stream      it ended before its end             malformed               what came is no event stream of completions

Tokens are counted by `token_ids` where the server sends them (this one, vLLM), else by its `usage`, else one per event that has text.
Ids as prompts, `ignore_eos` and `return_token_ids` are as in vLLM. Redirects and proxies are not followed. Knows nothing of when to ask.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

from runtime.bench.answers import Heard
from runtime.bench.drive import Clock
from runtime.bench.workload import Ask
from zoo.errors import InputError, Unavailable

_CONNECT_SECONDS = 10.0
#: No event of a stream, and no refusal, is read beyond this.
_MOST_EVENT = 1 << 20
_SHOWN = 200


class _Failed(Exception):
    """A request's end before its time. `kind` as in the table above."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(slots=True)
class _Reading:
    """What has come of one answer so far."""

    stamps: list[float] = field(default_factory=list)
    lots: list[int] = field(default_factory=list)
    usage: dict[str, int] = field(default_factory=dict)
    finished: bool = False

    def lot(self, stamp: float, tokens: int) -> None:
        if tokens:
            self.stamps.append(stamp)
            self.lots.append(tokens)

    def heard(self, error: _Failed | None, prompt: int) -> Heard:
        counted = self.usage.get("completion_tokens") or sum(self.lots)
        return Heard(
            tuple(self.stamps), tuple(self.lots), counted, self.usage.get("prompt_tokens") or prompt,
            error.kind if error else None, _line(str(error)) if error else None,
        )  # fmt: skip


class HttpClient:
    """One server. Use it as `async with HttpClient.connected(…) as client`."""

    def __init__(self, http: httpx.AsyncClient, clock: Clock) -> None:
        self._http = http
        self._clock = clock

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(cls, url: str, clock: Clock, api_key: str | None = None, timeout: float = 600.0) -> AsyncIterator[HttpClient]:
        """`timeout`: seconds without a byte. Raises InputError for what is no address."""
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {api_key}"} if api_key else {})}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        waits = httpx.Timeout(timeout, connect=_CONNECT_SECONDS)
        async with httpx.AsyncClient(base_url=base_of(url), headers=headers, timeout=waits, limits=limits, trust_env=False) as http:
            yield cls(http, clock)

    async def models(self) -> list[str]:
        """What it serves. Raises Unavailable."""
        try:
            async with self._http.stream("GET", "models") as answer:
                answer.raise_for_status()
                return [str(model["id"]) for model in json.loads(await _bounded(answer, bytearray()))["data"]]
        except httpx.HTTPError as error:
            raise Unavailable(f"{self._http.base_url} does not say what it serves: {_line(str(error)) or type(error).__name__}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unavailable(f"{self._http.base_url} does not list its models as OpenAI does") from None

    async def ask(self, ask: Ask) -> Heard:
        """Never raises for what the server or the network does."""
        reading = _Reading()
        failed: _Failed | None = None
        try:
            async with self._http.stream("POST", "completions", json=_body(ask)) as answer:
                if answer.status_code != 200:
                    raise _Failed(f"http {answer.status_code}", await _refusal(answer))
                await self._read(answer, reading)
        except _Failed as error:
            failed = error
        except httpx.TimeoutException as error:
            failed = _Failed("connect" if isinstance(error, httpx.ConnectTimeout) else "timeout", type(error).__name__)
        except httpx.ConnectError as error:
            failed = _Failed("connect", str(error))
        except httpx.HTTPError as error:
            failed = _Failed("broken stream", str(error) or type(error).__name__)
        return reading.heard(failed, len(ask.prompt) if not isinstance(ask.prompt, str) else 0)

    async def _read(self, answer: httpx.Response, reading: _Reading) -> None:
        async for stamp, events in self._events(answer):
            reading.lot(stamp, sum(_take(event, reading) for event in events))
        if not reading.finished:
            raise _Failed("broken stream", "the stream ended before the answer did")

    async def _events(self, answer: httpx.Response) -> AsyncIterator[tuple[float, list[bytes]]]:
        """The data of server-sent events, those that came together in one lot, until the one that says `[DONE]`."""
        rest = b""
        async for piece in answer.aiter_bytes():
            stamp = self._clock.now()
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > _MOST_EVENT:
                raise _Failed("malformed", f"an event is longer than {_MOST_EVENT:,} bytes")
            yield stamp, [line[5:].strip() for line in lines if line.startswith(b"data:")]


def base_of(url: str) -> str:
    """`http://host:8000`, with or without `/v1`, as the address that routes hang on. Raises InputError."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise InputError(f"{url!r} is no address: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise InputError(f"{url!r} is no address; write http://host:port")
    if parsed.userinfo:  # addresses are printed and written into documents
        raise InputError("an address holds no password here; give a key as ZOO_API_KEY")
    bare = str(parsed).rstrip("/")
    return f"{bare}/" if bare.endswith("/v1") else f"{bare}/v1/"


def _body(ask: Ask) -> dict[str, Any]:
    return {
        "model": ask.model, "prompt": ask.prompt, "max_tokens": ask.answer, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip


def _take(event: bytes, reading: _Reading) -> int:
    """Tokens of one event. Raises _Failed."""
    if event == b"[DONE]":
        reading.finished = True
        return 0
    try:
        document = json.loads(event)
        if document.get("error") is not None:
            raise _Failed("server error", str(document["error"].get("message", "")))
        reading.usage = {key: int(value) for key, value in (document.get("usage") or {}).items() if isinstance(value, int)} or reading.usage
        choices = document["choices"]
        reading.finished = reading.finished or any(choice.get("finish_reason") for choice in choices)
        return sum(_tokens(choice) for choice in choices)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _Failed("malformed", "an event of the stream is no completion") from None


def _tokens(choice: dict[str, Any]) -> int:
    ids = choice.get("token_ids")
    return len(ids) if ids is not None else int(bool(choice.get("text")))


async def _refusal(answer: httpx.Response) -> str:
    """What the server says about a status, as far as one line goes."""
    raw = bytearray()
    with contextlib.suppress(httpx.HTTPError):  # the status is known, whatever becomes of the rest
        await _bounded(answer, raw)
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(raw)["error"]["message"])
    return raw.decode(errors="replace")


async def _bounded(answer: httpx.Response, into: bytearray) -> bytearray:
    """Read a body, as far as bodies are read; what came stays in `into` whatever happens."""
    async for piece in answer.aiter_bytes():
        into += piece
        if len(into) > _MOST_EVENT:
            break
    return into


def _line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]
