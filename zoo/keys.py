"""Make keys for a server's clients: a secret is shown once, and kept as a digest with what it may do."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from datetime import UTC, datetime

from blake3 import blake3

from zoo.catalog.names import check_name
from zoo.errors import InputError, NotFound
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
) -> str:
    """Make a key and return its secret, which is kept nowhere.

    Raises:
        InputError: A bad name or limit.
        NameTaken: A valid key has the name.
        NotFound: A model that is neither stored nor an alias.
    """
    check_name(name)
    for number in (requests_per_minute, tokens_per_day):
        if number is not None and not 0 < number < _NUMBER:
            raise InputError("the limits of a key are positive numbers")
    if abs(priority) >= 1 << 31 or len(models) > _MODELS:
        raise InputError(f"a key has a priority of 32 bits and at most {_MODELS} models")
    secret = f"zoo-{secrets.token_urlsafe(_BYTES)}"
    with store.catalog.writing() as writer:
        known = {*writer.names(), *(alias.name for alias in writer.aliases())}
        if missing := next((model for model in models if model not in known), None):
            raise NotFound(f"{missing[:200]!r} is no stored model and no alias")
        chosen = tuple(dict.fromkeys(models))
        now = datetime.now(UTC)
        writer.put_key(
            ClientKey(name, principal_of(secret), chosen, requests_per_minute, tokens_per_day, priority, now)
        )
    return secret
