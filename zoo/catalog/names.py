"""Rules for model names, and lookup by a name or a unique ending of it. Pure functions of the names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from zoo.errors import AmbiguousName, InputError, NotFound

MAX_NAME_CHARACTERS = 255
#: Names shown in one error line.
_SHOWN = 8
#: Characters of an unknown name that are compared with the known ones: the comparison is quadratic in them.
_COMPARED = 255


def check_name(name: str) -> str:
    """Return the name if it is a valid model name.

    The catalogue checks every model; long operations also check it before they start. A name is shown in terminals,
    made into paths and URLs, and typed as an argument: it must not leave a folder or read as an option.

    Raises:
        InputError: The name is empty, too long, has surrounding spaces or unprintable characters, begins with `-`,
            contains a backslash, or has a part between `/` that is empty, `.` or `..`.
    """
    reason = _why_illegal(name)
    if reason is not None:
        raise InputError(f"{name[:80]!r} cannot be a model's name: {reason}")
    return name


def _why_illegal(name: str) -> str | None:
    if not name or name != name.strip() or len(name) > MAX_NAME_CHARACTERS or not name.isprintable():
        return f"1 to {MAX_NAME_CHARACTERS} printable characters, no spaces around them"
    if name.startswith("-"):
        return "it would be read as an option; it may not begin with '-'"
    if "\\" in name:
        return "it may not hold a backslash"
    if any(part in ("", ".", "..") for part in name.split("/")):
        return "no part between its slashes may be empty, '.' or '..'"
    return None


def resolve(name: str, names: Sequence[str]) -> str:
    """Return the one name that equals `name` or ends in it; if no ending fits, letter case is ignored.

    Raises:
        NotFound: No name fits; close names are listed.
        AmbiguousName: Several names fit; they are listed.
    """
    if name in names:
        return name
    endings = [known for known in names if known.endswith(name)] or [
        known for known in names if known.casefold().endswith(name.casefold())
    ]
    if not name or not endings:
        raise not_found(name, names)
    if len(endings) > 1:
        raise AmbiguousName(f"{name!r} could be any of {_listed(endings)}")
    return endings[0]


def not_found(name: str, names: Sequence[str]) -> NotFound:
    """Return the error for a name that no model has."""
    if not names:
        return NotFound(f"no model {name[:80]!r}: the zoo is empty")
    close = difflib.get_close_matches(name[:_COMPARED], names, n=3, cutoff=0.5)
    if close:
        return NotFound(f"no model {name[:80]!r}; did you mean {', '.join(close)}?")
    return NotFound(f"no model {name[:80]!r}; the zoo has {_listed(names)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(sorted(names)[:_SHOWN])
    return shown if len(names) <= _SHOWN else f"{shown} and {len(names) - _SHOWN} more"
