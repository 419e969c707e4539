"""Draw how the pages of a device are used, as a bar of parts. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from markupsafe import Markup

from runtime.server.page.drawing.svg import element, picture

#: Kinds of pages in their order, as `runtime.types.PageCounts` names them.
KINDS = ("local", "lent", "reserved", "in_flight")
_WIDTH, _HEIGHT = 160, 12


def pages_svg(pages: Mapping[str, int]) -> Markup:
    """Return the bar of one device: `pages` has `capacity` and the pages of each kind."""
    said = ", ".join(f"{pages.get(kind, 0):,} {kind.replace('_', ' ')}" for kind in KINDS)
    label = f"{pages['capacity']:,} pages: {said}, {pages['free']:,} free"
    return picture(_WIDTH, _HEIGHT, label, [element("title", label), *_parts(pages)], "bar")


def _parts(pages: Mapping[str, int]) -> Iterator[Markup]:
    yield element("rect", width=_WIDTH, height=_HEIGHT, rx=3, class_="free")
    x = 0.0
    for kind in KINDS:
        width = _WIDTH * pages.get(kind, 0) / max(pages["capacity"], 1)
        if width > 0:
            yield element("rect", x=round(x, 2), width=round(width, 2), height=_HEIGHT, class_=f"pages-{kind}")
        x += width
