"""Make SVG and HTML elements as escaped text. Pure functions.

The page's Content-Security-Policy allows no style attributes: colours are classes of the style sheet.
"""

from __future__ import annotations

from collections.abc import Iterable

from markupsafe import Markup, escape

#: Attributes with a hyphen or a reserved word in their name, by their argument's name.
_NAMES = {"class_": "class", "aria_label": "aria-label", "text_anchor": "text-anchor"}


def element(tag: str, *children: str | Markup, **attributes: object) -> Markup:
    """Return an element. Children that are no Markup, and all attributes, are escaped; attributes of None are left out.

    `tag` and the attributes' names are the caller's own, never input.
    """
    # Plain strings with an escape per value: formatting by Markup takes several times as long.
    given = "".join(
        f' {_NAMES.get(name, name)}="{escape(_number(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return _made(f"<{tag}{given}>{joined(children)}</{tag}>")


def picture(width: float, height: float, label: str, children: Iterable[Markup], class_: str | None = None) -> Markup:
    """Return an `svg` of a size in pixels; `label` says what it shows to those that read it aloud."""
    return element(
        "svg",
        *children,
        viewBox=f"0 0 {_number(width)} {_number(height)}",
        width=width,
        height=height,
        role="group",
        aria_label=label,
        class_=class_,
    )


def joined(children: Iterable[str | Markup]) -> Markup:
    """Return the children one behind the other, escaped where they are no Markup."""
    return _made("".join(map(escape, children)))


def _made(text: str) -> Markup:
    """Mark text as escaped: all that is not this module's own has gone through `escape`."""
    return Markup(text)  # noqa: S704


def short(text: str, most: int) -> str:
    """Return the text, cut in its middle to `most` characters: the endings of names tell them apart."""
    if len(text) <= most:
        return text
    head = (most - 1) // 2
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


def _number(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else value
