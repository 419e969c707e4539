"""Set aliases from what a user types, and roll them back: `run@step-300`, or shares such as `a:90,b:10`.

The catalogue has the rules (`zoo.catalog.writer`); a running server follows the catalogue (`runtime.server.aliases`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zoo.catalog import Reader
from zoo.errors import InputError, InUse
from zoo.records import Alias, AliasAct, AliasTarget
from zoo.store import Store

#: Models that one alias may stand for.
MOST_TARGETS = 16


def set_alias(
    store: Store, name: str, wanted: str, act: AliasAct = "set", figures: Any = None, expected: int | None = None
) -> Alias:
    """Let an alias point to a model, or to several with shares that add up to 100.

    Args:
        wanted: A model's name or a unique ending of it, or `NAME:PERCENT,NAME:PERCENT`.
        figures: What this was decided by, kept in the history.
        expected: Number of the change that the decision was made on; 0: there was no alias.

    Raises:
        InUse: The alias has changed since `expected`.
        InputError, NameTaken, NotFound, AmbiguousName: As `Writer.set_alias`; also for shares that do not add up.
    """
    with store.catalog.writing() as writer:
        if expected is not None:
            found = writer.alias(name)
            if expected != (0 if found is None else found.now.id):
                raise InUse(f"alias {name!r} was changed meanwhile: nothing was done")
        return writer.set_alias(name, targets_of(writer, wanted), act, figures)


def roll_back(store: Store, name: str) -> Alias:
    """Let an alias point to what it pointed to before. Raises NotFound, InputError: as `Writer.roll_back`."""
    with store.catalog.writing() as writer:
        return writer.roll_back(name)


def targets_of(reader: Reader, wanted: str) -> tuple[AliasTarget, ...]:
    """Return the models that a text names, with their shares, by their full names. Raises as `set_alias`."""
    if wanted in reader.names():
        return (AliasTarget(wanted),)
    parts = [_part(part.strip()) for part in wanted.split(",")]
    if len(parts) > MOST_TARGETS:
        raise InputError(f"an alias may stand for {MOST_TARGETS} models at most")
    if len(parts) == 1 and parts[0][1] is None:
        return (AliasTarget(_resolved(reader, parts[0][0])),)
    shares = [share for _, share in parts]
    if any(share is None or share < 1 for share in shares) or sum(share or 0 for share in shares) != 100:
        raise InputError(f"shares are whole percents that add up to 100, such as a:90,b:10: not {wanted[:80]!r}")
    targets = tuple(AliasTarget(_resolved(reader, name), share or 0) for name, share in parts)
    _refuse_twice([target.model for target in targets])
    return targets


def _part(text: str) -> tuple[str, int | None]:
    name, colon, share = map(str.strip, text.rpartition(":"))
    if colon and share.isascii() and share.isdigit() and len(share) < 4:
        return name, int(share)
    return text, None


def _resolved(reader: Reader, name: str) -> str:
    if name not in reader.names() and reader.alias(name) is not None:
        raise InputError(f"{name!r} is an alias, and an alias may not point to another: name a model")
    return reader.resolve(name)


def _refuse_twice(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"{name!r} is named twice")
