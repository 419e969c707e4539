"""Both kinds of tokenizer behind the adapter."""

from __future__ import annotations

import pytest

from runtime.frontend.tokenizer import Tokenizer, adapt
from tests.runtime.frontend.samples import byte_level, sentence_piece


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return adapt(byte_level(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="session", params=["byte-level", "sentence-piece"])
def tokenizer(request: pytest.FixtureRequest, byte_tokenizer: Tokenizer) -> Tokenizer:
    return adapt(sentence_piece()) if request.param == "sentence-piece" else byte_tokenizer
