"""Gaps of streams beside requests with grammars: what is counted, and a run of the command."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.serving.constrained import gaps
from benchmarks.serving.constrained.gaps import large_schema, main, summary
from runtime.grammars.sources import from_schema
from tests import checkpoints
from zoo.api import Zoo


def test_gaps_are_summed_up_in_milliseconds() -> None:
    assert summary([0.001 * each for each in range(1, 201)]) == {
        "events": 200, "median": 100.5, "p99": 199.0, "longest": 200.0,
    }  # fmt: skip
    assert summary([0.5]) == {"events": 1, "median": 500.0, "p99": 500.0, "longest": 500.0}


def test_large_schemas_are_all_different_and_within_the_limits() -> None:
    made = [from_schema(large_schema(number)) for number in range(3)]
    assert len(set(made)) == 3


def test_the_command_reports_each_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(checkpoints.make("llama", tmp_path / "llama"), "base")
    out = tmp_path / "report.json"
    given = ["--streams", "2", "--requests", "1", "--rounds", "1", "--output", str(out)]
    monkeypatch.setattr("sys.argv", ["gaps", str(tmp_path / "store"), "base", *given])
    monkeypatch.setattr(gaps, "_PAUSE", 0.1)
    monkeypatch.setattr(gaps, "_QUIET", 0.2)
    main()
    found = json.loads(out.read_text())
    assert list(found) == ["first", "none", "known", "large"]
    for each in found.values():  # events that came together have a gap of 0.0 ms
        assert 0 <= each["median"] <= each["p99"] <= each["longest"] and each["longest"] > 0 and each["events"] > 0
