"""`zoo key`: make keys for a server's clients, list them with what they use, and revoke them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table
from zoo.errors import InputError, NotFound

if TYPE_CHECKING:
    from zoo.records import ClientKey, KeyUsage
    from zoo.store import Store

#: Days of usage that are shown for one key.
_DAYS = 30


def key(
    name: Annotated[str | None, typer.Argument(help="The key's name; none to list all.", show_default=False)] = None,
    create: Annotated[
        bool, typer.Option("--create", help="Make it, and print its secret: once, it is not kept.")
    ] = False,
    revoke: Annotated[bool, typer.Option("--revoke", help="End it. Servers refuse it a second later.")] = False,
    model: Annotated[
        list[str] | None,
        typer.Option(help="With --create: a model or alias that it may name, in full; repeat it. None: all."),
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(help="With --create: most requests in a minute.")] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(help="With --create: most prompt and generated tokens of a day (UTC).")
    ] = None,
    priority: Annotated[
        int,
        typer.Option(help="With --create: its requests' most urgent priority, and their usual one; lower goes first."),
    ] = 0,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Keys of a server's clients (`zoo serve --client-keys`): make, list and revoke them, and see what they use."""
    from zoo.api import Zoo
    from zoo.keys import make_key

    limits = bool(model) or requests_per_minute is not None or tokens_per_day is not None or priority != 0
    if create + revoke > 1 or (name is None and (create or revoke)) or (limits and not create):
        raise InputError("give a name with --create, and there its limits, or with --revoke")
    with Zoo(store, database, create=False) as zoo:
        if name is None:
            _list(zoo.store, as_json)
        elif create:
            secret = make_key(zoo.store, name, model or (), requests_per_minute, tokens_per_day, priority)
            print_json({"name": name, "key": secret}) if as_json else print(secret)
        elif revoke:
            with zoo.store.catalog.writing() as writer:
                writer.revoke_key(name)
            print_json({"revoked": name}) if as_json else print(f"revoked key {name}")
        else:
            _show(zoo.store, name, as_json)


def _read(store: Store, since: date) -> tuple[Sequence[ClientKey], Sequence[KeyUsage]]:
    with store.catalog.reading() as reader:
        return reader.keys(), reader.key_usage(since.isoformat())


def _list(store: Store, as_json: bool) -> None:
    keys, usage = _read(store, datetime.now(UTC).date())
    used = {each.name: each for each in usage}
    if as_json:
        print_json({"keys": [_document(each, [used[each.name]] if each.name in used else []) for each in keys]})
    elif not keys:
        print("no keys: `zoo key NAME --create` makes one")
    else:
        rows = [
            (
                each.name,
                ", ".join(each.models) or "all",
                _limit(each.requests_per_minute),
                _limit(each.tokens_per_day),
                each.priority,
                used[each.name].tokens if each.name in used else 0,
                "" if each.revoked is None else f"{each.revoked:%Y-%m-%d %H:%M:%S}",
            )
            for each in keys
        ]
        heads = ("key", "models", "requests/min", "tokens/day", "priority", "tokens today", "revoked (UTC)")
        print_table(heads, rows)


def _show(store: Store, name: str, as_json: bool) -> None:
    keys, usage = _read(store, datetime.now(UTC).date() - timedelta(days=_DAYS))
    found = [each for each in keys if each.name == name]
    if not found:
        raise NotFound(f"there is no key {name[:80]!r}")
    days = [each for each in usage if each.name == name]
    if as_json:
        print_json(_document(found[-1], days))
        return
    rows = [(each.day, each.requests, each.prompt_tokens, each.generated_tokens) for each in days]
    print_table(("day (UTC)", "requests", "prompt tokens", "generated tokens"), rows)


def _document(found: ClientKey, days: Sequence[KeyUsage]) -> dict[str, Any]:
    return {
        "name": found.name,
        "models": list(found.models),
        "requests_per_minute": found.requests_per_minute,
        "tokens_per_day": found.tokens_per_day,
        "priority": found.priority,
        "created": found.created.isoformat(),
        "revoked": None if found.revoked is None else found.revoked.isoformat(),
        "usage": [
            {
                "day": each.day,
                "requests": each.requests,
                "prompt_tokens": each.prompt_tokens,
                "generated_tokens": each.generated_tokens,
            }
            for each in days
        ],
    }


def _limit(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
