"""Show a progress bar on standard error for long work, and silence the libraries below it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def counting(what: str, silent: bool, counted: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """Yield a callback (done, total) that updates a bar; None without a terminal or if `silent`.

    The bar shows the numbers if `counted`, else a percentage.
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
    """Silence log messages and progress bars of lm-eval and transformers.

    With `bars`, the bars stay if standard error is a terminal.
    """
    import logging

    from transformers.utils import logging as advice

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    advice.set_verbosity_error()
    if not (bars and sys.stderr.isatty()):
        advice.disable_progress_bar()
