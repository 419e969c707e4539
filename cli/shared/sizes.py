"""Parse sizes in bytes."""

from __future__ import annotations

import re

from zoo.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def size_of(text: int | str) -> int:
    """Convert `1024`, `512MB` (decimal) or `4GiB` (binary) to bytes. Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,15})\s*([kmgt]i?)?b?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise InputError(f"{text!r} is no size in bytes; write a number, 512MB or 4GiB")
    return int(match[1]) * _UNITS[(match[2] or "").lower()]
