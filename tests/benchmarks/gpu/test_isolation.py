"""Each check of the bring-up runs alone: one that raises, dies or hangs costs its own result; the time has a limit."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.isolation import Check, CheckResult, RunSettings, report_of, run_checks, run_one, table_of

PROGRAMS = {
    "good": 'print("fine"); open(sys.argv[1], "w").write(json.dumps({"ms": 1.5}))',
    "raises": 'raise AssertionError("deviates by 3")',
    "dies": "os.kill(os.getpid(), 9)",
    "hangs": "time.sleep(60)",
    "silent": "pass",
    "last": 'open(sys.argv[1], "w").write(json.dumps({"nested": {"a": 2}}))',
}


def no_values(settings: RunSettings) -> Mapping[str, Any]:
    raise AssertionError("it runs in a process of its own")


def some_values(settings: RunSettings) -> Mapping[str, Any]:
    return {"device": settings.device}


def command(folder: Path, name: str) -> Sequence[str]:
    program = "import json, os, sys, time\n" + PROGRAMS[name]
    return [sys.executable, "-S", "-c", program, str(folder / f"{name}.json")]


def results_of(folder: Path, names: Sequence[str], budget: float = 60.0, **limits: float) -> dict[str, CheckResult]:
    checks = [
        Check(name, f"{__name__}:no_values", limits.get(name, 30.0), ("raises",) if name == "last" else ())
        for name in names
    ]
    told: list[CheckResult] = []
    settings = RunSettings(folder, "cpu", True)
    results = run_checks(checks, lambda name: command(folder, name), settings, budget, told.append)
    assert told == results, "each is told as soon as it is known"
    return {each.name: each for each in results}


def test_what_fails_does_not_stop_the_rest(tmp_path: Path) -> None:
    got = results_of(tmp_path, ["raises", "dies", "hangs", "silent", "good"], hangs=0.5)
    assert {name: each.status for name, each in got.items()} == {
        "raises": "failed", "dies": "failed", "hangs": "timed out", "silent": "failed", "good": "passed"
    }  # fmt: skip
    assert "deviates by 3" in got["raises"].why and "exit code -9" in got["dies"].why
    assert "no end after 0 s" in got["hangs"].why and got["good"].values == {"ms": 1.5}
    table = table_of(list(got.values()))
    assert "good" in table and "ms 1.5" in table and "AssertionError: deviates by 3" in table
    report = report_of(list(got.values()), {"device": "cpu"})
    assert report["counts"] == {"passed": 1, "failed": 3, "timed out": 1, "skipped": 0}
    assert json.loads(json.dumps(report))["checks"][0]["name"] == "raises"


def test_checks_whose_needs_failed_are_skipped_and_the_budget_holds(tmp_path: Path) -> None:
    got = results_of(tmp_path, ["raises", "last"])
    assert got["last"].status == "skipped" and "raises" in got["last"].why
    assert results_of(tmp_path, ["last"])["last"].values == {"nested": {"a": 2}}, (
        "what was left out is taken to be there"
    )
    late = results_of(tmp_path, ["good", "hangs"], budget=4.0)
    assert all(each.status == "skipped" and "time was used up" in each.why for each in late.values())


def test_one_check_in_this_process(tmp_path: Path) -> None:
    run_one(Check("one", f"{__name__}:some_values", 1.0), RunSettings(tmp_path, "cpu"))
    assert json.loads((tmp_path / "one.json").read_text()) == {"device": "cpu"}
    with pytest.raises(AssertionError, match="process of its own"):
        run_one(Check("two", f"{__name__}:no_values", 1.0), RunSettings(tmp_path))
