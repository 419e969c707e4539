"""A bar on standard error for long work, and silence from the libraries below it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(what: str, silent: bool, in_bytes: bool = False) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of (done, in all); None when standard error is no terminal or `silent` is on. `in_bytes`: bytes and their speed are shown."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    counts = (DownloadColumn(), TransferSpeedColumn()) if in_bytes else (MofNCompleteColumn(),)
    with Progress(what, BarColumn(), *counts, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def hush() -> None:
    """Keep transformers from drawing bars of its own while weights are mapped."""
    from transformers.utils import logging

    logging.disable_progress_bar()
