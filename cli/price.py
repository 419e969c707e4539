"""`zoo price`: set, list and remove what a million tokens of a model cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from cli.shared.output import DEFAULT_STORE, DatabaseOption, JsonOption, StoreOption, print_json, print_table
from zoo.errors import InputError, NotFound
from zoo.money import price_of, price_text

if TYPE_CHECKING:
    from zoo.money import ModelPrice

#: How the price of models without one of their own is listed.
_REST = "(all others)"


def price(
    model: Annotated[
        str | None, typer.Argument(help="The model's full name; none to list all prices.", show_default=False)
    ] = None,
    rest: Annotated[bool, typer.Option("--default", help="Of all models without a price of their own.")] = False,
    prompt: Annotated[
        str | None, typer.Option("--input", help="Set what a million prompt tokens cost: 0.15, at most 4 decimals.")
    ] = None,
    generated: Annotated[str | None, typer.Option("--output", help="Set what a million generated tokens cost.")] = None,
    cached: Annotated[
        str | None,
        typer.Option("--cached-input", help="Set what a million prompt tokens cost that a cache has; else as --input."),
    ] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the price.")] = False,
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prices of tokens, by which servers count what clients' keys cost (`zoo key`), from the next second on."""
    from zoo.api import Zoo
    from zoo.keys import set_price

    setting = prompt is not None or generated is not None or cached is not None
    named = model is not None or rest
    if (model is not None and rest) or (setting and (remove or not named)) or (remove and not named):
        raise InputError("give a model or --default, with --input and --output, or with --remove")
    if setting and (prompt is None or generated is None):
        raise InputError("a price has both --input and --output")
    with Zoo(store, database, create=False) as zoo:
        if prompt is not None and generated is not None:
            of_cached = None if cached is None else price_of(cached)
            found = [set_price(zoo.store, model or "", price_of(prompt), price_of(generated), of_cached)]
        elif remove:
            with zoo.store.catalog.writing() as writer:
                writer.drop_price(model or "")
            print_json({"removed": model}) if as_json else print(f"removed the price of {model or _REST}")
            return
        else:
            with zoo.store.catalog.reading() as reader:
                found = [each for each in reader.prices() if not named or each.model == (model or "")]
            if named and not found:
                raise NotFound(f"{(model or _REST)[:80]!r} has no price of its own")
        _show(found, as_json)


def _show(found: Sequence[ModelPrice], as_json: bool) -> None:
    if as_json:
        print_json({"prices": [_document(each) for each in found]})
    elif not found:
        print("no prices, everything is free: `zoo price MODEL --input X --output Y` sets one")
    else:
        rows = [
            (each.model or _REST, price_text(each.prompt), price_text(_cached(each)), price_text(each.generated))
            for each in found
        ]
        print_table(("model", "per million prompt tokens", "cached ones", "per million generated tokens"), rows)


def _document(price: ModelPrice) -> dict[str, str | None]:
    return {
        "model": price.model or None,
        "input": price_text(price.prompt),
        "cached_input": price_text(_cached(price)),
        "output": price_text(price.generated),
    }


def _cached(price: ModelPrice) -> int:
    return price.prompt if price.cached is None else price.cached
