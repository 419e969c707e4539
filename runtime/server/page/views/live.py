"""The live view: the server's state as HTML, and again by server-sent events while it changes.

The state is taken and rendered at most once a second, on a thread of the page, for all browsers together. So a view
costs the engine as much as one client that polls `/zoo/state`, however many look.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from runtime.frontend.errors import RequestError, unavailable
from runtime.server.context import Service
from runtime.server.openai.sse import Outlet
from runtime.server.page.context import PageContext
from runtime.server.page.drawing.bars import pages_svg
from runtime.server.page.reading import CatalogueReads
from runtime.server.page.rendering import Frame, explained, fragment, html, static
from runtime.server.request_body import while_connected
from runtime.server.state_document import state_document

#: Seconds between two states, seconds of one stream (browsers open the next one themselves), and streams at once.
INTERVAL, STREAM_SECONDS, MOST_STREAMS = 1.0, 600.0, 32
#: Rows of a table at most, the busiest first.
MOST_ROWS = 24


class LiveState:
    """The state of a server as HTML, kept for `INTERVAL`."""

    def __init__(self, service: Service, reads: CatalogueReads) -> None:
        self._service = service
        self._reads = reads
        self._making = asyncio.Lock()
        self._made = 0.0
        self._text = ""
        self._tokens: dict[str, int] = {}

    async def latest(self) -> str:
        """Return the state's HTML, at most `INTERVAL` old. Raises RequestError 503 if too many reads wait."""
        async with self._making:
            if not self._text or time.monotonic() - self._made >= INTERVAL:
                self._text = await self._reads.apart(self._rendered)
        return self._text

    def _rendered(self) -> str:
        state, now = state_document(self._service), time.monotonic()
        seconds = now - self._made if self._made else None
        tokens = _tokens_of(state)
        rates = {
            name: max(0, count - self._tokens.get(name, count)) / seconds if seconds else None
            for name, count in tokens.items()
        }
        self._made, self._tokens = now, tokens
        return fragment("live_state.html", state=state, cluster=state.get("cluster"), rates=rates, **_parts(state))


class LiveViews:
    """The handlers of the live view."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self._state = None if context.service is None else LiveState(context.service, context.reads)
        self._streams = 0

    @explained(lambda views: views.context.frame)
    async def show(self, request: Request) -> Response:
        """What runs now: devices, blocks and their queues, pages, loans, moves, plans."""
        text = "" if self._state is None else await self._state.latest()
        frame: Frame = self.context.frame
        return await self.context.reads.apart(lambda: html("live.html", frame, state=text))

    async def events(self, request: Request) -> Response:
        """The same as server-sent events: a piece of HTML, at most one a second."""
        if self._state is None:
            raise RequestError("Nothing is served here.", status=404, code="not_served")
        if self._streams >= MOST_STREAMS:
            raise unavailable("Too many browsers watch this server.")
        return _Stream(self)

    async def script(self, request: Request) -> Response:
        """The page's script: one module."""
        return static("zoo.js")

    async def write(self, outlet: Outlet) -> None:
        """Write states until the server stops or the stream has lasted long enough; equal ones are left out."""
        state, service = self._state, self.context.service
        if state is None or service is None:
            return
        await outlet.start()
        loop = asyncio.get_running_loop()
        end, sent = loop.time() + STREAM_SECONDS, ""
        while loop.time() < end and not service.gate.closed:
            text = await state.latest()
            await outlet.write(b": same\n\n" if text == sent else _event(text))
            sent = text
            await asyncio.sleep(INTERVAL)
        await outlet.write(b"", more=False)

    async def stream(self, receive: Receive, send: Send) -> None:
        """Write to one browser, and count it meanwhile."""
        self._streams += 1
        try:
            with Outlet(send) as outlet:
                async with while_connected(receive):
                    await self.write(outlet)
        except ClientDisconnect:
            pass
        finally:
            self._streams -= 1


class _Stream(Response):
    """A stream of states as a response."""

    def __init__(self, views: LiveViews) -> None:
        super().__init__()
        self._views = views

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._views.stream(receive, send)


def _event(text: str) -> bytes:
    """Return one event; a line of its own per line of the text."""
    return "".join(f"data: {line}\n" for line in text.splitlines()).encode() + b"\n"


def _tokens_of(state: Mapping[str, Any]) -> dict[str, int]:
    """Return the tokens generated so far: in all (""), and by device where there is a cluster."""
    devices = state.get("cluster", {}).get("devices", ())
    return {"": state["counters"]["generated_tokens"], **{each["device"]: each["tokens"] for each in devices}}


def _parts(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parts of the state that a template cannot pick itself: what is busiest, and drawings."""
    cluster: Mapping[str, Any] = state.get("cluster", {})
    blocks = [{**one, "device": agent["id"]} for agent in state["agents"] for one in agent["instances"]]
    blocks.sort(key=lambda one: (-one["queue"], -one.get("batch", 0), one["block"]))
    models = sorted(state["models"], key=lambda one: (-one["running"] - one["waiting"], one["name"]))
    devices = {each["device"]: each for each in cluster.get("devices", ())}
    loans = [(name, debtor, pages) for name, each in devices.items() for debtor, pages in each["lent"].items()]
    return {
        "blocks": blocks[:MOST_ROWS],
        "blocks_count": len(blocks),
        "models": models[:MOST_ROWS],
        "models_count": len(models),
        "devices": devices,
        "loans": loans[:MOST_ROWS],
        "moves": cluster.get("migrations", ())[:MOST_ROWS],
        "totals": cluster.get("migration_totals"),
        "queue": state.get("queue"),
        "most": MOST_ROWS,
        "bars": {agent["id"]: pages_svg(agent["pages"]) for agent in state["agents"]},
    }
