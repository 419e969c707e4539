"""A bar on standard error for long work, and silence from the libraries below it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(what: str, silent: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of (done, in all); None when standard error is no terminal or `silent` is on."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn

    with Progress(what, BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def hush() -> None:
    """Keep transformers from drawing bars of its own while weights are mapped."""
    from transformers.utils import logging

    logging.disable_progress_bar()
