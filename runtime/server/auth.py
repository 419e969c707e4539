"""ASGI middleware that checks the API key, gives each request an id and writes one access-log line per request.

Browsers that logged in on the page carry a cookie instead (`page.sessions`); those that did not are sent to the login.

It is plain ASGI rather than Starlette's `BaseHTTPMiddleware`, so that `http.disconnect` reaches the route unchanged.
The log line has method, path, status, seconds and id, never a request's content.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from urllib.parse import urlencode

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from runtime.frontend.errors import RequestError
from runtime.server.keys.key_book import KeyBook
from runtime.server.openai.responses import error_reply
from runtime.server.page.links import LOGIN, LOGOUT, is_page
from runtime.server.page.sessions import Sessions
from zoo import keys as client_keys
from zoo.records import ClientKey

_log = logging.getLogger("blockzoo.access")

#: Routes that answer without a key: the server's state only (`is_known`), and what the login of the page needs.
OPEN_ROUTES = frozenset({"/health", "/live", LOGIN, LOGOUT, "/ui/zoo.css", "/ui/zoo.js", "/ui/icon.svg"})


#: Keys of one request that are compared.
_MOST_KEYS = 4
#: Routes for clients' keys (`zoo key`): what answers them, and what is kept for them. All else needs the server's.
_CLIENT_ROUTES = re.compile(r"/v1/.*|/tokenize|/detokenize|/zoo/requests/[^/]+|/openapi\.json")


class Guard:
    """Answer 401 to requests without a key, if the server has one, also on routes that do not exist.

    Adds `x-request-id` to every response and sets, of `request.state`, `request_id`, `known` (it carries the server's
    own key, or there is none), `client` (the client's key that it carries), `principal` (the owner of what is kept).

    Args:
        sessions: The page's sessions; None where there is no page.
        keys: The keys of clients; None: the server's own is the only one.
    """

    def __init__(
        self, app: ASGIApp, api_key: str | None, sessions: Sessions | None = None, keys: KeyBook | None = None
    ) -> None:
        self._app = app
        self._sessions = sessions
        self._keys = keys
        self._key = None if api_key is None else api_key.encode()
        self._principal = principal_of(api_key)

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
            client = None if known or self._keys is None else self._keys.find(_given(scope))
            scope["state"]["client"] = client
            scope["state"]["principal"] = self._principal if client is None else client.principal
            if known or scope["path"] in OPEN_ROUTES or (client and _CLIENT_ROUTES.fullmatch(scope["path"])):
                await self._app(scope, receive, named_send)
            elif client is not None:
                await error_reply(_not_for_clients(), scope["path"])(scope, receive, named_send)
            elif self._sessions is not None and scope["method"] == "GET" and is_page(scope["path"]):
                login = f"{LOGIN}?{urlencode({'next': scope['path']})}"
                await RedirectResponse(login, 303, {"Cache-Control": "no-store"})(scope, receive, named_send)
            else:
                await error_reply(_no_key(), scope["path"])(scope, receive, named_send)
        finally:
            _log.info(
                "%s %.200r %d %.4fs id=%s", scope["method"], scope["path"], status, time.monotonic() - began, name
            )

    def _knows(self, scope: Scope) -> bool:
        if self._key is None:
            return True
        if self._sessions is not None and self._sessions.admits(scope):
            return True
        # Headers are decoded as latin-1: encoding them back gives the bytes that were sent.
        equal = [hmac.compare_digest(key.encode("latin-1"), self._key) for key in _given(scope)]
        return any(equal)


def _given(scope: Scope) -> list[str]:
    """Return the keys that a request carries, at most a few."""
    headers = Headers(scope=scope)
    scheme, _, given = headers.get("authorization", "").partition(" ")
    keys = headers.getlist("x-api-key") + ([given] if scheme.lower() == "bearer" else [])
    return [key.strip() for key in keys[-_MOST_KEYS:]]


def principal_of(api_key: str | None) -> str:
    """Return what a server's client is called at rest: a digest of its key; "" where the server has no key."""
    return "" if api_key is None else client_keys.principal_of(api_key)


def principal(request: Request) -> str:
    """Return the owner of what is kept for the client of a request."""
    return str(request.state.principal)


def client_key(request: Request) -> ClientKey | None:
    """Return the client's key that a request carries; None: the server's own, or none is needed."""
    found: ClientKey | None = request.state.client
    return found


def is_known(request: Request) -> bool:
    """Return whether the request carries the key, or no key is set."""
    return bool(request.state.known)


def _not_for_clients() -> RequestError:
    return RequestError("This route needs the server's own key.", status=403, code="server_key_needed")


def _no_key() -> RequestError:
    message = "A valid key is needed: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`."
    return RequestError(message, status=401, code="invalid_api_key")
