"""`zoo alias`: let a name stand for a stored model, list such names, and show their history."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.shared.documents import targets_text
from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table
from zoo.errors import InputError, NotFound

if TYPE_CHECKING:
    from zoo.api import Zoo
    from zoo.records import Alias, AliasChange


def alias(
    name: Annotated[str | None, typer.Argument(help="The alias; none to list all.", show_default=False)] = None,
    target: Annotated[
        str | None,
        typer.Argument(help="The model, or shares in percent: a:90,b:10.", show_default=False),
    ] = None,
    delete: Annotated[bool, typer.Option("--delete", help="Delete the alias; the model stays.")] = False,
    history: Annotated[bool, typer.Option("--history", help="Show what it has pointed to, newest first.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a name stand for a stored model; servers of the store answer for it, and follow every change at once."""
    from zoo.api import Zoo

    if (target is not None) + delete + history > 1 or (name is None and (delete or history)):
        raise InputError("give a name with one of: a target, --delete, --history")
    with Zoo(store, database, create=False) as zoo:
        if name is None:
            _list(zoo.aliases(), as_json)
        elif target is not None:
            _show(zoo.set_alias(name, target), as_json)
        elif delete:
            zoo.delete_alias(name)
            print_json({"deleted": name}) if as_json else print(f"deleted alias {name}")
        elif history:
            _show_history(_changes(zoo, name), as_json)
        else:
            with zoo.store.catalog.reading() as reader:
                found = reader.alias(name)
            if found is None:
                raise NotFound(f"there is no alias {name[:80]!r}")
            _show(found, as_json)


def _changes(zoo: Zoo, name: str) -> Sequence[AliasChange]:
    with zoo.store.catalog.reading() as reader:
        changes = reader.alias_changes(name)
    if not changes:
        raise NotFound(f"there has been no alias {name[:80]!r}")
    return changes


def _show(found: Alias, as_json: bool) -> None:
    if as_json:
        print_json(found.document())
    else:
        print(f"{found.name} -> {targets_text(found.now)}")


def _list(found: Sequence[Alias], as_json: bool) -> None:
    if as_json:
        print_json({"aliases": [each.document() for each in found]})
    elif not found:
        print("no aliases: `zoo alias NAME MODEL` makes one")
    else:
        rows: list[tuple[Any, ...]] = [
            (each.name, targets_text(each.now), f"{each.now.created:%Y-%m-%d %H:%M:%S}", _before(each))
            for each in found
        ]
        print_table(("alias", "points to", "since (UTC)", "before"), rows)


def _show_history(changes: Sequence[AliasChange], as_json: bool) -> None:
    if as_json:
        print_json({"alias": changes[0].alias, "changes": [each.document() for each in changes]})
        return
    rows = [(f"{each.created:%Y-%m-%d %H:%M:%S}", each.act, targets_text(each), _figures(each)) for each in changes]
    print_table(("when (UTC)", "what", "points to", "since"), rows)


def _figures(change: AliasChange) -> str:
    """Return what a promotion was decided by, in short."""
    if change.act != "promote" or not isinstance(change.figures, list):
        return ""
    return ", ".join(f"{each['condition']}: {each['candidate']:.4f}" for each in change.figures)


def _before(found: Alias) -> str:
    return "" if found.before is None else targets_text(found.before)
