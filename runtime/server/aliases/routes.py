"""The routes of aliases. The handlers' docstrings are part of `docs/http.md`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, TypeVar

import msgspec
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.frontend.errors import RequestError
from runtime.server.aliases.follower import AliasFollower
from runtime.server.openai.responses import reply
from runtime.server.request_body import read_body
from zoo.aliases import roll_back, set_alias
from zoo.records import Alias
from zoo.store import Store

#: Bytes of a body at most: an alias may name several models with their shares.
_BODY_BYTES = 1 << 14

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]


class AliasOrder(msgspec.Struct, frozen=True):
    """The body of POST /zoo/aliases: what `zoo alias NAME TARGET` takes.

    Fields:
        expected: Number of the alias' latest change as the client has seen it, 0 for an alias that is not there; if
            there is another one, nothing is done.
    """

    name: _Name
    target: Annotated[str, msgspec.Meta(min_length=1, max_length=8192)]
    expected: Annotated[int, msgspec.Meta(ge=0, lt=2**62)] | None = None


class RollbackOrder(msgspec.Struct, frozen=True):
    """The body of POST /zoo/aliases/rollback."""

    name: _Name


B = TypeVar("B")


class AliasRoutes:
    """The handlers of `/zoo/aliases`. `guarded`: the server has a key, so that what changes the store may be taken."""

    def __init__(self, follower: AliasFollower | None, guarded: bool) -> None:
        self._follower = follower
        self._guarded = guarded

    def routes(self) -> list[Route]:
        return [
            Route("/zoo/aliases", self.list_aliases, methods=["GET"]),
            Route("/zoo/aliases", self.point, methods=["POST"]),
            Route("/zoo/aliases/rollback", self.roll_back, methods=["POST"]),
        ]

    async def list_aliases(self, request: Request) -> Response:
        """Every alias of the store: the models that answer for it here, and what it waits for."""
        return reply({"aliases": [] if self._follower is None else self._follower.document()})

    async def point(self, request: Request) -> Response:
        """Let an alias point to a model, or to several with their shares: `{"name": "prod", "target": "a:90,b:10"}`."""
        store, order = await self._read(request, AliasOrder)
        return await _changed(partial(set_alias, store, order.name, order.target, expected=order.expected))

    async def roll_back(self, request: Request) -> Response:
        """Let an alias point to what it pointed to before its latest change: `{"name": "prod"}`."""
        store, order = await self._read(request, RollbackOrder)
        return await _changed(partial(roll_back, store, order.name))

    async def _read(self, request: Request, kind: type[B]) -> tuple[Store, B]:
        """Return the store and the parsed body. Raises RequestError 400, 403, 408, 413."""
        if not self._guarded or self._follower is None:
            message = "Aliases are changed with the server's key only, and this server has none: use `zoo alias`."
            raise RequestError(message, status=403, code="server_key_needed")
        raw = await read_body(request, _BODY_BYTES)
        try:
            return self._follower.store, msgspec.json.decode(raw, type=kind)
        except msgspec.ValidationError as error:
            raise RequestError(str(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestError(f"the body is no JSON object: {error}", code="invalid_json") from None


async def _changed(change: Callable[[], Alias]) -> Response:
    """Answer with the alias as the catalogue has it now; servers follow."""
    return reply((await run_in_threadpool(change)).document())
