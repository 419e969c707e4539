"""A load client for OpenAI-compatible servers: streams completions and records when each group of tokens arrived.

Failures have a kind:

    connect          no connection                  http 404, http 429, …   refused with a status
    timeout          no byte for too long           server error            error event in mid-stream
    broken stream    ended before its end           malformed               not an event stream of completions

Tokens are counted by `token_ids` where the server sends them (Block Zoo, vLLM), else by its `usage`, else one per event
with text. Prompts as ids, `ignore_eos` and `return_token_ids` are as in vLLM. Redirects and proxies are not followed.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx

from runtime.bench.answers import TokenTimes
from runtime.bench.drive import Clock
from runtime.bench.wire import Failed, HttpOrigin, Wire
from runtime.bench.workload import WorkloadRequest
from zoo.errors import InputError, Unavailable

_CONNECT_SECONDS = 10.0
#: Maximum bytes of one event, of an error's body and of a list of models.
_MOST_EVENT = 1 << 20
_SHOWN = 200


class HttpClient:
    """Client of one server. Use it as `async with HttpClient.connected(…) as client`."""

    def __init__(self, wire: Wire, base: httpx.URL, clock: Clock) -> None:
        self._wire = wire
        self._base = base
        self._clock = clock

    @classmethod
    @contextlib.asynccontextmanager
    async def connected(
        cls, url: str, clock: Clock, api_key: str | None = None, timeout: float = 600.0
    ) -> AsyncIterator[HttpClient]:
        """Return a client of the server at `url`. `timeout` is in seconds without a byte.

        Raises InputError for an invalid address, or a key that cannot be sent.
        """
        base = httpx.URL(base_of(url))
        wire = Wire(_origin(base, api_key), _CONNECT_SECONDS, timeout)
        try:
            yield cls(wire, base, clock)
        finally:
            wire.close()

    async def models(self) -> list[str]:
        """Return the names of the served models. Raises Unavailable."""
        body = _Body()
        try:
            await self._wire.exchange(self._target(b"GET", b"models"), b"", body)
            if body.code != 200:
                raise Failed(f"http {body.code}", f"it answers with status {body.code}")
            return [str(model["id"]) for model in json.loads(body.raw)["data"]]
        except Failed as error:
            raise Unavailable(f"{self._base} does not say what it serves: {_line(str(error)) or error.kind}") from None
        except (ValueError, KeyError, TypeError, RecursionError):
            raise Unavailable(f"{self._base} does not list its models as OpenAI does") from None

    async def send_request(self, ask: WorkloadRequest) -> TokenTimes:
        """Send a completion request and return its times. Never raises for failures of the server or the network."""
        reading = _Reading(self._clock)
        failed: Failed | None = None
        try:
            await self._wire.exchange(self._target(b"POST", b"completions"), _question(ask), reading)
        except Failed as error:
            failed = error
        return reading.token_times(failed, len(ask.prompt) if not isinstance(ask.prompt, str) else 0)

    def _target(self, method: bytes, route: bytes) -> bytes:
        return b"%b %b%b" % (method, self._base.raw_path, route)


class _Body:
    """Receives an answer that is one document, up to `_MOST_EVENT` bytes."""

    def __init__(self) -> None:
        self.code = 0
        self.raw = bytearray()

    def status(self, code: int) -> None:
        self.code = code

    def body(self, data: bytes) -> None:
        self.raw += data
        if len(self.raw) > _MOST_EVENT:
            raise Failed("malformed", f"an answer is longer than {_MOST_EVENT:,} bytes")


class _Reading:
    """Receives one answer: a stream of events, or an error."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._refusal: _Body | None = None
        self._rest = b""
        self._stamps: list[float] = []
        self._lots: list[int] = []
        self._usage: dict[str, int] = {}
        self._finished = False

    def status(self, code: int) -> None:
        if code != 200:
            self._refusal = _Body()
            self._refusal.status(code)

    def body(self, data: bytes) -> None:
        """Process received bytes. Events that arrive together form one group."""
        if self._refusal is not None:
            self._refusal.body(data)
            return
        stamp = self._clock.now()
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > _MOST_EVENT:
            raise Failed("malformed", f"an event is longer than {_MOST_EVENT:,} bytes")
        if tokens := sum(self._read_event(line[5:].strip()) for line in lines if line.startswith(b"data:")):
            self._stamps.append(stamp)
            self._lots.append(tokens)

    def token_times(self, error: Failed | None, prompt: int) -> TokenTimes:
        """Return the times so far. `error` is how the exchange failed; a refusal's status takes precedence."""
        if self._refusal is not None:
            error = Failed(f"http {self._refusal.code}", _reason(self._refusal.raw))
        elif error is None and not self._finished:
            error = Failed("broken stream", "the stream ended before the answer did")
        counted = self._usage.get("completion_tokens") or sum(self._lots)
        return TokenTimes(
            tuple(self._stamps), tuple(self._lots), counted, self._usage.get("prompt_tokens") or prompt,
            error.kind if error else None, _line(str(error)) if error else None,
        )  # fmt: skip

    def _read_event(self, event: bytes) -> int:
        """Return the number of tokens of one event. Raises Failed."""
        if event == b"[DONE]":
            self._finished = True
            return 0
        try:
            document = json.loads(event)
            if document.get("error") is not None:
                raise Failed("server error", str(document["error"].get("message", "")))
            if usage := document.get("usage"):
                self._usage = {key: int(value) for key, value in usage.items() if isinstance(value, int)} or self._usage
            return sum(self._tokens(choice) for choice in document["choices"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise Failed("malformed", "an event of the stream is no completion") from None

    def _tokens(self, choice: dict[str, Any]) -> int:
        if choice.get("finish_reason"):
            self._finished = True
        ids = choice.get("token_ids")
        return len(ids) if ids is not None else int(bool(choice.get("text")))


def base_of(url: str) -> str:
    """Return the base address of the routes for `http://host:8000`, given with or without `/v1`. Raises InputError."""
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


def _question(ask: WorkloadRequest) -> bytes:
    question = {
        "model": ask.model, "prompt": ask.prompt, "max_tokens": ask.answer, "temperature": 0.0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True,
    }  # fmt: skip
    return json.dumps(question, separators=(",", ":")).encode()


def _origin(base: httpx.URL, api_key: str | None) -> HttpOrigin:
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise InputError("the API key holds characters that cannot be sent")
    secure = base.scheme == "https"
    lines = [f"host: {base.netloc.decode()}", "accept: */*", "accept-encoding: identity", "user-agent: zoo-bench"]
    if api_key:
        lines.append(f"authorization: Bearer {api_key}")
    headers = "".join(f"{line}\r\n" for line in lines).encode()
    tls = httpx.create_ssl_context(trust_env=False) if secure else None
    return HttpOrigin(base.host, base.port or (443 if secure else 80), tls, headers)


def _reason(raw: bytes | bytearray) -> str:
    """Return the message of an error's body, its raw text if it has none."""
    with contextlib.suppress(ValueError, KeyError, TypeError, RecursionError):
        return str(json.loads(raw)["error"]["message"])
    return raw.decode(errors="replace")


def _line(text: str) -> str:
    return " ".join(text.split())[:_SHOWN]
