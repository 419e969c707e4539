"""Make keys for a server's clients, and prices: a secret is shown once, and kept as a digest with what it may do."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from blake3 import blake3

from zoo.catalog.names import check_name
from zoo.errors import InputError, NotFound
from zoo.money import MOST_COST, ModelPrice
from zoo.records import ClientKey
from zoo.store import Store

_PRINCIPAL = "Block Zoo: owner of what is kept for a client"
#: Random bytes of a secret.
_BYTES = 32
#: Limits on what one key says.
_MODELS, _NUMBER = 1000, 1 << 40


def principal_of(secret: str) -> str:
    """Return what a client is called at rest: a digest of its key."""
    return blake3(secret.encode("utf-8", "surrogatepass"), derive_key_context=_PRINCIPAL).hexdigest()


def make_key(
    store: Store,
    name: str,
    models: Sequence[str] = (),
    requests_per_minute: int | None = None,
    tokens_per_day: int | None = None,
    priority: int = 0,
    money_per_day: int | None = None,
    tokens_per_month: int | None = None,
    money_per_month: int | None = None,
) -> str:
    """Make a key and return its secret, which is kept nowhere.

    Args:
        money_per_day, money_per_month: As a cost (`zoo.money`).

    Raises:
        InputError: A bad name or limit.
        NameTaken: A valid key has the name.
        NotFound: A model that is neither stored nor an alias.
    """
    check_name(name)
    for number in (requests_per_minute, tokens_per_day, tokens_per_month):
        if number is not None and not 0 < number < _NUMBER:
            raise InputError("the limits of a key are positive numbers")
    for money in (money_per_day, money_per_month):
        if money is not None and not 0 < money <= MOST_COST:
            raise InputError("the money of a day or month is more than 0")
    if abs(priority) >= 1 << 31 or len(models) > _MODELS:
        raise InputError(f"a key has a priority of 32 bits and at most {_MODELS} models")
    secret = f"zoo-{secrets.token_urlsafe(_BYTES)}"
    with store.catalog.writing() as writer:
        known = {*writer.names(), *(alias.name for alias in writer.aliases())}
        if missing := next((model for model in models if model not in known), None):
            raise NotFound(f"{missing[:200]!r} is no stored model and no alias")
        chosen = tuple(dict.fromkeys(models))
        now, owner = datetime.now(UTC), principal_of(secret)
        limits = (requests_per_minute, tokens_per_day, priority, now, None, money_per_day)
        writer.put_key(ClientKey(name, owner, chosen, *limits, tokens_per_month, money_per_month))
    return secret


def set_price(store: Store, model: str, prompt: int, generated: int, cached: int | None = None) -> ModelPrice:
    """Set what a million tokens of a model cost from now on; "": of models without a price of their own.

    `cached`: of prompt tokens that are not computed; None: as the rest of the prompt.

    Raises:
        NotFound: There is no model of this full name.
        InputError: It is an alias, which costs what the model costs that it stands for.
    """
    price = ModelPrice(model, prompt, generated, cached)
    with store.catalog.writing() as writer:
        if model and model not in writer.names():
            if writer.alias(model) is not None:
                raise InputError(f"{model[:200]!r} is an alias: give the models that it stands for a price")
            raise NotFound(f"{model[:200]!r} is no stored model; a price needs its full name")
        writer.put_price(price)
    return price
