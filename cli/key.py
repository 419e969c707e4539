"""`zoo key`: make keys for a server's clients, list them with what they use, and revoke them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table
from zoo.errors import InputError, NotFound
from zoo.money import amount_of, cost_text
from zoo.records import KeyUsage, usage_by_key

if TYPE_CHECKING:
    from zoo.records import ClientKey
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
    money_per_day: Annotated[
        str | None,
        typer.Option(help="With --create: most money of a day (UTC) by the prices of `zoo price`, such as 2.50."),
    ] = None,
    tokens_per_month: Annotated[
        int | None, typer.Option(help="With --create: most prompt and generated tokens of a calendar month (UTC).")
    ] = None,
    money_per_month: Annotated[
        str | None, typer.Option(help="With --create: most money of a calendar month (UTC) by these prices.")
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

    limits = bool(model) or priority != 0
    budgets = (tokens_per_day, money_per_day, tokens_per_month, money_per_month)
    limits = limits or any(each is not None for each in (requests_per_minute, *budgets))
    if create + revoke > 1 or (name is None and (create or revoke)) or (limits and not create):
        raise InputError("give a name with --create, and there its limits, or with --revoke")
    with Zoo(store, database, create=False) as zoo:
        if name is None:
            _list(zoo.store, as_json)
        elif create:
            secret = make_key(
                zoo.store, name, model or (), requests_per_minute, tokens_per_day, priority, _amount(money_per_day),
                tokens_per_month, _amount(money_per_month),
            )  # fmt: skip
            print_json({"name": name, "key": secret}) if as_json else print(secret)
        elif revoke:
            with zoo.store.catalog.writing() as writer:
                writer.revoke_key(name)
            print_json({"revoked": name}) if as_json else print(f"revoked key {name}")
        else:
            _show(zoo.store, name, as_json)


def _amount(text: str | None) -> int | None:
    return None if text is None else amount_of(text)


def _read(store: Store, since: date) -> tuple[Sequence[ClientKey], Sequence[KeyUsage]]:
    with store.catalog.reading() as reader:
        return reader.keys(), reader.key_usage(since.isoformat())


def _list(store: Store, as_json: bool) -> None:
    today = datetime.now(UTC).date()
    keys, month = _read(store, today.replace(day=1))
    usage = [each for each in month if each.day == str(today)]
    if as_json:
        of_key = {each.name: list[KeyUsage]() for each in keys}
        for used in month:
            of_key.setdefault(used.name, []).append(used)
        print_json({"keys": [_document(each, of_key[each.name], today, today) for each in keys]})
    elif not keys:
        print("no keys: `zoo key NAME --create` makes one")
    else:
        days, months = usage_by_key(usage), usage_by_key(month)
        rows = [
            _line(each, *(used.get(each.name, KeyUsage(each.name, "")) for used in (days, months))) for each in keys
        ]
        told = [at for at, title in enumerate(_TITLES) if title in _ALWAYS or any(row[at] != "" for row in rows)]
        print_table([_TITLES[at] for at in told], [[row[at] for at in told] for row in rows])


_TITLES = (
    "key", "models", "requests/min", "tokens/day", "money/day", "tokens/month", "money/month", "priority",
    "tokens today", "cost today", "tokens this month", "cost this month", "revoked (UTC)",
)  # fmt: skip
#: Columns of the list of keys that are there in any case; of the rest, those that say something of some key.
_ALWAYS = ("key", "models", "priority", "tokens today", "cost today")


def _line(key: ClientKey, day: KeyUsage, month: KeyUsage) -> tuple[object, ...]:
    monthly = key.tokens_per_month is not None or key.money_per_month is not None
    return (
        key.name,
        ", ".join(key.models) or "all",
        _limit(key.requests_per_minute),
        _limit(key.tokens_per_day),
        _money(key.money_per_day) or "",
        _limit(key.tokens_per_month),
        _money(key.money_per_month) or "",
        key.priority,
        day.tokens,
        _cost(day),
        month.tokens if monthly else "",
        _cost(month) if monthly else "",
        "" if key.revoked is None else f"{key.revoked:%Y-%m-%d %H:%M:%S}",
    )


def _show(store: Store, name: str, as_json: bool) -> None:
    today = datetime.now(UTC).date()
    since = today - timedelta(days=_DAYS)  # this month is in it
    keys, usage = _read(store, since)
    found = [each for each in keys if each.name == name]
    if not found:
        raise NotFound(f"there is no key {name[:80]!r}")
    days = [each for each in usage if each.name == name]
    if as_json:
        print_json(_document(found[-1], days, today, since))
        return
    rows: list[tuple[object, ...]] = []
    for day, models in _by_day(days):
        (whole,) = usage_by_key(models).values()
        rows.append((day, "all", f"{whole.requests:,}", *_counts(whole)))
        rows += [("", each.model, "", *_counts(each)) for each in models if each.model]
    tokens = ("prompt tokens", "cached ones", "generated tokens")
    print_table(("day (UTC)", "model", "requests", "answers", *tokens, "cost"), rows)


def _document(found: ClientKey, days: Sequence[KeyUsage], today: date, since: date) -> dict[str, Any]:
    """Return a key with its usage: of this month, and by day from `since` on."""
    (month,) = usage_by_key([KeyUsage(found.name, f"{today:%Y-%m}"), *_of_month(days, today)]).values()
    return {
        "name": found.name,
        "models": list(found.models),
        "requests_per_minute": found.requests_per_minute,
        "tokens_per_day": found.tokens_per_day,
        "money_per_day": _money(found.money_per_day),
        "tokens_per_month": found.tokens_per_month,
        "money_per_month": _money(found.money_per_month),
        "priority": found.priority,
        "created": found.created.isoformat(),
        "revoked": None if found.revoked is None else found.revoked.isoformat(),
        "this_month": {"month": month.day, "requests": month.requests, **_counts_document(month)},
        "usage": [_day_document(day, models) for day, models in _by_day(days) if day >= str(since)],
    }


def _of_month(days: Sequence[KeyUsage], today: date) -> list[KeyUsage]:
    return [each for each in days if each.day >= str(today.replace(day=1))]


def _day_document(day: str, models: Sequence[KeyUsage]) -> dict[str, Any]:
    (whole,) = usage_by_key(models).values()
    by_model = [{"model": each.model, **_counts_document(each)} for each in models if each.model]
    return {"day": day, "requests": whole.requests, **_counts_document(whole), "models": by_model}


def _counts_document(used: KeyUsage) -> dict[str, Any]:
    return {
        "answers": used.answers,
        "prompt_tokens": used.prompt_tokens,
        "cached_tokens": used.cached_tokens,
        "generated_tokens": used.generated_tokens,
        "cost": cost_text(used.cost),
    }


def _by_day(usage: Sequence[KeyUsage]) -> list[tuple[str, list[KeyUsage]]]:
    """Return the usage of one key by its days, which are in order."""
    return [(day, list(models)) for day, models in groupby(usage, key=lambda each: each.day)]


def _counts(used: KeyUsage) -> tuple[object, ...]:
    return (used.answers, used.prompt_tokens, used.cached_tokens, used.generated_tokens, _cost(used))


def _cost(used: KeyUsage) -> str:
    """Return what usage cost; tokens that cost nothing had no price."""
    return "free" if used.tokens and not used.cost else cost_text(used.cost)


def _money(cost: int | None) -> str | None:
    return None if cost is None else cost_text(cost)


def _limit(number: int | None) -> str:
    return "" if number is None else f"{number:,}"
