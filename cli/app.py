"""The Typer application `zoo`: one explicit table of verbs, and the exit codes of the contract.

0 fine; 1 it ran and found something wrong; 2 bad usage or bad input, with one clear line on standard error.
Verb modules import nothing heavy at the top, so that `zoo --help` answers at once.
"""

from __future__ import annotations

import importlib
import sys

import typer

from cli.shared.output import say_error
from zoo.errors import TrainingFailed, ZooError

#: Verb -> module; each module's function of the verb's name is the command, its docstring the help.
VERBS: dict[str, str] = {
    "ingest": "cli.ingest",
    "ls": "cli.ls",
    "show": "cli.show",
    "rm": "cli.rm",
    "export": "cli.export",
    "verify": "cli.verify",
    "gc": "cli.gc",
    "pack": "cli.pack",
    "compose": "cli.compose",
    "eval": "cli.eval",
    "experiment": "cli.experiment",
    "stitch": "cli.stitch",
    "compare": "cli.compare",
    "delta": "cli.delta",
    "surrogate": "cli.surrogate",
    "exits": "cli.exits",
    "profile": "cli.profile",
    "generate": "cli.generate",
    "serve": "cli.serve",
    "bench": "cli.bench",
    "simulate": "cli.simulate",
    "top": "cli.top",
    "demo": "cli.demo",
}


def build() -> typer.Typer:
    """The application with every verb of the table."""
    app = typer.Typer(
        name="zoo",
        help="Cut models into shared blocks, keep every weight once, serve them together.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for verb, module in VERBS.items():
        app.command(verb)(getattr(importlib.import_module(module), verb))
    return app


def main(argv: list[str] | None = None) -> None:
    """Run one command and exit with its code. Expected errors are one line; unexpected ones keep their traceback."""
    try:
        code = build()(args=argv, standalone_mode=True)
    except ZooError as error:
        say_error(str(error))
        sys.exit(1 if isinstance(error, TrainingFailed) else 2)
    except BrokenPipeError:
        sys.exit(0)
    sys.exit(code or 0)
