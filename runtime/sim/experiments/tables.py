"""Make settings from tables of scenario files: unknown names and wrong values are refused, with the allowed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isnan
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec

from runtime.config import ControlConfig, OrderConfig, SpeculationConfig
from runtime.decode_config import DecodeConfig
from runtime.lending_config import LendingConfig
from runtime.role_config import RoleChangeConfig
from zoo.errors import InputError

Settings = TypeVar("Settings")
#: Tables inside a policy.
_PARTS: Mapping[str, type] = {
    "control": ControlConfig,
    "speculation": SpeculationConfig,
    "order": OrderConfig,
    "decode": DecodeConfig,
    "role_changes": RoleChangeConfig,
    "lending": LendingConfig,
}


def settings_of(kind: type[Settings], values: Any, where: str, base: Settings | None = None) -> Settings:
    """Make a dataclass from a table; `base` has the values that it does not name.

    Raises InputError for unknown names and wrong values.
    """
    table = table_of(values, where)
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := set(table) - names:
        raise InputError(f"{where} has no {sorted(unknown)[0]!r}; it has {', '.join(sorted(names))}")
    plain = {
        name: settings_of(_PARTS[name], value, name, getattr(base, name, None)) if name in _PARTS else value
        for name, value in table.items()
    }
    if bad := [name for name, value in plain.items() if isinstance(value, float) and isnan(value)]:
        raise InputError(f"{where}: {bad[0]} is no number")
    rest = {} if base is None else {name: getattr(base, name) for name in names - plain.keys()}
    try:
        return msgspec.convert({**rest, **plain}, kind)
    except ValueError as error:
        raise InputError(_worded(error, kind, where)) from None


def _worded(error: ValueError, kind: type, where: str) -> str:
    """Reword a msgspec error: `asked.kind: Invalid enum value 'x'; it is one of …`."""
    text, _, place = str(error).partition(" - at `$")
    name = place.strip(".`")
    known = get_args(get_type_hints(kind).get(name)) if text.startswith("Invalid enum") else ()
    return f"{where}{'.' if name else ''}{name}: {text}" + (f"; it is one of {', '.join(known)}" if known else "")


def table_of(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise InputError(f"{where} is a table")
    return values
