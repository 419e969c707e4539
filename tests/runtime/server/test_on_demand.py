"""Models that are served once a request names them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from runtime.frontend.served_models import StoredModel
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import Running, running

SPARE, GONE = StoredModel("org/spare", "org/base", 1_700_000_001), StoredModel("org/gone")


@pytest.fixture
def server(tokenizer: Tokenizer) -> Iterator[Running]:
    with running(tokenizer, on_demand=(SPARE, GONE)) as started:
        yield started


def test_they_are_listed_before_and_after(server: Running) -> None:
    with server.client() as client, server.http() as http:
        assert [model.id for model in client.models.list()] == ["org/base", "org/fine", "org/gone", "org/spare"]
        card = client.models.retrieve("org/spare")
        assert (card.created, card.parent, card.max_model_len) == (1_700_000_001, "org/base", None)
        client.completions.create(model="spare", prompt="hello", max_tokens=2)
        assert [model.id for model in client.models.list()] == ["org/base", "org/fine", "org/gone", "org/spare"]
        assert client.models.retrieve("org/spare").max_model_len == 256
        loaded = {row["name"] for row in http.get("/zoo/models").json()["models"] if row["loaded"]}
        assert loaded == {"org/base", "org/fine", "org/spare"}


def test_the_first_requests_wait_for_one_load(server: Running) -> None:
    with server.client() as client, ThreadPoolExecutor(6) as pool:
        ask = lambda _: client.chat.completions.create(  # noqa: E731
            model="org/spare", messages=[{"role": "user", "content": "hello"}], max_tokens=3
        )
        answers = list(pool.map(ask, range(6)))
    assert {answer.model for answer in answers} == {"org/spare"} and len(
        {a.choices[0].message.content for a in answers}
    ) == 1


def test_one_that_cannot_be_loaded_is_an_error_for_its_requests_only(server: Running) -> None:
    with server.client() as client:
        with pytest.raises(openai.APIStatusError) as failed:
            client.completions.create(model="org/gone", prompt="hello", max_tokens=2)
        assert failed.value.status_code < 500 and "org/gone" in str(failed.value)
        assert client.completions.create(model="org/fine", prompt="hello", max_tokens=2).choices


def test_an_unloaded_one_is_served_again_on_request(server: Running) -> None:
    with server.client() as client, server.http() as http:
        assert http.post("/zoo/models/org/spare/unload").status_code == 404
        client.completions.create(model="org/spare", prompt="hello", max_tokens=2)
        assert http.post("/zoo/models/org/spare/unload").json() == {"unloaded": "org/spare"}
        assert client.completions.create(model="org/spare", prompt="hello", max_tokens=2).choices
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="org/other", prompt="hello", max_tokens=2)
