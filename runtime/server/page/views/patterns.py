"""All pieces of the page on one view, with made-up data: for those that change the page, and its tests."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import get_args

from starlette.requests import Request
from starlette.responses import Response

from runtime.server.page.context import PageContext
from runtime.server.page.drawing.bars import pages_svg
from runtime.server.page.drawing.lineage import lineage_svg
from runtime.server.page.drawing.strip import COLOURS, StripPart, strip_svg
from runtime.server.page.rendering import explained, html
from zoo.catalog import ModelEntry
from zoo.manifest import Adapter, Component, ComponentKind, ModelKind, Placed

_PAGES = {"capacity": 100, "free": 30, "local": 40, "lent": 15, "reserved": 10, "in_flight": 5}


class PatternViews:
    """The handler of the patterns."""

    def __init__(self, context: PageContext) -> None:
        self.context = context

    @explained(lambda views: views.context.frame)
    async def show(self, request: Request) -> Response:
        """All pieces of the page, with made-up data."""
        frame = self.context.frame
        return await self.context.reads.apart(
            lambda: html(
                "patterns.html",
                frame,
                strip=strip_svg(_parts(), "A strip"),
                tree=lineage_svg(_entries()),
                bar=pages_svg(_PAGES),
                colours=range(COLOURS + 1),
                kinds=get_args(ModelKind),
                names=[f"family/model-{number}" for number in range(12)],
            )
        )


def _parts() -> list[StripPart]:
    places: list[tuple[ComponentKind, int | None]] = [("embedding", None)]
    for number in range(6):
        places += [("attention", number), ("ffn", number)]
    places += [("layer", 6), ("stitch", None), ("lm_head", None)]
    adapter = Adapter("lora", "{}", ())
    made = []
    for position, (kind, layer) in enumerate(places):
        component = Component(kind, "llama", "{}", (), adapter if position % 5 == 1 else None)
        made.append(StripPart(position, Placed(layer, component), ("a",), 1000, position % (COLOURS + 1)))
    return made


def _entries() -> list[ModelEntry]:
    tree = [("base", "foundation", None), ("chat", "full", "base"), ("chat-lora", "lora", "chat"),
            ("small", "surrogate", "base"), ("joined", "composed", None)]  # fmt: skip
    moment = datetime(2026, 1, 1, tzinfo=UTC)
    return [ModelEntry(name, kind, base, "llama", name, moment) for name, kind, base in tree]  # type: ignore[arg-type]
