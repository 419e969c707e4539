"""Show progress of a long run on standard error: a bar on a terminal, lines elsewhere, nothing when silent."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cli.shared.output import say

#: Called with (steps done, a short remark).
Advance = Callable[[int, str], None]
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """Reports progress. With `silent` nothing is printed (tests)."""

    silent: bool = False

    def note(self, line: str) -> None:
        if not self.silent:
            say(line)

    @contextmanager
    def bar(self, label: str, total: int) -> Iterator[Advance]:
        """Yield a callback for a piece of work of `total` steps."""
        if self.silent:
            yield lambda done, remark: None
        elif sys.stderr.isatty():
            with _terminal_bar(label, total) as advance:
                yield advance
        else:
            yield _plain_lines(label, total)


@contextmanager
def _terminal_bar(label: str, total: int) -> Iterator[Advance]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    remark = TextColumn("{task.fields[remark]}")
    columns = (TextColumn("  {task.description:<18}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn(), remark)
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(label, total=total, remark="")
        yield lambda done, remark: bars.update(task, completed=done, remark=remark)


def _plain_lines(label: str, total: int) -> Advance:
    last = time.monotonic()

    def advance(done: int, remark: str) -> None:
        nonlocal last
        if time.monotonic() - last >= _SECONDS_BETWEEN_LINES and done < total:
            last = time.monotonic()
            say(f"  {label}: {done} of {total} steps, {remark}")

    return advance
