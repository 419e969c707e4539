"""Two models side by side, and the distance of their weights."""

from __future__ import annotations

import math

from starlette.requests import Request
from starlette.responses import Response

from runtime.frontend.errors import RequestError, unavailable
from runtime.server.openai.responses import as_request_error, reply
from runtime.server.page.context import PageContext
from runtime.server.page.distances import WeightDistances, distances
from runtime.server.page.drawing.strip import strip_svg
from runtime.server.page.rendering import explained, html
from runtime.server.page.sessions import require_header
from runtime.server.page.side_by_side import side_by_side
from zoo.catalog import Reader
from zoo.catalog.names import MAX_NAME_CHARACTERS
from zoo.errors import ZooError

#: Names that the form offers.
_OFFERED = 2000


class ComparisonViews:
    """The handlers of the comparison."""

    def __init__(self, context: PageContext) -> None:
        self.context = context
        self._measuring = False

    @explained(lambda views: views.context.frame)
    async def show(self, request: Request) -> Response:
        """Two models side by side: identical components, and what was scored between them."""
        a, b = (_name(request, side, needed=False) for side in ("a", "b"))

        def read(reader: Reader) -> Response:
            found, wrong = None, None
            try:
                found = side_by_side(reader, a, b) if a and b else None
            except ZooError as error:  # said beside the form, which keeps the other name
                wrong = as_request_error(error)
            drawings = () if found is None else [strip_svg(strip, "Components", linked=False) for strip in found.strips]
            names = [entry.name for entry in reader.entries()][:_OFFERED]
            status, said = (200, "") if wrong is None else (wrong.status, str(wrong))
            shown = {"names": names, "a": a, "b": b, "found": found, "drawings": drawings, "wrong": said}
            return html("compare.html", self.context.frame, status, **shown)

        return await self.context.reads.run(read)

    async def measure(self, request: Request) -> Response:
        """The distance of the weights of two models, by component; one comparison at a time."""
        require_header(request)
        a, b = (_name(request, side, needed=True) for side in ("a", "b"))
        if self._measuring:
            raise unavailable("Distances are being measured. Try again in a moment.", retry_after=2)
        self._measuring = True
        try:
            found = await self.context.reads.run(lambda reader: self._measured(reader, a, b))
        finally:
            self._measuring = False
        said = [each if each is None or math.isfinite(each) else None for each in found.distances]
        return reply({"distances": said, "share": found.share})

    def _measured(self, reader: Reader, a: str, b: str) -> WeightDistances:
        both = side_by_side(reader, a, b)
        return distances(self.context.reads.store, both.a, both.b, both.pairs)


def _name(request: Request, side: str, needed: bool) -> str:
    name = request.query_params.get(side, "").strip()
    if len(name) > MAX_NAME_CHARACTERS or (needed and not name):
        raise RequestError(f"{side} must be a model's name.", param=side)
    return name
