"""Declare options once, as fields of a frozen dataclass; help, group and choices are the field's metadata.

The parameters of a command (`takes_options`), the checks of a configuration file (`read_options`) and the documentation
are made from these fields.
"""

from __future__ import annotations

import functools
import inspect
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import typer

from cli.shared.renamed import refuse_renamed_key
from zoo.errors import InputError

_KEY = "option"
Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class Declared:
    """The metadata of an option's field.

    Fields:
        needs: Names of conditions without which the option has no effect.
        choices: All allowed values; empty: any value of the field's type.
        shown: The default as shown in help; None: the default itself.
        table: Whether the value is a table of a configuration file (a dataclass of plain values), without a flag.
        without: Fields of a table's dataclass that other options set.
    """

    help: str
    group: str
    needs: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    shown: str | None = None
    envvar: str | None = None
    table: bool = False
    without: tuple[str, ...] = ()


def option(
    default: Any, help: str, *, group: str, needs: Sequence[str] = (), choices: Sequence[str] = (),
    shown: str | None = None, envvar: str | None = None,
) -> Any:  # fmt: skip
    """Declare a field of an options dataclass."""
    return field(default=default, metadata={_KEY: Declared(help, group, tuple(needs), tuple(choices), shown, envvar)})


def table_option(
    kind: type[Any], help: str, *, group: str, needs: Sequence[str] = (), without: Sequence[str] = ()
) -> Any:
    """Declare a table of the configuration file: a frozen dataclass of plain values, each with a default."""
    said = Declared(help, group, tuple(needs), table=True, without=tuple(without))
    return field(default_factory=kind, metadata={_KEY: said})


def keys_of(each: Field[Any], kind: type[Any]) -> list[Field[Any]]:
    """Return the fields that a configuration file can set in a table of this dataclass."""
    return [one for one in fields(kind) if one.name not in declared(each).without]


def declared(each: Field[Any]) -> Declared:
    """Return the option's metadata of a field."""
    found: Declared = each.metadata[_KEY]
    return found


def flag_of(name: str) -> str:
    """Return the command-line flag of a field's name."""
    return "--" + name.replace("_", "-")


# -- command line --------------------------------------------------------------------------------------------------


def takes_options(
    kind: type[Any], *only: str, needs: Mapping[str, str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a command so that it takes a dataclass's options, or `only` those named, as keyword arguments.

    An option that is not given is None. `needs` has the help text of each condition.
    """
    chosen = [each for each in fields(kind) if each.name in only or not (only or declared(each).table)]
    if missing := set(only) - {each.name for each in chosen}:
        raise ValueError(f"{kind.__name__} has no {min(missing)}")

    def add(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not inspect.Parameter.VAR_KEYWORD]
        named = {each.name for each in own}
        made = [_parameter(kind, each, needs or {}) for each in chosen if each.name not in named]

        @functools.wraps(command)
        def called(**given: Any) -> None:
            command(**given)

        parameters = [*(each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in own), *made]
        called.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        return called

    return add


def help_of(each: Field[Any], needs: Mapping[str, str]) -> str:
    """Return an option's help text with its conditions."""
    said = declared(each)
    conditions = [needs[name] for name in said.needs if name in needs]
    return said.help + (f" Needs {' and '.join(conditions)}." if conditions else "")


def default_of(each: Field[Any]) -> str | bool:
    """Return an option's default as shown in help; False for none."""
    said = declared(each)
    if said.shown is not None:
        return said.shown
    return False if each.default is None or each.default is False or each.default == () else str(each.default)


def _parameter(kind: type[Any], each: Field[Any], needs: Mapping[str, str]) -> inspect.Parameter:
    said, allowed = declared(each), _allowed(get_type_hints(kind)[each.name])
    taken: Any = list[str] if allowed == (tuple,) else str if str in allowed else allowed[0]
    info = typer.Option(
        flag_of(each.name), help=help_of(each, needs), show_default=default_of(each), rich_help_panel=said.group,
        envvar=said.envvar, metavar="|".join(said.choices) or ("SIZE" if set(allowed) == {int, str} else None),
    )  # fmt: skip
    return inspect.Parameter(
        each.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[taken | None, info]
    )


# -- files and values ----------------------------------------------------------------------------------------------


def read_options(kind: type[Options], file: Path | None, given: Mapping[str, Any]) -> Options:
    """Return options from defaults, then a TOML or JSON file, then the command line (None: not given).

    Raises InputError.
    """
    made = kind()
    for source, values in ((str(file), _read(file) if file else {}), ("command line", given)):
        present = {key: value for key, value in values.items() if value is not None}
        made = replace(made, **_checked(kind, source, present))  # type: ignore[type-var]
    return made


def changed_options(options: Any) -> list[Field[Any]]:
    """Return the fields with values other than their defaults."""
    return [each for each in fields(options) if getattr(options, each.name) != _initial_value(each)]


def _initial_value(each: Field[Any]) -> Any:
    return each.default if each.default_factory is MISSING else each.default_factory()


def check_choices(options: Any) -> None:
    """Raise InputError for the first value outside its option's choices."""
    for each in fields(options):
        choices, value = declared(each).choices, getattr(options, each.name)
        if choices and value is not None and value not in choices:
            listed = f"{', '.join(choices[:-1])} or {choices[-1]}"
            raise InputError(f"{flag_of(each.name)} must be {listed}, not {value!r}")


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is neither TOML nor JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no table of options")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _checked(kind: type[Any], source: str, values: dict[str, Any]) -> dict[str, Any]:
    types = get_type_hints(kind)
    for key in sorted(set(values) - set(types)):
        refuse_renamed_key(source, key, types)
        raise InputError(f"{source}: unknown option {key!r}; known are {', '.join(types)}")
    tables = {each.name: each for each in fields(kind) if declared(each).table}
    return {
        key: _table_of(source, tables[key], types[key], value)
        if key in tables
        else _typed(source, key, types[key], value)
        for key, value in values.items()
    }


def _table_of(source: str, each: Field[Any], kind: type[Any], values: Any) -> Any:
    """Return a table's dataclass with the file's values. Raises InputError."""
    known, types = [one.name for one in keys_of(each, kind)], get_type_hints(kind)
    if not isinstance(values, dict):
        raise InputError(f"{source}: {each.name} must be a table of {', '.join(known)}")
    for key in sorted(set(values) - set(known)):
        raise InputError(f"{source}: unknown key {key!r} in [{each.name}]; known are {', '.join(known)}")
    given = {key: _typed(source, f"{each.name}.{key}", types[key], value) for key, value in values.items()}
    try:
        return kind(**given)
    except ValueError as error:
        raise InputError(f"{source}: [{each.name}]: {error}") from None


def _typed(source: str, key: str, kind: Any, value: Any) -> Any:
    allowed = _allowed(kind)
    if allowed == (tuple,):
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise InputError(f"{source}: {key} must be a list of names")
    if float in allowed:
        allowed += (int,)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, allowed):
        raise InputError(f"{source}: {key} must be {' or '.join(one.__name__ for one in allowed)}, not {value!r}")
    return value


def _allowed(kind: Any) -> tuple[type, ...]:
    """Return the plain types of a field's annotation, without None."""
    if get_origin(kind) is tuple:
        return (tuple,)
    if get_origin(kind) is Literal:
        return (str,)
    return tuple(one for one in get_args(kind) if one is not type(None)) if get_origin(kind) is UnionType else (kind,)
