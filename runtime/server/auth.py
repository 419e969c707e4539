"""The outermost layer: the key, a name for each request, one log line when it is over.

Plain ASGI, so that nothing stands between a route and its client's leaving. The log says who asked for which route and
how it ended; never what was in it.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.frontend.errors import RequestError
from runtime.server.openai.responses import error_reply

_log = logging.getLogger("blockzoo.access")

#: Routes that say nothing but whether the server lives, to whoever has no key (`is_known`).
OPEN_ROUTES = frozenset({"/health", "/live"})


class Guard:
    """Refuses what has no key, when one is set. Routes that do not exist need the key as well."""

    def __init__(self, app: ASGIApp, api_key: str | None) -> None:
        self._app = app
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name, began = uuid.uuid4().hex, time.monotonic()
        status = 499  # the client left before an answer began (nginx's number for it)

        async def named_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message["headers"], (b"x-request-id", name.encode())]}
            await send(message)

        scope.setdefault("state", {})["request_id"] = name
        try:
            scope["state"]["known"] = known = self._knows(scope)
            if known or scope["path"] in OPEN_ROUTES:
                await self._app(scope, receive, named_send)
            else:
                await error_reply(_no_key())(scope, receive, named_send)
        finally:
            _log.info(
                "%s %.200r %d %.3fs id=%s", scope["method"], scope["path"], status, time.monotonic() - began, name
            )

    def _knows(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        scheme, _, given = Headers(scope=scope).get("authorization", "").partition(" ")
        # Headers are decoded as latin-1: encoding them back gives the bytes that were sent.
        return scheme.lower() == "bearer" and hmac.compare_digest(given.strip().encode("latin-1"), self._key)


def is_known(request: Request) -> bool:
    """Whether whoever asks has brought the key, or none is set."""
    return bool(request.state.known)


def _no_key() -> RequestError:
    message = "A valid key is needed: send it as `Authorization: Bearer KEY`."
    return RequestError(message, status=401, code="invalid_api_key")
