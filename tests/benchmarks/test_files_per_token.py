"""Which files count as entered by a token."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.files_per_token import ROOT, Entered, measured, summary
from runtime.tracing.sink import record_of
from runtime.types import TraceEvent


def test_only_functions_of_this_projects_packages_are_noted():
    event = TraceEvent(1, "token")
    with Entered().watching() as entered:
        record_of(event)
        Path("a").joinpath("b")
        taken = entered.drain_calls()
        assert entered.drain_calls() == {}
    assert taken == {("MainThread", "runtime/tracing/sink.py"): 1}
    record_of(TraceEvent(1, "token"))
    assert entered.drain_calls() == {}, "it goes on after its end"


def test_threads_that_begin_meanwhile_are_noted_too():
    with Entered().watching() as entered:
        thread = threading.Thread(target=record_of, args=(TraceEvent(1, "token"),), name="other")
        thread.start()
        thread.join()
        assert entered.drain_calls()["other", "runtime/tracing/sink.py"] == 1


def test_a_summary_is_of_the_median_token():
    one, other = ("t", "runtime/a.py"), ("t", "runtime/b/c.py")
    found = [
        Counter({one: 2, other: 1}),
        Counter({one: 4, ("u", "runtime/a.py"): 1}),
        Counter({one: 2, ("u", "runtime/a.py"): 1}),
    ]
    assert summary(found, calls=True) == {
        "files": 1, "thread_files": 2, "calls": 3, "tokens": 3, "packages": {"runtime": 1},
        "files_calls": {"runtime/a.py": 3},
    }  # fmt: skip
    with pytest.raises(ValueError, match="no token"):
        summary([])


def test_a_token_enters_the_scheduler_and_an_engine_and_more_files_over_two_hops():
    found = measured(tokens=24, calls=True)
    one, two = found["one_device"], found["two_hops"]
    for each in (one, two):
        assert 5 < each["files"] < each["calls"]
        assert each["files"] <= each["thread_files"]
        assert any(package.startswith("runtime/scheduler") for package in each["packages"])
        assert any(package.startswith("runtime/engine") for package in each["packages"])
        assert all((ROOT / name).is_file() for name in each["files_calls"])
    # Beside other work a message more may come between two tokens: 76 on a quiet machine.
    assert one["files"] <= 30 and two["thread_files"] <= 78, "a newcomer reads what a token passes"
    assert two["thread_files"] > max(two["files"], one["thread_files"])
