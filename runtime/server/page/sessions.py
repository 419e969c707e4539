"""Sessions of browsers: after a login with the key, a cookie stands for it.

The cookie holds a random id, never the key or anything made of it. What is kept here is a digest of the id, so that the
look-up takes no time that depends on a part of the id, and the time at which the session ends. Nothing is on disk: a
restart of the server ends all sessions.

A cookie is sent by the browser, whatever site made the request. So it counts for reading only, and for requests that
carry `HEADER`, which pages of other sites cannot send.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable

from blake3 import blake3
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import Scope

from runtime.frontend.errors import RequestError

#: Seconds after which a session ends, and the sessions that there may be; the oldest gives way.
SESSION_SECONDS = 12 * 3600
MOST_SESSIONS = 256
#: Header that a request needs which changes or runs something.
HEADER = "x-zoo-page"
_READING = ("GET", "HEAD")


class Sessions:
    """The sessions of one server with a key. Used on the event loop's thread only."""

    def __init__(self, key: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._key = key.encode()
        self._clock = clock
        self._ends: dict[bytes, float] = {}

    def begin(self, key: str) -> str | None:
        """Return the id of a new session, or None if the key is wrong. Compares in constant time."""
        if not hmac.compare_digest(key.encode(), self._key):
            return None
        now = self._clock()
        self._ends = {name: end for name, end in self._ends.items() if end > now}
        while len(self._ends) >= MOST_SESSIONS:
            del self._ends[next(iter(self._ends))]
        session = secrets.token_urlsafe(32)
        self._ends[_digest(session)] = now + SESSION_SECONDS
        return session

    def end(self, scope: Scope) -> None:
        """End the session of a request, if it has one."""
        self._ends.pop(_digest(_cookie(scope)), None)

    def admits(self, scope: Scope) -> bool:
        """Return whether the request's cookie stands for the key."""
        if scope["method"] not in _READING and HEADER not in Headers(scope=scope):
            return False
        return self._ends.get(_digest(_cookie(scope)), 0.0) > self._clock()


def require_header(request: Request) -> None:
    """Raise RequestError 403 for a request without `HEADER`, which a page of another site cannot send."""
    if HEADER not in request.headers:
        raise RequestError("This needs the header X-Zoo-Page.", status=403, code="header_needed")


def cookie_name(scope: Scope) -> str:
    """Return the cookie's name. Browsers do not tell ports apart, so the port of the server is in it."""
    return f"zoo_session_{(scope.get('server') or ('', 0))[1]}"


def _digest(session: str) -> bytes:
    return blake3(session.encode()).digest()


def _cookie(scope: Scope) -> str:
    """Return the session's id as the request has it, "" without one.

    Not read by `http.cookies`: unquoting a value takes it time quadratic in the length (CVE-2024-7592), and ids have no
    quotes.
    """
    wanted = cookie_name(scope)
    for header in Headers(scope=scope).getlist("cookie"):
        for part in header.split(";"):
            name, _, value = part.strip().partition("=")
            if name == wanted:
                return value
    return ""
