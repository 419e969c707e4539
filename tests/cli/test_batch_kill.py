"""`kill -9` of `zoo serve` while a batch runs: the next server's results are those of one that was not killed."""

from __future__ import annotations

import json
import signal
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_serve import serving
from tests.runtime.server.batches.asking import LIMIT, ended, lines_of, results, submit
from tests.runtime.server.harness import eventually

LINES = 36
KEY = {"extra_headers": {"Idempotency-Key": "one batch"}}


def asked() -> list[dict[str, Any]]:
    """Return lines for two models: greedy, drawn with and without a seed, with penalties, two choices, refused ones."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9},
        {"temperature": 0.8, "seed": 5, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 1.0, "n": 2},
        {"max_tokens": 100_000},
    ]
    return [
        {
            "custom_id": f"line-{number}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {
                "model": ("org/base", "org/lora")[number % 2], "prompt": f"def number_{number}", "ignore_eos": True,
                "max_tokens": 20 + number % 9, **kinds[number % 5],
            },
        }
        for number in range(LINES)
    ]  # fmt: skip


def outcome(client: Any, batch: Any) -> list[dict[str, Any]]:
    """Return the lines of both files, in order, without times."""
    found = [*results(client, batch.output_file_id), *results(client, batch.error_file_id)]
    for each in found:
        each["response"]["body"].pop("created", None)
    return found


@pytest.fixture(scope="module")
def unkilled(store: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return the results of a server that is not killed."""
    folder = tmp_path_factory.mktemp("unkilled")
    with serving(store, folder / "log", "--queue", str(folder / "queue")) as served, served.client() as client:
        batch = ended(client, submit(client, asked(), **KEY).id, 4 * LIMIT)
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.to_dict() == {"total": LINES, "completed": 29, "failed": 7}
        return outcome(client, batch)


@pytest.mark.parametrize("agents", [(), ("--agents", "2", "--backend", "processes")], ids=["inline", "agents"])
def test_a_killed_servers_batch_is_ended_by_the_next(
    store: Path, tmp_path: Path, unkilled: list[dict[str, Any]], agents: tuple[str, ...]
) -> None:
    queue = str(tmp_path / "queue")
    arguments = ("--queue", queue, "--max-num-seqs", "2", *agents)
    with serving(store, tmp_path / "log-1", *arguments) as served, served.client() as client:
        name = submit(client, asked(), **KEY).id
        assert eventually(lambda: begun(queue, name), LIMIT)
        served.process.send_signal(signal.SIGKILL)
        served.process.wait()
    before = dict(lines_of(queue, name))
    produced = journalled(queue)
    assert "done" in before.values() and "running" in before.values() and "queued" in before.values()
    with serving(store, tmp_path / "log-2", *arguments) as served, served.client() as client:
        batch = ended(client, name, 4 * LIMIT)
        assert batch.status == "completed"
        assert outcome(client, batch) == unkilled
        counters = served_counters(served)
    whole = sum(each["response"]["body"].get("usage", {}).get("completion_tokens", 0) for each in unkilled)
    assert counters["generated_tokens"] < whole - produced, "answered lines, and journalled tokens, are not run again"


def begun(queue: str, batch: str) -> bool:
    """Return whether some lines are answered, and tokens of some of the next ones are journalled."""
    states = [state for _, state in lines_of(queue, batch)]
    return states.count("done") >= 3 and journalled(queue) > 0


def journalled(queue: str) -> int:
    """Return the events of requests that have not ended."""
    with closing(sqlite3.connect(f"{queue}/queue.sqlite")) as database:
        return len(database.execute("SELECT ordinal FROM queue_events").fetchall())


def served_counters(served: Any) -> dict[str, int]:
    import httpx

    answer = httpx.get(f"{served.address}/zoo/state", headers={"Authorization": "Bearer k3y"}, trust_env=False)
    counters: dict[str, int] = json.loads(answer.text)["counters"]
    return counters
