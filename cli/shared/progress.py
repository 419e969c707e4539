"""A bar on standard error for long work, and silence from the libraries below it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(what: str, silent: bool, counted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of (done, in all), as numbers where they can be `counted`, else in percent; None without a terminal or when
    `silent`.
    """
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskProgressColumn, TimeRemainingColumn

    share = MofNCompleteColumn() if counted else TaskProgressColumn()
    with Progress(what, BarColumn(), share, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def hush(bars: bool = False) -> None:
    """No advice from lm-eval and transformers, and no bars of their own; with `bars`, those where there is a
    terminal.
    """
    import logging

    from transformers.utils import logging as advice

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    advice.set_verbosity_error()
    if not (bars and sys.stderr.isatty()):
        advice.disable_progress_bar()
