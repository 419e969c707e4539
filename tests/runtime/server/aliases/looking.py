"""A server that follows the aliases of a store, and what it shows of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, eventually, running
from tests.runtime.server.page.looking import made
from tests.zoo.factory import ingest
from zoo.aliases import set_alias
from zoo.store import Store


@contextmanager
def stored(root: Path) -> Iterator[Store]:
    """A store of the three models that the harness knows; the server serves two of them."""
    with Store.open(root) as store:
        ingest(store, "org/base", [1, 2])
        made(store, "org/fine", [1, 3], "full", "org/base")
        made(store, "org/spare", [1, 4], "full", "org/base")
        yield store


@contextmanager
def following(tokenizer: Tokenizer, root: Path, first: str = "", **options: Any) -> Iterator[tuple[Running, Store]]:
    """A server of such a store; its alias `prod` points to `first`."""
    with stored(root) as store:
        if first:
            set_alias(store, "prod", first)
        with running(tokenizer, store=store, **options) as server:
            yield server, store


def shown(http: httpx.Client, name: str = "prod") -> dict[str, Any]:
    """Return what the server says of an alias."""
    return next((dict(row) for row in http.get("/zoo/aliases").json()["aliases"] if row["name"] == name), {})


def points_to(http: httpx.Client, models: Sequence[str], name: str = "prod", seconds: float = 5.0) -> bool:
    """Return whether an alias comes to point to these models, with nothing left to wait for."""

    def pointing() -> bool:
        row = shown(http, name)
        found = [target["model"] for target in row.get("targets") or ()]
        return found == list(models) and row["wanted"] is None

    return eventually(pointing, seconds)
