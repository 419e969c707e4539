"""Batches through OpenAI's client: from file to results, refusals, cancelling, expiry, lists."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from sqlalchemy import Connection

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.queueing import requests
from runtime.queueing.records import DurableRequest
from runtime.server.durable.runs import DurableRuns
from tests.runtime.server.batches.asking import content_of, ended, line, lines_of, results, submit
from tests.runtime.server.harness import Running, eventually, running
from zoo.errors import StoreError


@pytest.fixture(scope="module")
def queue(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("queue") / "q")


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, queue: str) -> Iterator[Running]:
    with running(tokenizer, config=ServerConfig(max_num_seqs=6), pages=4096, queue=queue) as started:
        yield started


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as made:
        yield made


@pytest.fixture
def slow(tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Running]:
    """A server on which a step takes 20 ms."""
    config = ServerConfig(max_num_seqs=2)
    with running(tokenizer, config=config, queue=str(tmp_path / "q"), pace=lambda _: time.sleep(0.02)) as started:
        yield started


def test_a_batch_gives_what_its_lines_alone_give(client: openai.OpenAI, queue: str) -> None:
    lines = [line(number) for number in range(40)]
    made = submit(client, lines, "30m", metadata={"for": "test"})
    assert (made.status, made.object, made.endpoint) == ("validating", "batch", "/v1/completions")
    done = ended(client, made.id)
    assert (done.status, done.metadata, done.error_file_id) == ("completed", {"for": "test"}, None)
    assert done.request_counts is not None and done.request_counts.to_dict() == {
        "total": 40, "completed": 40, "failed": 0,
    }  # fmt: skip
    assert done.expires_at is not None and done.expires_at - done.created_at == 1800
    assert done.in_progress_at and done.finalizing_at and done.completed_at and not done.failed_at
    found = results(client, done.output_file_id)
    assert [each["custom_id"] for each in found] == [f"line-{number}" for number in range(40)]
    for each, asked in zip(found, lines, strict=True):
        alone = client.completions.create(**asked["body"])
        body = each["response"]["body"]
        assert each["response"]["status_code"] == 200 and each["error"] is None
        assert body["choices"] == [choice.to_dict() for choice in alone.choices]
        assert body["usage"] == alone.usage.to_dict() and body["id"] == each["response"]["request_id"]
    assert len({each["id"] for each in found}) == 40
    assert eventually(lambda: not lines_of(queue, made.id), 30), "answers are in the file only"


def test_lines_of_responses_and_embeddings_give_what_they_give_alone(server: Running, client: openai.OpenAI) -> None:
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v1/responses": [{"model": "org/base", "input": text, "max_output_tokens": 5} for text in ("hi", "ab " * 400)],
        "/v1/embeddings": [{"model": "org/base", "input": given} for given in ([[5, 7], [9]], [320])],
    }
    for url, (good, long) in bodies.items():
        lines = [
            {"custom_id": str(number), "method": "POST", "url": url, "body": body}
            for number, body in enumerate((good, long))
        ]
        done = ended(client, submit(client, lines, endpoint=url).id)
        (found,), (failed,) = results(client, done.output_file_id), results(client, done.error_file_id)
        with server.http() as http:
            alone = http.post(url, json={**good, "store": False}).raise_for_status().json()
            shown = http.get(f"/v1/responses/{found['response']['request_id']}")
        same = ("output", "usage", "data", "object", "store")
        body = found["response"]["body"]
        assert {name: _nameless(body.get(name)) for name in same} == {name: _nameless(alone.get(name)) for name in same}
        assert failed["response"]["status_code"] == 400 and failed["response"]["body"]["error"]["param"] == "input"
        assert shown.status_code == 404


def _nameless(value: Any) -> Any:
    return [{**each, "id": ""} for each in value] if isinstance(value, list) else value


@pytest.mark.parametrize(
    "more", [{"store": True}, {"previous_response_id": "resp_1"}, {"stream": True}, {"background": True}]
)
def test_a_line_is_no_kept_response(client: openai.OpenAI, more: dict[str, Any]) -> None:
    body = {"model": "org/base", "input": "hi", **more}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/responses", "body": body}]
    done = ended(client, submit(client, lines, endpoint="/v1/responses").id)
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert done.errors.data[0].param == f"body.{next(iter(more))}"


def test_lines_that_fail_are_in_the_error_file(client: openai.OpenAI) -> None:
    lines = [line(0), line(1, max_tokens=5000), line(2), line(3, prompt=[])]
    done = ended(client, submit(client, lines).id)
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (2, 2)
    assert [each["custom_id"] for each in results(client, done.output_file_id)] == ["line-0", "line-2"]
    failed = results(client, done.error_file_id)
    assert [(each["custom_id"], each["response"]["status_code"]) for each in failed] == [
        ("line-1", 400),
        ("line-3", 400),
    ]
    assert failed[0]["response"]["body"]["error"]["code"] == "context_length_exceeded"


def test_chat_lines(client: openai.OpenAI) -> None:
    body = {"model": "fine", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "seed": 5}
    chat = {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions", "body": body}
    done = ended(client, submit(client, [chat], endpoint="/v1/chat/completions").id)
    (found,) = results(client, done.output_file_id)
    alone = client.chat.completions.create(**body)  # type: ignore[call-overload]
    assert found["response"]["body"]["choices"] == [choice.to_dict() for choice in alone.choices]
    assert found["response"]["body"]["id"].startswith("chatcmpl-")


def test_one_wrong_line_refuses_the_batch(client: openai.OpenAI, queue: str) -> None:
    done = ended(client, submit(client, [line(0), line(1, model="nothing"), line(2), line(2)]).id)
    assert (done.status, done.output_file_id, done.error_file_id) == ("failed", None, None)
    assert done.errors is not None and done.errors.data is not None and done.failed_at
    assert [(each.line, each.code, each.param) for each in done.errors.data] == [
        (2, "model_not_found", "model"),
        (4, "duplicate_custom_id", "custom_id"),
    ]
    assert not lines_of(queue, done.id)


@pytest.mark.parametrize(
    ("order", "status", "code"),
    [
        ({"window": "24"}, 400, "invalid_completion_window"),
        ({"window": "0m"}, 400, "invalid_completion_window"),
        ({"window": "31d"}, 400, "invalid_completion_window"),
        ({"endpoint": "/v1/messages"}, 400, "invalid_endpoint"),
        ({"metadata": {"k": "v" * 513}}, 400, None),
    ],
)
def test_orders_that_are_refused(client: openai.OpenAI, order: dict[str, Any], status: int, code: str | None) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        submit(client, [line(0)], **order)
    assert (refused.value.status_code, refused.value.code) == (status, code)


def test_unknown_files_and_batches(client: openai.OpenAI) -> None:
    for act in (
        lambda: client.files.retrieve("file-none"),
        lambda: client.files.content("file-none"),
        lambda: client.files.delete("file-none"),
        lambda: client.batches.retrieve("batch_none"),
        lambda: client.batches.cancel("batch_none"),
        lambda: client.batches.create(input_file_id="f", endpoint="/v1/completions", completion_window="24h"),
    ):
        with pytest.raises(openai.NotFoundError):
            act()


def test_files_and_their_lists(client: openai.OpenAI) -> None:
    content = content_of(line(number) for number in range(3))
    made = [client.files.create(file=(f"{number}.jsonl", content), purpose="batch") for number in range(3)]
    assert [each.filename for each in made] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert made[0].bytes == len(content) and made[0].status == "processed" and made[0].purpose == "batch"
    assert client.files.retrieve(made[1].id) == made[1]
    assert client.files.content(made[1].id).content == content
    latest = client.files.list(limit=2)
    assert [each.id for each in latest.data] == [made[2].id, made[1].id] and latest.has_more
    assert made[0].id in [each.id for each in client.files.list(limit=50, after=made[1].id).data]
    assert client.files.delete(made[1].id).deleted
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve(made[1].id)


def test_the_same_key_is_the_same_batch(client: openai.OpenAI) -> None:
    file = client.files.create(file=("in.jsonl", content_of([line(0)])), purpose="batch")
    order: Any = {"input_file_id": file.id, "endpoint": "/v1/completions", "extra_headers": {"Idempotency-Key": "k"}}
    first = client.batches.create(completion_window="24h", **order)
    assert client.batches.create(completion_window="24h", **order).id == first.id
    with pytest.raises(openai.UnprocessableEntityError):
        client.batches.create(completion_window="1h", **order)  # type: ignore[arg-type]
    assert [each.id for each in client.batches.list(limit=1).data] == [first.id]
    ended(client, first.id)


def test_cancelling_keeps_what_is_answered(slow: Running) -> None:
    with slow.client() as client:
        batch = submit(client, [line(0), *(line(number, max_tokens=200) for number in range(1, 9))]).id
        assert eventually(lambda: counted(client, batch) >= 1, 30)
        held = client.batches.retrieve(batch).input_file_id
        with pytest.raises(openai.ConflictError):
            client.files.delete(held)
        assert client.batches.cancel(batch).status in ("cancelling", "cancelled")
        done = ended(client, batch)
        assert done.status == "cancelled" and done.cancelling_at and done.cancelled_at
        answered, missing = results(client, done.output_file_id), results(client, done.error_file_id)
        names = [[int(each["custom_id"][5:]) for each in found] for found in (answered, missing)]
        assert all(names) and names == list(map(sorted, names)) and sorted([*names[0], *names[1]]) == list(range(9))
        assert {each["error"]["code"] for each in missing} == {"batch_cancelled"}
        assert {each["response"] for each in missing} == {None}
        with pytest.raises(openai.ConflictError):
            submit_again = submit(client, [line(0)]).id
            ended(client, submit_again)
            client.batches.cancel(submit_again)
        client.files.delete(held)
    assert eventually(lambda: slow.state()["running"] == 0 and slow.state()["waiting"] == 0, 30)


def test_expiry_ends_what_is_under_way(slow: Running) -> None:
    with slow.client() as client:
        lines = [line(0, max_tokens=1), *(line(number, max_tokens=250) for number in range(1, 9))]
        done = ended(client, submit(client, lines, "4s").id)
        assert done.status == "expired" and done.expired_at
        answered = [each["custom_id"] for each in results(client, done.output_file_id)]
        missing = results(client, done.error_file_id)
        assert len(answered) + len(missing) == 9 and missing
        assert {each["error"]["code"] for each in missing} == {"batch_expired"}
    assert eventually(lambda: slow.state()["running"] == 0 and slow.state()["waiting"] == 0, 30)


def test_a_defect_fails_its_line_and_a_lost_claim_nothing(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, claim, claims = DurableRuns.run, requests.claim, iter((True, False))

    async def failing(self: DurableRuns, request: DurableRequest, *given: Any) -> None:
        if request.line == 3:
            raise RuntimeError("a defect")
        await run(self, request, *given)

    def lost(connection: Connection, **given: Any) -> list[DurableRequest]:
        found = claim(connection, **given)
        if found and not next(claims, True):
            raise StoreError("the disk is full")
        return found

    monkeypatch.setattr(DurableRuns, "run", failing)
    monkeypatch.setattr(requests, "claim", lost)
    done = ended(client, submit(client, [line(number) for number in range(20)]).id)
    assert done.status == "completed" and done.request_counts is not None
    assert (done.request_counts.completed, done.request_counts.failed) == (19, 1)
    (failed,) = results(client, done.error_file_id)
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("line-2", 500)
    assert next(claims, None) is None, "a claim was lost"


def test_a_file_on_which_the_check_breaks_fails_its_batch(
    client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*given: Any) -> Any:
        raise RuntimeError("a defect")

    monkeypatch.setattr("runtime.server.batches.intake.check_file", broken)
    done = ended(client, submit(client, [line(0)]).id)
    assert done.status == "failed" and done.errors is not None and done.errors.data is not None
    assert [each.code for each in done.errors.data] == ["server_error"]


@pytest.mark.parametrize("body", [b"{", b'{"input_file_id": "\xed\xa0\x80"}', b"[" * 9000, b"[]"])
def test_bodies_that_are_no_orders(server: Running, body: bytes) -> None:
    with server.http() as http:
        answer = http.post("/v1/batches", content=body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


def test_without_a_queue_the_routes_say_so(tokenizer: Tokenizer) -> None:
    with running(tokenizer) as started, started.client() as client:
        for act in (client.files.list, client.batches.list, lambda: client.batches.cancel("b")):
            with pytest.raises(openai.APIStatusError, match="--queue") as refused:
                act()
            assert refused.value.status_code == 501


def counted(client: openai.OpenAI, batch: str) -> int:
    counts = client.batches.retrieve(batch).request_counts
    return 0 if counts is None else counts.completed
