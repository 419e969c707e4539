"""A server with a store, shared by the tests that leave both unchanged."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, running
from tests.runtime.server.page.looking import family
from zoo.store import Store


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with family(tmp_path_factory.mktemp("page") / "store") as store:
        yield store


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, stored: Store) -> Iterator[Running]:
    with running(tokenizer, store=stored) as started:
        yield started


@pytest.fixture(scope="module")
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client
