"""Record the trace: one record per event, as JSON lines.

Schedulers and agents emit to a `TraceSink`. `Trace` keeps the latest events in a ring for `/zoo/trace` and, given a
path, writes all of them to a file from a thread of its own, so that emitting never waits for a disk.

If the file cannot keep up, events beyond `backlog` are lost and counted in a `trace.lost` record. A full disk ends the
file, not the service. The same events give the same bytes.
"""

from __future__ import annotations

import json
import logging
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

from runtime.types import TraceEvent

_log = logging.getLogger(__name__)
_FIELDS = ("t", "ev", "req", "seq", "inst", "dev", "block", "page", "n", "bytes", "cause", "span")


class TraceSink(Protocol):
    """Define an object that takes events, in order; those of changes of roles come from other threads."""

    def emit(self, event: TraceEvent) -> None: ...


def record_of(event: TraceEvent) -> dict[str, Any]:
    """Return the event as a JSON object: fields that are None left out, `extra` merged in."""
    record = {name: value for name in _FIELDS if (value := getattr(event, name)) is not None}
    record.update(event.extra)
    return record


def line_of(event: TraceEvent) -> str:
    """Return the event as one JSON line, newline included."""
    return json.dumps(record_of(event), separators=(",", ":"), ensure_ascii=False) + "\n"


class Trace:
    """Keep the latest `ring` events in memory, and write all of them to a file if there is a path."""

    def __init__(self, path: Path | None = None, ring: int = 65536, backlog: int = 262144) -> None:
        """Open the file for appending. Raises OSError if that fails; ValueError for sizes below 1."""
        if ring < 1 or backlog < 1:
            raise ValueError("ring and backlog must be at least 1")
        self._lock = threading.Lock()
        self._ring: deque[TraceEvent] = deque(maxlen=ring)
        self._file = None if path is None else _TraceFile(path, backlog)

    def emit(self, event: TraceEvent) -> None:
        with self._lock:
            self._ring.append(event)
        if self._file is not None:
            self._file.put(event)

    def recent(self, limit: int | None = None) -> list[TraceEvent]:
        """Return the latest events, oldest first; at most `limit` of them."""
        with self._lock:
            events = list(self._ring)
        return events if limit is None else events[max(0, len(events) - limit) :]

    def lines(self, limit: int | None = None) -> Iterable[str]:
        """Return the latest events as JSON lines, oldest first, encoded lazily."""
        return (line_of(event) for event in self.recent(limit))

    def close(self) -> None:
        """Write what is pending and close the file. The ring stays readable."""
        if self._file is not None:
            self._file.close()


class _TraceFile:
    """Append events to a file in batches, on a thread of its own."""

    def __init__(self, path: Path, backlog: int) -> None:
        self._out: TextIO = path.open("a", encoding="utf-8")
        self._backlog = backlog
        self._wake = threading.Condition()
        self._pending: list[TraceEvent] = []
        self._lost = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="zoo-trace", daemon=True)
        self._thread.start()

    def put(self, event: TraceEvent) -> None:
        with self._wake:
            if self._closing:
                return
            if len(self._pending) >= self._backlog:
                self._lost += 1
                return
            self._pending.append(event)
            if len(self._pending) == 1:
                self._wake.notify()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._out:
                while batch := self._next_batch():
                    self._out.writelines(line_of(event) for event in batch)
                    self._out.flush()
        except OSError as error:
            _log.error("the trace file ends here: %s", error)
            with self._wake:
                self._closing = True
                self._pending.clear()

    def _next_batch(self) -> list[TraceEvent]:
        """Wait for events; an empty list when the file is to be closed and nothing is pending."""
        with self._wake:
            self._wake.wait_for(lambda: self._pending or self._closing)
            batch, self._pending = self._pending, []
            if self._lost and batch:
                batch.append(TraceEvent(t=batch[-1].t, ev="trace.lost", n=self._lost))
                self._lost = 0
            return batch
