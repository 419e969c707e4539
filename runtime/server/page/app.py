"""The page alone, on a store that is not served (`zoo ui`).

Only names of this machine are accepted as `Host`: a page of another site could have its own name lead here, and would
then read what it likes as if it were this page.
"""

from __future__ import annotations

import ipaddress
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from runtime.frontend.errors import RequestError
from runtime.server.auth import Guard
from runtime.server.capacity import Gate
from runtime.server.openai.responses import error_reply, handle
from runtime.server.page.context import page_context
from runtime.server.page.routes import page_routes
from zoo.errors import ZooError
from zoo.store import Store


class KnownHosts:
    """Refuse requests with a name as `Host`, but `localhost`: an address is what the browser connected to."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_address(Headers(scope=scope).get("host", "")):
            error = RequestError("Open this page by `localhost` or by its address.", status=421, code="unknown_host")
            await error_reply(error, scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def build_page_app(store: Store, api_key: str | None, alone: bool) -> Starlette:
    """Return the application. The caller owns the store and closes it after the application has ended.

    `alone`: only this machine reaches it.
    """
    page = page_context(store, api_key, alone=alone)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        page.reads.read_ahead()  # a server does not: its start is the time to its first token
        yield
        page.close()

    app = Starlette(
        routes=page_routes(page),
        exception_handlers=dict.fromkeys((ZooError, HTTPException, Exception), handle),
        lifespan=lifespan,
    )
    app.router.redirect_slashes = False
    app.add_middleware(Guard, api_key=api_key, sessions=page.sessions)
    if api_key is None:
        app.add_middleware(KnownHosts)
    app.state.gate, app.state.park = Gate(1), _nothing
    return app


async def _nothing() -> None:
    """Park no requests: there are none."""


def _is_address(host: str) -> bool:
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    if name.casefold() == "localhost":
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
