"""schemathesis on the server's own schema: requests made from it, right and wrong ones, are answered as it says.

The requests are the same in each run. There is a queue, a store, and a model of every name that a right body gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from cli.docs.http_page import served_routes
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.openai.openapi import openapi_document
from tests.runtime.server.harness import Running, running
from tests.runtime.server.page.looking import family

schemathesis = pytest.importorskip(
    "schemathesis", reason="THE SCHEMA IS NOT TESTED WITH REQUESTS MADE FROM IT: schemathesis is not installed"
)
from schemathesis import GenerationMode  # noqa: E402
from schemathesis.specs.openapi import checks  # noqa: E402

EXAMPLES = 8
CHECKS = [checks.content_type_conformance, checks.response_schema_conformance, checks.status_code_conformance]
#: A stream that goes on until its reader leaves.
ENDLESS = "GET /ui/live/events"
DOCUMENT = openapi_document(served_routes())
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {each.ok().label: each.ok() for each in SCHEMA.get_all_operations() if each.ok().label != ENDLESS}
#: Any text is right in a path, so only bodies and queries can be wrong.
ASKED = [
    (name, right) for name, each in OPERATIONS.items() for right in (True, False) if right or each.body or each.query
]


@pytest.fixture(scope="module")
def whole(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("schema")
    with (
        family(root / "store") as store,
        running(tokenizer, store=store, queue=str(root / "queue"), trace=True) as started,
    ):
        yield started


def test_the_schema_is_one(whole: Running) -> None:
    with whole.http() as http:
        assert http.get("/openapi.json").json() == DOCUMENT
    SCHEMA.validate()


@pytest.mark.parametrize(("name", "right"), ASKED, ids=[f"{name} {right}" for name, right in ASKED])
def test_answers_are_as_the_schema_says(whole: Running, name: str, right: bool) -> None:
    operation, mode = OPERATIONS[name], GenerationMode.POSITIVE if right else GenerationMode.NEGATIVE

    @settings(max_examples=EXAMPLES, derandomize=True, database=None, deadline=None, suppress_health_check=HealthCheck)
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        if right and isinstance(case.body, dict) and "model" in case.body:
            case.body["model"] = "org/base"
        answer = case.call(base_url=whole.address, timeout=20, allow_redirects=False)
        assert answer.status_code != 500, answer.text
        case.validate_response(answer, checks=CHECKS)

    ask()
