"""An answer that its grammar's limits end is an error, not an answer: here from an engine that knows no grammars."""

from __future__ import annotations

import pytest

from runtime.frontend.tokenizer import Tokenizer
from runtime.types import ModelSpec
from tests.runtime.server.harness import running

#: The engine of these tests ends every answer of this model by its first token: all tokens are ends.
ENDING = ModelSpec("org/ending", 2, 16, 256, 320, eos_token_ids=tuple(range(320)), blocks=("shared", "own"))


@pytest.mark.parametrize("stream", [False, True])
def test_an_end_that_the_grammar_does_not_accept_is_an_error(tokenizer: Tokenizer, stream: bool) -> None:
    body = {"model": "org/ending", "prompt": "hi", "max_tokens": 9, "stream": stream}
    with running(tokenizer, specs=(ENDING,), known=(ENDING,)) as server, server.http() as http:
        plain = http.post("/v1/completions", json=body)
        assert plain.status_code == 200 and '"stop"' in plain.text
        bound = http.post("/v1/completions", json={**body, "guided_choice": ["yes", "no"]})
        assert "not complete" in bound.text and '"stop"' not in bound.text
        assert bound.status_code == 400 and '"grammar_limits"' in bound.text
        assert http.post("/v1/completions", json={**body, "guided_regex": "(yes)?"}).status_code == 200
