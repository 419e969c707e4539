"""ASGI middleware that checks the API key, gives each request an id and writes one access-log line per request.

Browsers that logged in on the page carry a cookie instead (`page.sessions`); those that did not are sent to the login.

It is plain ASGI rather than Starlette's `BaseHTTPMiddleware`, so that `http.disconnect` reaches the route unchanged.
The log line has method, path, status, seconds and id, never a request's content.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from urllib.parse import urlencode

from blake3 import blake3
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.frontend.errors import RequestError
from runtime.server.openai.responses import error_reply
from runtime.server.page.links import LOGIN, LOGOUT, is_page
from runtime.server.page.sessions import Sessions

_log = logging.getLogger("blockzoo.access")

_PRINCIPAL = "Block Zoo: owner of what is kept for a client"
#: Routes that answer without a key: the server's state only (`is_known`), and what the login of the page needs.
OPEN_ROUTES = frozenset({"/health", "/live", LOGIN, LOGOUT, "/ui/zoo.css", "/ui/zoo.js", "/ui/icon.svg"})


class Guard:
    """Answer 401 to requests without the key, if one is set, also on routes that do not exist.

    Adds `x-request-id` to every response and sets `request.state.request_id` and `request.state.known`.

    Args:
        sessions: The page's sessions; None where there is no page.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, sessions: Sessions | None = None) -> None:
        self._app = app
        self._sessions = sessions
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
            elif self._sessions is not None and scope["method"] == "GET" and is_page(scope["path"]):
                login = f"{LOGIN}?{urlencode({'next': scope['path']})}"
                await RedirectResponse(login, 303, {"Cache-Control": "no-store"})(scope, receive, named_send)
            else:
                await error_reply(_no_key(), scope["path"])(scope, receive, named_send)
        finally:
            _log.info(
                "%s %.200r %d %.3fs id=%s", scope["method"], scope["path"], status, time.monotonic() - began, name
            )

    def _knows(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        if self._sessions is not None and self._sessions.admits(scope):
            return True
        headers = Headers(scope=scope)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        keys = headers.getlist("x-api-key") + ([given] if scheme.lower() == "bearer" else [])
        # Headers are decoded as latin-1: encoding them back gives the bytes that were sent.
        equal = [hmac.compare_digest(key.strip().encode("latin-1"), self._key) for key in keys]
        return any(equal)


def principal_of(api_key: str | None) -> str:
    """Return what a server's client is called at rest: a digest of its key; "" where the server has no key."""
    return "" if api_key is None else blake3(api_key.encode(), derive_key_context=_PRINCIPAL).hexdigest()


def is_known(request: Request) -> bool:
    """Return whether the request carries the key, or no key is set."""
    return bool(request.state.known)


def _no_key() -> RequestError:
    message = "A valid key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return RequestError(message, status=401, code="invalid_api_key")
