"""The route of aliases. Its handler's docstring is part of `docs/http.md`."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from runtime.server.aliases.follower import AliasFollower
from runtime.server.openai.responses import reply


class AliasRoutes:
    """The handler of `/zoo/aliases`."""

    def __init__(self, follower: AliasFollower | None) -> None:
        self._follower = follower

    def routes(self) -> list[Route]:
        return [
            Route("/zoo/aliases", self.list_aliases, methods=["GET"]),
        ]

    async def list_aliases(self, request: Request) -> Response:
        """Every alias of the store: the models that answer for it here, and what it waits for."""
        return reply({"aliases": [] if self._follower is None else self._follower.document()})
