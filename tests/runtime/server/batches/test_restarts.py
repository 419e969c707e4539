"""Batches across servers: what one has left, the next one ends, for the same principal only."""

from __future__ import annotations

import json
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import openai
import pytest

from runtime.config import ServerConfig
from runtime.frontend.served_models import StoredModel
from runtime.frontend.tokenizer import Tokenizer
from tests import postgres
from tests.runtime.server.batches.asking import content_of, ended, line, lines_of, results, submit
from tests.runtime.server.harness import eventually, running


def comparable(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return lines of results without times."""
    for each in found:
        del each["response"]["body"]["created"]
    return found


def test_a_stopped_server_leaves_its_lines_to_the_next(tokenizer: Tokenizer, tmp_path: Path) -> None:
    lines = [line(number, temperature=0.8, max_tokens=12) for number in range(40)]
    key = {"extra_headers": {"Idempotency-Key": "k"}}
    with running(tokenizer, queue=str(tmp_path / "whole")) as server, server.client() as client:
        whole = ended(client, submit(client, lines, **key).id)
        wanted = comparable(results(client, whole.output_file_id))
    queue, config = str(tmp_path / "cut"), ServerConfig(max_num_seqs=4)
    slow: Any = running(tokenizer, config=config, queue=queue, pace=lambda _: time.sleep(0.01))
    with slow as server, server.client() as client:
        batch = submit(client, lines, **key).id
        assert eventually(lambda: "done" in dict(lines_of(queue, batch)).values(), 30)
    states = [state for _, state in lines_of(queue, batch)]
    assert "done" in states and set(states) == {"done", "queued"}, "what ran is queued again"
    with running(tokenizer, config=config, queue=queue) as server, server.client() as client:
        cut = ended(client, batch)
        assert (cut.id, cut.status, cut.error_file_id) == (whole.id, "completed", None)
        assert cut.request_counts == whole.request_counts
        assert comparable(results(client, cut.output_file_id)) == wanted


def test_lines_load_their_model_and_take_no_place_of_interactive_requests(tokenizer: Tokenizer, tmp_path: Path) -> None:
    config, stored = ServerConfig(max_queued=1, max_num_seqs=8), (StoredModel("org/spare"),)
    started = running(tokenizer, config=config, queue=str(tmp_path / "q"), on_demand=stored, trace=True)
    with started as server, server.client() as client, server.http() as http:
        lines = [line(number, model=("org/base", "spare")[number % 2], slo_ms=500) for number in range(20)]
        batch = submit(client, lines).id
        assert client.completions.create(model="org/base", prompt="a", max_tokens=2).choices
        done = ended(client, batch)
        assert done.request_counts is not None and done.request_counts.completed == 20
        answers = [each["response"]["body"] for each in results(client, done.output_file_id)]
        assert {each["model"] for each in answers} == {"org/base", "org/spare"}
        events = map(json.loads, http.get("/zoo/trace").text.splitlines())
        ranks = {event["req"]: event["priority"] for event in events if event["ev"] == "arrive"}
        lines_ranks = [ranks.pop(each["id"]) for each in answers]
        assert max(ranks.values()) < min(lines_ranks), "interactive requests go first wherever requests wait"


@pytest.mark.postgres
def test_a_batch_over_postgresql(tokenizer: Tokenizer, postgres_server: str) -> None:
    queue = postgres.new_database(postgres_server)
    with running(tokenizer, queue=queue) as server, server.client() as client:
        lines = [line(number) for number in range(30)]
        done = ended(client, submit(client, [*lines, line(30, max_tokens=9999)]).id)
        assert done.request_counts is not None and done.request_counts.completed == 30
        assert [each["custom_id"] for each in results(client, done.output_file_id)] == [f"line-{n}" for n in range(30)]
        assert len(results(client, done.error_file_id)) == 1
        assert client.files.content(done.input_file_id).content == content_of([*lines, line(30, max_tokens=9999)])


def test_a_key_sees_nothing_of_another(tokenizer: Tokenizer, tmp_path: Path) -> None:
    queue = str(tmp_path / "queue")
    with running(tokenizer, config=ServerConfig(api_key="first"), queue=queue) as server, server.client() as client:
        done = ended(client, submit(client, [line(0)], extra_headers={"Idempotency-Key": "k"}).id)
    with running(tokenizer, config=ServerConfig(api_key="second"), queue=queue) as server, server.client() as client:
        assert not client.files.list().data and not client.batches.list().data
        for act in (
            lambda: client.batches.retrieve(done.id),
            lambda: client.batches.cancel(done.id),
            lambda: client.files.retrieve(done.input_file_id),
            lambda: client.files.content(done.output_file_id or ""),
            lambda: client.files.delete(done.input_file_id),
            lambda: client.batches.create(
                input_file_id=done.input_file_id, endpoint="/v1/completions", completion_window="24h"
            ),
        ):
            with pytest.raises(openai.NotFoundError):
                act()
        assert submit(client, [line(0)], extra_headers={"Idempotency-Key": "k"}).id != done.id
    with running(tokenizer, config=ServerConfig(api_key="first"), queue=queue) as server, server.client() as client:
        assert results(client, client.batches.retrieve(done.id).output_file_id)


def test_an_upload_that_broke_off_leaves_nothing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    queue = str(tmp_path / "queue")
    with running(tokenizer, queue=queue) as server:
        with server.http() as http:
            form = b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * (3 << 20)
            kind = {"content-type": "multipart/form-data; boundary=b"}
            assert http.post("/v1/files", content=form, headers=kind).status_code == 400
            tail = b'\r\n--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nother\r\n--b--'
            assert http.post("/v1/files", content=form + tail, headers=kind).status_code == 400
            assert http.get("/v1/files").json()["data"] == []
            assert http.post("/v1/files", content=b"{}").status_code == 415
        with server.client() as client:
            client.files.create(file=("a", content_of([line(0)])), purpose="batch")
    with closing(sqlite3.connect(f"{queue}/queue.sqlite")) as database:
        assert len(database.execute("SELECT id FROM queue_files").fetchall()) == 1
        assert len(database.execute("SELECT number FROM queue_file_chunks").fetchall()) == 1
