"""One server shared by the tests that leave it unchanged."""

from __future__ import annotations

import time
from collections.abc import Iterator

import openai
import pytest

from runtime.frontend.tokenizer import Tokenizer, adapt
from tests.runtime.frontend.samples import byte_level
from tests.runtime.server.harness import Running, running


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return adapt(byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module", params=[1, 4])
def credit(request: pytest.FixtureRequest) -> int:
    """Tokens that a device may decode before it reports; clients see no difference."""
    return int(request.param)


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, credit: int) -> Iterator[Running]:
    # A millisecond per step, so that streams come in pieces.
    with running(tokenizer, trace=True, pace=lambda _: time.sleep(0.001), credit=credit) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made
