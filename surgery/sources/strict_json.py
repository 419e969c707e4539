"""Parse untrusted JSON: bounded in size, finite numbers, an object at the top."""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from zoo.errors import MalformedCheckpoint

#: Maximum bytes of a config. Real ones have a few kilobytes.
CONFIG_LIMIT = 4 << 20
#: Maximum bytes of a shard index. That of a thousand layers of experts is far smaller.
INDEX_LIMIT = 64 << 20


def parse_object(data: bytes, name: str, limit: int = CONFIG_LIMIT) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        MalformedCheckpoint: Longer than `limit` bytes, not UTF-8, not JSON, too deep, not an object, or holding NaN or
            infinity (also as a number too large for a float, such as 1e999).
    """
    if len(data) > limit:
        raise MalformedCheckpoint(f"{name} is too large: {len(data):,} bytes, at most {limit:,} are read")
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, parse_float=_finite)
    except _NotFiniteError as error:
        raise MalformedCheckpoint(f"{name} holds {error}, which is not JSON") from None
    except (ValueError, RecursionError) as error:
        raise MalformedCheckpoint(f"{name} is not valid JSON: {_first_line(error)}") from None
    if not isinstance(value, dict):
        raise MalformedCheckpoint(f"{name} holds no JSON object")
    return value


class _NotFiniteError(Exception):
    """Holds the text of a number that is not finite."""


def _refuse_constant(text: str) -> NoReturn:
    raise _NotFiniteError(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _NotFiniteError(text[:40])
    return value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
