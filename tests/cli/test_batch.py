"""`zoo batch` against a real server: from a file to its results, and errors as one line."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cli.app import main
from runtime.config import ServerConfig
from runtime.frontend.tokenizer import adapt
from tests.runtime.frontend.samples import byte_level
from tests.runtime.server.batches.asking import content_of, line
from tests.runtime.server.harness import Running, running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("batch")
    queue, config = str(folder / "queue"), ServerConfig(api_key="secret", max_num_seqs=4)
    with running(adapt(byte_level(folder)), config=config, queue=queue, pace=lambda _: time.sleep(0.002)) as started:
        yield started


@pytest.fixture
def zoo(server: Running, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run `zoo batch`; return its exit code, its output, and its errors."""
    monkeypatch.setenv("ZOO_API_KEY", "secret")

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["batch", *words, "--url", server.address])
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return run


def test_from_a_file_to_its_results(zoo: Any, tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_bytes(content_of([*(line(number) for number in range(5)), line(5, max_tokens=9999)]))
    code, out, _ = zoo("submit", str(asked), "--window", "10m", "--metadata", "a=b", "--json")
    made = json.loads(out)
    assert (code, made["completion_window"], made["metadata"]) == (0, "10m", {"a": "b"})
    code, out, _ = zoo("status", made["id"], "--wait")
    assert (code, out) == (0, f"{made['id']}  completed  5 of 6 answered, 1 failed\n")
    code, out, err = zoo("results", made["id"])
    assert code == 0 and "--errors" in err
    assert [json.loads(each)["custom_id"] for each in out.splitlines()] == [f"line-{number}" for number in range(5)]
    answers, errors = tmp_path / "out.jsonl", tmp_path / "errors.jsonl"
    code, document, _ = zoo("results", made["id"], "--out", str(answers), "--errors", str(errors), "--json")
    assert code == 0 and answers.read_text() == out
    assert json.loads(document) == {
        "id": made["id"], "status": "completed", "total": 6, "completed": 5, "failed": 1, "out": str(answers),
        "errors": str(errors),
    }  # fmt: skip
    assert json.loads(errors.read_text())["custom_id"] == "line-5"
    code, out, _ = zoo("status")
    assert code == 0 and made["id"] in out and "completed" in out


def test_a_batch_that_is_refused_says_where(zoo: Any, tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_bytes(content_of([line(0), line(0)]))
    code, out, _ = zoo("submit", str(asked), "--wait")
    assert code == 0 and "failed" in out and "line 2: another line has this custom_id" in out


def test_cancelling(zoo: Any, tmp_path: Path) -> None:
    asked = tmp_path / "in.jsonl"
    asked.write_bytes(content_of(line(number, max_tokens=250) for number in range(30)))
    _, out, _ = zoo("submit", str(asked), "--json", "--key", "once")
    assert json.loads(zoo("submit", str(asked), "--json", "--key", "other")[1])["id"] != json.loads(out)["id"]
    for name in (json.loads(out)["id"],):
        code, out, _ = zoo("cancel", name, "--wait")
        assert code == 0 and "cancelled" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("submit",), "needs a file"),
        (("submit", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("results",), "needs the id"),
        (("status", "batch_none"), "There is no batch 'batch_none'. (404)"),
        (("status", "../x"), "is no id"),
        (("cancel", "batch_none", "--api-key", "wrong"), "(401)"),
    ],
)
def test_errors_are_one_line(zoo: Any, words: tuple[str, ...], said: str) -> None:
    code, out, err = zoo(*words)
    assert (code, out) == (2, "") and said in err and err.count("\n") == 1


def test_a_file_of_something_else(zoo: Any, tmp_path: Path) -> None:
    asked = tmp_path / "in.txt"
    asked.write_text("hello\n")
    code, _, err = zoo("submit", str(asked))
    assert code == 2 and "is no request of a batch" in err
