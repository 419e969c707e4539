"""Schemas of many kinds, made from a seed: the features that schemas of JSONSchemaBench combine.

Enums, constants, nested objects, arrays with bounds, references (also of a schema to itself), alternatives, patterns,
formats, numbers with bounds, multiples, additional and pattern properties, tuples.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Schema = dict[str, Any]
#: A schema of which no answer ends within a few hundred tokens.
ENDLESS: Schema = {
    "type": "array",
    "minItems": 500,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "size": {"type": "number", "minimum": 0, "maximum": 100},
        },
        "required": ["name", "kind", "size"],
        "additionalProperties": False,
    },
}
_WORDS = ("name", "kind", "city", "size", "color", "count", "price", "date", "email", "code", "notes", "state", "owner")
_PATTERNS = ("^[A-Z]{2}[0-9]{3}$", "^(north|south)-[a-z]+$", "^#[0-9a-f]{6}$", "^v[0-9]+\\.[0-9]+$", "^[^aeiou ]{1,8}$")
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "hostname")


def make_schemas(count: int, seed: int) -> list[Schema]:
    """Return so many schemas; each kind occurs equally often."""
    makers: Sequence[Callable[[random.Random], Schema]] = (
        _flat, _nested, _listed, _referred, _tree, _either, _patterned, _formatted, _numbers, _mapped,
    )  # fmt: skip
    draw = random.Random(seed)
    return [makers[number % len(makers)](draw) for number in range(count)]


def _object(draw: random.Random, properties: Schema, required: Sequence[str] | None = None, **more: Any) -> Schema:
    names = list(properties)
    wanted = names[: draw.randint(1, len(names))] if required is None else list(required)
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": False, **more}


def _named(draw: random.Random, count: int, make: Callable[[random.Random], Schema]) -> Schema:
    return {name: make(draw) for name in draw.sample(_WORDS, count)}


def _scalar(draw: random.Random) -> Schema:
    low = draw.randint(-50, 50)
    return draw.choice(
        [
            {"type": "boolean"},
            {"type": ["string", "null"], "maxLength": draw.randint(3, 20)},
            {"type": "integer", "minimum": low, "maximum": low + draw.randint(0, 1000)},
            {"enum": draw.sample(["red", "green", "blue", 1, 2.5, None, True], 3)},
            {"const": draw.choice(["fixed", 7, {"a": [1, 2]}, None])},
            {"type": "string", "minLength": 1, "maxLength": draw.randint(4, 24)},
        ]
    )


def _flat(draw: random.Random) -> Schema:
    return _object(draw, _named(draw, draw.randint(2, 6), _scalar))


def _nested(draw: random.Random) -> Schema:
    inner = _object(draw, _named(draw, 3, _scalar))
    return _object(
        draw, {"inner": inner, "other": _object(draw, {"deep": inner, **_named(draw, 1, _scalar)})}, ["inner"]
    )


def _listed(draw: random.Random) -> Schema:
    least = draw.randint(0, 2)
    items = draw.choice([_scalar(draw), _object(draw, _named(draw, 2, _scalar))])
    some = {"type": "array", "items": items, "minItems": least, "maxItems": least + draw.randint(0, 3)}
    pair = {"type": "array", "prefixItems": [_scalar(draw), {"type": "integer"}], "items": False, "minItems": 2}
    return _object(draw, {"some": some, "pair": pair}, ["some", "pair"])


def _referred(draw: random.Random) -> Schema:
    point = _object(draw, {"x": {"type": "number", "minimum": 0, "maximum": 9}, "y": {"type": "integer"}}, ["x"])
    line = {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": draw.randint(1, 3)}
    return _object(draw, {"line": {"$ref": "#/$defs/line"}, "at": {"$ref": "#/$defs/point"}}, ["line"],
                   **{"$defs": {"point": point, "line": line}})  # fmt: skip


def _tree(draw: random.Random) -> Schema:
    children = {"type": "array", "items": {"$ref": "#"}, "maxItems": draw.randint(1, 2)}
    return _object(draw, {"value": _scalar(draw), "children": children}, ["value"])


def _either(draw: random.Random) -> Schema:
    ways = [_object(draw, {"type": {"const": word}, **_named(draw, 2, _scalar)}, ["type"]) for word in ("a", "b", "c")]
    return draw.choice(
        [{"anyOf": ways}, _object(draw, {"it": {"anyOf": [*ways[:2], {"type": "null"}]}}, ["it"]), {"oneOf": ways}]
    )


def _patterned(draw: random.Random) -> Schema:
    return _object(draw, _named(draw, 3, lambda d: {"type": "string", "pattern": d.choice(_PATTERNS)}))


def _formatted(draw: random.Random) -> Schema:
    return _object(draw, _named(draw, 3, lambda d: {"type": "string", "format": d.choice(_FORMATS)}))


def _numbers(draw: random.Random) -> Schema:
    low = draw.randint(-99, 99) / 4
    return _object(
        draw,
        {
            "a": {"type": "number", "minimum": low, "exclusiveMaximum": low + draw.randint(1, 40) / 8},
            "b": {"type": "integer", "multipleOf": draw.choice([2, 5, 25, 100]), "minimum": 0, "maximum": 10_000},
            "c": {"allOf": [{"type": "integer"}, {"exclusiveMinimum": draw.randint(0, 9)}, {"maximum": 500}]},
        },
        ["a", "b", "c"],
    )


def _mapped(draw: random.Random) -> Schema:
    return {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9999}},
        "patternProperties": {"^x_[a-z]{1,4}$": _scalar(draw)},
        "additionalProperties": draw.choice([False, {"type": "boolean"}]),
        "required": ["id"],
        "maxProperties": draw.randint(2, 4),
    }
