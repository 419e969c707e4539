"""Render the page's templates as responses.

Jinja escapes every value that is no Markup; `svg` makes the only Markup. The headers allow nothing from another host,
no inline script or style, and no frame around the page.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from blake3 import blake3
from starlette.requests import Request
from starlette.responses import Response

from runtime.server.openai.responses import as_request_error
from runtime.server.page.links import model_link
from zoo.errors import ZooError

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'; "
        "object-src 'none'",
        "Cache-Control": "no-store",
        "Cross-Origin-Opener-Policy": "same-origin",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "same-origin",
        "X-Content-Type-Options": "nosniff",
    }
)
_MEDIA_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
#: Seconds for which a browser keeps a static file; its address changes with its content.
_KEPT_SECONDS = 24 * 3600
View = TypeVar("View", bound=Callable[..., Awaitable[Response]])


@dataclass(frozen=True, slots=True)
class Frame:
    """What every view shows around its content.

    Fields:
        serving: Whether models are served here, or a store is only looked at.
        login: Whether there is a session to log out of.
    """

    serving: bool
    login: bool


def html(template: str, frame: Frame, status: int = 200, **values: Any) -> Response:
    """Return a template's text with the headers of every page. It may take milliseconds: call it on a thread."""
    text = fragment(template, frame=frame, **values)
    return Response(text, status, HEADERS, media_type="text/html; charset=utf-8")


def fragment(template: str, **values: Any) -> str:
    """Return a template's text."""
    text: str = _environment().get_template(template).render(**values)
    return text


def static(name: str) -> Response:
    """Return one of the files beside the templates."""
    headers = {**HEADERS, "Cache-Control": f"public, max-age={_KEPT_SECONDS}"}
    return Response(_content(name), 200, headers, media_type=_MEDIA_TYPES[Path(name).suffix])


def explained(frame: Callable[[Any], Frame]) -> Callable[[View], View]:
    """Return a decorator of views, methods of an object with a frame, that shows expected errors as pages."""

    def decorate(view: View) -> View:
        @wraps(view)
        async def shown(self: Any, request: Request) -> Response:
            try:
                return await view(self, request)
            except ZooError as raised:
                error = as_request_error(raised)
                response = html("error.html", frame(self), error.status, code=error.status, message=str(error))
                if error.retry_after is not None:
                    response.headers["Retry-After"] = str(error.retry_after)
                return response

        return shown  # type: ignore[return-value]

    return decorate


def human_bytes(count: float) -> str:
    """Return bytes in decimal units, as the command line does: 1234567 -> '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def human_count(count: float) -> str:
    """Return a count in short form: 6738415616 -> '6.74B'."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= limit:
            return f"{count / limit:.2f}{unit}"
    return str(count)


@cache
def _content(name: str) -> bytes:
    return (_HERE / "static" / name).read_bytes()


def _address(name: str) -> str:
    return f"/ui/{name}?v={blake3(_content(name)).hexdigest()[:12]}"


@cache
def _environment() -> Environment:
    """Return Jinja's environment; it is imported and made with the first page."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    made = Environment(
        autoescape=True,
        loader=FileSystemLoader(_HERE / "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {"bytes": human_bytes, "count": human_count}
    made.globals |= {"model_link": model_link, "static": _address}
    return made
