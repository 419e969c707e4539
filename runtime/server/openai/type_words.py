"""Say a JSON schema in a few words, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def type_words(of: Mapping[str, Any], known: Mapping[str, Any]) -> str:
    """Return a short description of a JSON schema."""
    if "$ref" in of:
        target = known[of["$ref"].rsplit("/", 1)[1]]
        return "object of " + ", ".join(target["properties"])
    if "anyOf" in of:
        return " or ".join(dict.fromkeys(type_words(one, known) for one in of["anyOf"] if one.get("type") != "null"))
    kind = of.get("type")
    if kind == "array":
        most = f", at most {of['maxItems']}" if "maxItems" in of else ""
        return f"list of ({type_words(of['items'], known)}){most}"
    if kind == "string":
        return "string" + (f" of at most {of['maxLength']} characters" if "maxLength" in of else "")
    if kind in ("integer", "number"):
        return f"{kind}{_bounds(of)}"
    if kind == "object":
        return f"object of {type_words(of.get('additionalProperties', {}), known)}"
    return {"boolean": "true or false"}.get(str(kind), "anything")


def _bounds(of: Mapping[str, Any]) -> str:
    """Return a number's range. Bounds that only come from an integer's width are left out."""
    words = (
        ("minimum", "at least"),
        ("exclusiveMinimum", "above"),
        ("maximum", "at most"),
        ("exclusiveMaximum", "below"),
    )
    said = [f"{word} {of[name]:g}" for name, word in words if name in of and abs(of[name]) < 2**31]
    return f" {', '.join(said)}" if said else ""
