"""Build and run the Typer application `zoo`, from one table of verbs.

Exit codes: 0 success; 1 the command ran and found something wrong; 2 bad usage or bad input, with one line on standard
error. Verb modules import nothing heavy at module level, so that `zoo --help` is fast.
"""

from __future__ import annotations

import gc
import importlib
import sys

import typer

from cli.shared.command import ZooCommand
from cli.shared.output import say_error
from runtime.processors import prepare_openmp
from zoo.errors import TrainingFailed, ZooError

#: Verb -> module. The module's function of the same name is the command; its docstring is the help text.
VERBS: dict[str, str] = {
    "ingest": "cli.ingest",
    "ls": "cli.ls",
    "show": "cli.show",
    "rm": "cli.rm",
    "alias": "cli.alias",
    "promote": "cli.promote",
    "rollback": "cli.rollback",
    "key": "cli.key",
    "price": "cli.price",
    "export": "cli.export",
    "verify": "cli.verify",
    "gc": "cli.gc",
    "pack": "cli.pack",
    "compose": "cli.compose",
    "quantize": "cli.quantize",
    "eval": "cli.eval",
    "experiment": "cli.experiment",
    "stitch": "cli.stitch",
    "compare": "cli.compare",
    "delta": "cli.delta",
    "surrogate": "cli.surrogate",
    "exits": "cli.exits",
    "lengths": "cli.lengths",
    "profile": "cli.profile",
    "generate": "cli.generate",
    "serve": "cli.serve",
    "bench": "cli.bench",
    "simulate": "cli.simulate",
    "top": "cli.top",
    "ui": "cli.ui",
    "batch": "cli.batch",
    "demo": "cli.demo",
}

#: Thresholds of the garbage collector. With Python's own (700, 10, 10) it runs some thousand times while torch is
#: imported, a tenth of that time, and finds nothing.
_COLLECT = (50_000, 20, 50)


def build(only: str | None = None) -> typer.Typer:
    """Return the application with all verbs.

    With `only`, a verb about to be run, the other modules are not imported.
    """
    app = typer.Typer(
        name="zoo",
        help="Cut models into shared blocks, keep every weight once, serve them together.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_verbs)
    for verb, module in VERBS.items() if only not in VERBS else [(only, VERBS[only])]:
        app.command(verb, cls=ZooCommand)(getattr(importlib.import_module(module), verb))
    return app


def _verbs() -> None:
    # With a callback Typer expects a verb even if the application has only one.
    pass


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its code.

    Expected errors (ZooError) are printed as one line; other exceptions keep their traceback.
    """
    gc.set_threshold(*_COLLECT)
    prepare_openmp()
    try:
        code = build(next(iter(sys.argv[1:] if argv is None else argv), None))(args=argv, standalone_mode=True)
    except ZooError as error:
        say_error(str(error))
        sys.exit(1 if isinstance(error, TrainingFailed) else 2)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(code or 0)
