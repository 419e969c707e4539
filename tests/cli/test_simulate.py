"""`zoo simulate` as scripts use it: one document, the same files for the same seed, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cli.app import main

SCENARIO = """
[cluster]
servers = [2]
disk = "nvlink3"
[apps]
count = 3
foundations = ["llama-7b"]
[asked]
count = 12
seconds = 4
prompts = "uniform:8-64"
answers = "uniform:2-8"
[policies.blocks]
placement = "partition"
[policies.pm]
provision = "pm"
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(["simulate", *(str(each) for each in arguments)])
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(SCENARIO)
    return path


def without_real(document: Any) -> Any:
    if isinstance(document, dict):
        return {name: without_real(value) for name, value in document.items() if name not in ("real", "wall_seconds")}
    return [without_real(each) for each in document] if isinstance(document, list) else document


def test_a_document_with_what_the_contract_names(scenario: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--config", scenario, "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["preset"], document["seed"], document["requests"]) == ("small", 0, 12)
    assert set(document["policies"]) == {"blocks", "pm"}
    assert set(document["latency"]) >= {"p50", "p95", "p99"}
    assert document["communication_bytes"] > 0 == document["policies"]["pm"]["communication_bytes"]
    assert (
        document["events"] > 12
        and document["throughput_tokens"] > 0
        and document["virtual_seconds"] > 0 < document["wall_seconds"]
    )
    assert "blocks over pm" in document["cases"][0]["ratios"]


def test_same_seed_same_files(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    documents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        files = (
            "--trace",
            tmp_path / f"{name}.trace",
            "--scheduler-log",
            tmp_path / f"{name}.log",
            "--save-requests",
            tmp_path / f"{name}.asked",
        )
        _, out, _ = run(capsys, "--config", scenario, "--seed", seed, "--json", *files)
        documents.append(without_real(json.loads(out)))
    for kind in ("trace", "log", "asked"):
        a, b, c = ((tmp_path / f"{name}.{kind}").read_bytes() for name in "abc")
        assert a == b != c
    assert documents[0] == documents[1] != documents[2]


def test_a_log_can_be_replayed_and_requests_asked_again(
    scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    log, asked = tmp_path / "log", tmp_path / "asked.jsonl"
    _, first, _ = run(capsys, "--config", scenario, "--json", "--scheduler-log", log, "--save-requests", asked)
    code, out, _ = run(capsys, "--replay", log, "--json")
    assert code == 0 and json.loads(out)["same"]
    log.write_bytes(
        log.read_bytes().replace(b'"AddRequest",{"request":{"seq":"r5"', b'"AddRequest",{"request":{"seq":"x5"', 1)
    )
    code, _, told = run(capsys, "--replay", log)
    assert code == 1 and "another answer" in told
    again = tmp_path / "again.toml"
    again.write_text(SCENARIO.replace("[asked]", f'[asked]\nkind = "file"\npath = "{asked}"'))
    _, second, _ = run(capsys, "--config", again, "--json")
    assert json.loads(second)["latency"] == json.loads(first)["latency"]


def test_a_folder_with_report_and_pictures(scenario: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    code, out, _ = run(capsys, "--config", scenario, "--out", tmp_path / "out", "--policy", "pm", "--requests", 5)
    assert code == 0 and "pm" in out and "blocks" not in out
    assert json.loads((tmp_path / "out" / "report.json").read_text())["requests"] == 5
    assert (tmp_path / "out" / "run.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--preset", "nothing"), "no preset"),
        (("--preset", "blockllm", "--config", "x.toml"), "not both"),
        (("--config", "missing.toml"), "cannot be read"),
        (("--policy", "nobody"), "no policy"),
        (("--requests", "3", "--policy", "blocks", "--trace", "/nowhere/at/all"), "cannot be written"),
        (("--requests", "3", "--policy", "pm", "--trace", "a"), "no trace"),
        (("--replay", "missing"), "cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    arguments: tuple[str, ...], why: str, capsys: pytest.CaptureFixture[str]
):
    code, out, told = run(capsys, *arguments)
    assert code == 2 and not out
    assert why in told and len(told.splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[cluster\n", "no TOML"),
        ("[clutter]\n", "no 'clutter'"),
        ("[cluster]\nslots = 3\n", "no 'slots'"),
        ("[cluster]\ngpus = 3\n", "cluster.gpus: Expected `array`"),
        ('[cluster]\ngpu = "abacus"\n', "abacus"),
        ("[policies.blocks]\nchunks = 3\n", "no 'chunks'"),
        ("[policies.blocks]\nprefill_chunk = 0\n", "at least 1"),
        ("[policies.blocks.control]\nscale = true\n", "no 'scale'"),
        ("[policies.blocks]\ncontrol = 3\n", "control is a table"),
        ('[asked]\nkind = "none"\n', "asked.kind"),
        ('[asked]\nkind = "file"\npath = "missing.jsonl"\n', "cannot be read"),
        ("[policies]\n", "at least one policy"),
    ],
)
def test_scenarios_that_are_none_are_refused(text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "wrong.toml").write_text(text)
    code, _, told = run(capsys, "--config", tmp_path / "wrong.toml")
    assert code == 2 and why in told
