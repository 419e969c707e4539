"""The trace: line format, ring buffer, file, and a file that cannot keep up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.tracing.sink import Trace, line_of
from runtime.types import TraceEvent


def test_a_line_leaves_out_what_is_absent_and_merges_extras() -> None:
    line = line_of(TraceEvent(5, "token", seq="s", n=0, extra={"token": 7}))
    assert line == '{"t":5,"ev":"token","seq":"s","n":0,"token":7}\n'


def test_the_ring_keeps_the_latest() -> None:
    trace = Trace(ring=3)
    for time in range(5):
        trace.emit(TraceEvent(time, "x"))
    assert [event.t for event in trace.recent()] == [2, 3, 4]
    assert [event.t for event in trace.recent(2)] == [3, 4]
    assert trace.recent(0) == []
    assert [json.loads(line)["t"] for line in trace.lines()] == [2, 3, 4]


def test_the_file_gets_everything_in_order(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(path, ring=1)
    events = [TraceEvent(time, "x", seq="é") for time in range(2000)]
    for event in events:
        trace.emit(event)
    trace.close()
    assert path.read_text(encoding="utf-8") == "".join(map(line_of, events))


def test_nothing_is_written_after_close(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(path)
    trace.close()
    trace.emit(TraceEvent(1, "late"))
    trace.close()
    assert path.read_text() == ""
    assert [event.ev for event in trace.recent()] == ["late"]


def test_a_file_that_cannot_keep_up_says_how_much_it_lost(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    trace = Trace(path, backlog=2)
    assert trace._file is not None
    with trace._file._wake:  # the writer cannot take events while the lock is held
        for time in range(5):
            trace.emit(TraceEvent(time, "x"))
    trace.close()
    assert [json.loads(line)["ev"] for line in path.read_text().splitlines()] == ["x", "x", "trace.lost"]
    assert json.loads(path.read_text().splitlines()[-1])["n"] == 3


def test_a_full_disk_ends_the_file_and_nothing_else() -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    trace = Trace(full)
    trace.emit(TraceEvent(1, "x"))
    trace.close()
    assert len(trace.recent()) == 1


def test_a_path_that_cannot_be_opened_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        Trace(tmp_path / "missing" / "trace.jsonl")


@pytest.mark.parametrize("sizes", [{"ring": 0}, {"backlog": 0}])
def test_sizes_must_be_positive(sizes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Trace(**sizes)  # type: ignore[arg-type]
