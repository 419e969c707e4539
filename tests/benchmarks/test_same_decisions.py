"""Comparison of two records of the simulator's decisions: equal up to renames, or the first difference."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import same_decisions
from benchmarks.same_decisions import Renames, main, renamed_path

TRACE = (
    {"t": 1, "ev": "arrive", "seq": "r0", "n": 4, "model": "m"},
    {"t": 5, "ev": "block.hop", "seq": "r0", "cause": "Go", "to": "s0"},
    {"t": 9, "ev": "finish", "seq": "r0", "n": 2},
)
REPORT = {
    "wall_seconds": 1.5,
    "policies": {"blocks": {"counts": {"moves": 2}, "settings": {"moves": 16}, "real": {"seconds": 3.0}}},
}


def _write(folder: Path, trace: Sequence[Any] = TRACE, report: Any = REPORT, name: str = "kv-0") -> Path:
    folder.mkdir(exist_ok=True)
    with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(event) + "\n" for event in trace)
    (folder / f"{name}.json").write_text(json.dumps(report))
    return folder


def _compared(tmp_path: Path, *options: str) -> int:
    return main(["compare", str(tmp_path / "old"), str(tmp_path / "new"), *options])


def _map(tmp_path: Path, **parts: Any) -> tuple[str, str]:
    path = tmp_path / "map.json"
    path.write_text(json.dumps(parts))
    return "--map", str(path)


def test_equal_records_are_equal_whatever_the_clock_on_the_wall_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _write(tmp_path / "old")
    blocks = {**REPORT["policies"]["blocks"], "real": {"seconds": 8.0}}
    _write(tmp_path / "new", report={"wall_seconds": 9.0, "policies": {"blocks": blocks}})
    assert _compared(tmp_path) == 0
    assert capsys.readouterr().out == "kv-0: equal\n1 of 1 records are equal\n"


def test_the_first_event_that_differs_is_shown_after_those_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _write(tmp_path / "old")
    _write(tmp_path / "new", (TRACE[0], {**TRACE[1], "to": "s1"}, {**TRACE[2], "n": 3}))
    assert _compared(tmp_path) == 1
    out = capsys.readouterr().out
    assert "event 2 differs in to" in out and '"to": "s0"' in out and '"to": "s1"' in out
    assert '"arrive"' in out and '"finish"' not in out


@pytest.mark.parametrize(("shorter", "longer", "which"), [("old", "new", "NEW"), ("new", "old", "OLD")])
def test_an_event_too_many_is_a_difference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], shorter: str, longer: str, which: str
):
    _write(tmp_path / shorter, TRACE[:2])
    _write(tmp_path / longer)
    assert _compared(tmp_path) == 1
    assert f"event 3: only in {which}" in capsys.readouterr().out


def test_a_value_of_the_report_that_differs_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write(tmp_path / "old")
    blocks = {**REPORT["policies"]["blocks"], "counts": {"moves": 3}}
    _write(tmp_path / "new", report={**REPORT, "policies": {"blocks": blocks}})
    assert _compared(tmp_path) == 1
    assert "policies.blocks.counts.moves: OLD 2, NEW 3" in capsys.readouterr().out


def test_a_record_that_the_new_folder_lacks_is_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    _write(_write(tmp_path / "old"), name="kv-1")
    _write(tmp_path / "new")
    assert _compared(tmp_path) == 1
    assert "kv-1: NEW has no kv-1.json" in capsys.readouterr().out


def test_renamed_events_fields_and_values_are_equal_with_a_map_and_only_with_it(tmp_path: Path):
    _write(tmp_path / "old")
    renamed = (TRACE[0], {"t": 5, "ev": "hop", "seq": "r0", "cause": "RunRows", "target": "s0"}, TRACE[2])
    policy = {"counts": {"migrations": 2}, "settings": {"moves": 16}}
    _write(tmp_path / "new", renamed, {"policies": {"blocks": policy}})
    given = {
        "events": {"block.hop": "hop"},
        "fields": {"to": "target", "counts.moves": "counts.migrations"},
        "values": {"Go": "RunRows"},
    }
    assert _compared(tmp_path, *_map(tmp_path, **given)) == 0
    for part, names in given.items():
        for name in names:
            fewer = {**given, part: {old: new for old, new in names.items() if old != name}}
            assert _compared(tmp_path, *_map(tmp_path, **fewer)) == 1, name


def test_a_map_does_not_hide_that_another_value_was_chosen(tmp_path: Path):
    _write(tmp_path / "old")
    _write(tmp_path / "new", (TRACE[0], {"t": 5, "ev": "hop", "seq": "r0", "cause": "Go", "to": "s1"}, TRACE[2]))
    assert _compared(tmp_path, *_map(tmp_path, events={"block.hop": "hop"})) == 1


def test_patterns_ignored_keys_and_dropped_events(tmp_path: Path):
    _write(tmp_path / "old")
    report = {"policies": {"blocks": {"counts": {"moves": 2}, "settings": {"max_moves": 16, "more": 1}}}}
    _write(
        tmp_path / "new",
        (TRACE[0], {**TRACE[1], "to": "gpu-0"}, {"t": 7, "ev": "credit"}, {**TRACE[2], "more": 1}),
        report,
    )
    given = {"patterns": [["^s(\\d)$", "gpu-\\1"]], "ignore": ["settings", "more"], "drop": ["credit"]}
    assert _compared(tmp_path, *_map(tmp_path, **given)) == 0
    for part in given:
        assert _compared(tmp_path, *_map(tmp_path, **{**given, part: []})) == 1, part


def test_the_longest_rule_wins_and_a_key_is_renamed_once():
    fields = {"a": "b", "b": "c", "a.b": "x", "a.b.c": "y.z"}
    assert renamed_path(("a", "b", "c"), fields) == ("y", "z")
    assert renamed_path(("a", "b", "d"), fields) == ("x", "d")
    assert renamed_path(("q", "a"), fields) == ("q", "b")


def test_what_cannot_be_compared_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "old").mkdir()
    assert _compared(tmp_path) == 2
    assert "has no records" in capsys.readouterr().err
    _write(tmp_path / "old")
    assert _compared(tmp_path, *_map(tmp_path, renames={})) == 2
    assert "unknown: renames" in capsys.readouterr().err
    _write(tmp_path / "new")
    (tmp_path / "new" / "kv-0.jsonl.gz").write_bytes(b"no gzip")
    assert _compared(tmp_path) == 2
    assert "kv-0.jsonl.gz" in capsys.readouterr().err


def test_a_renames_part_defaults_to_nothing(tmp_path: Path):
    assert Renames.read(None) == Renames()


def test_the_same_checkout_decides_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(same_decisions, "RUNS", {"tiny": ("--preset", "full-device", "--requests", "3")})
    monkeypatch.setattr(same_decisions, "SCENARIOS", {})
    for folder in ("old", "new"):
        assert main(["record", str(tmp_path / folder), "--seeds", "1"]) == 0
    assert sorted(path.name for path in (tmp_path / "old").iterdir()) == ["tiny-0.json", "tiny-0.jsonl.gz"]
    assert _compared(tmp_path) == 0
    assert main(["record", str(tmp_path / "other"), "--seeds", "2"]) == 0
    (tmp_path / "other" / "tiny-1.json").rename(tmp_path / "other" / "tiny-0.json")
    (tmp_path / "other" / "tiny-1.jsonl.gz").rename(tmp_path / "other" / "tiny-0.jsonl.gz")
    assert main(["compare", str(tmp_path / "old"), str(tmp_path / "other")]) == 1
