"""`zoo ingest`: put a checkpoint into the store."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cli.shared.output import (
    DEFAULT_STORE,
    DatabaseOption,
    JsonOption,
    StoreOption,
    human_bytes,
    print_json,
    say,
)

if TYPE_CHECKING:
    from surgery.ingest.ingest import IngestReport, Progress
    from zoo.api import Zoo
    from zoo.records import Equivalence, ScoredRun


def ingest(
    source: Annotated[str, typer.Argument(help="A folder (Hugging Face, PEFT or Meta's layout), a .gguf or a hub id.")],
    name: Annotated[
        str | None,
        typer.Option(help="What to call the model; the hub id, or the name of the folder or file, by default."),
    ] = None,
    base: Annotated[
        str | None, typer.Option(help="The model it was made from, where that cannot be found out.")
    ] = None,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub id.")] = None,
    allow_pickle: Annotated[
        bool, typer.Option("--allow-pickle", help="Read *.bin weights with torch's restricted loader.")
    ] = False,
    file: Annotated[
        str | None,
        typer.Option(
            help="The GGUF file of a folder or repository that holds several, or other formats too.",
            show_default="the only one, if there is no other format",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Store the tensors of a GGUF file in this dtype: float32, bfloat16, float16.", show_default="float32"
        ),
    ] = None,
    threshold: Annotated[
        float | None,
        typer.Option(
            help="Score a full fine-tune against its base, and cut both where they stop being this alike.",
            show_default="no scoring",
        ),
    ] = None,
    probe: Annotated[
        str | None,
        typer.Option(
            help="Score on this text (see zoo compare); --threshold is 0.98 then.", show_default="the standard library"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Where models are scored: cpu, cuda.")] = "cpu",
    store: StoreOption = DEFAULT_STORE,
    database: DatabaseOption = None,
    as_json: JsonOption = False,
) -> None:
    """Put a checkpoint into the zoo: only what no stored model has takes space."""
    from zoo.api import Zoo

    scoring = _Scoring.from_options(threshold, probe, device)
    with Zoo(store, database) as zoo:
        with _progress(silent=as_json) as progress:
            report = zoo.ingest(source, name, base, revision, allow_pickle, progress, file, dtype)
        alike = () if scoring is None else scoring.run(zoo, report.model, silent=as_json)
        report = dataclasses.replace(report, blocks=len(zoo.model(report.model).chain))
    if as_json:
        print_json({**dataclasses.asdict(report), "equivalents": [_document(pair) for pair in alike]})
        return
    _print(report)
    for pair in alike:
        print(
            f"  components {_span(pair.b)} are equivalent to {_span(pair.a)} of {pair.a.model}: {pair.similarity:.4f}"
        )


@dataclass(frozen=True)
class _Scoring:
    """Settings for scoring a fine-tune after its ingest. Without them no scoring happens, and no torch is needed."""

    threshold: float
    probe: str | None
    device: str

    @classmethod
    def from_options(cls, threshold: float | None, probe: str | None, device: str) -> _Scoring | None:
        """Return the settings, None if no scoring was requested.

        Raises InputError for wrong values before gigabytes are read.
        """
        if threshold is None and probe is None:
            return None
        from surgery.scoring.equate import DEFAULT_THRESHOLD, check_threshold

        chosen = DEFAULT_THRESHOLD if threshold is None else threshold
        check_threshold(chosen, probe)
        return cls(chosen, probe, device)

    def run(self, zoo: Zoo, name: str, silent: bool) -> tuple[Equivalence, ...]:
        """Score the new model against its base and return the equivalences.

        A model that cannot be scored stays in the store; the reason is printed.
        """
        from cli.shared.progress import counting, hush
        from surgery.scoring.compare import CompareSettings
        from zoo.errors import Incomparable, NotServable

        hush()
        settings = CompareSettings(source=self.probe, control=False, device=self.device)
        try:
            with counting("scoring", silent) as progress:
                return zoo.equate(name, None, self.threshold, settings, progress)
        except (Incomparable, NotServable) as error:
            say(f"note: {error}")
            return ()


def _document(pair: Equivalence) -> dict[str, Any]:
    return {
        "model": pair.a.model,
        "a": [pair.a.lo, pair.a.hi],
        "b": [pair.b.lo, pair.b.hi],
        "similarity": pair.similarity,
        "lowest": pair.metrics["lowest"],
    }


def _span(run: ScoredRun) -> str:
    return f"{run.lo}-{run.hi - 1}"


def _print(report: IngestReport) -> None:
    for note in report.notes:
        say(f"note: {note}")
    made = f"{report.kind} of {report.base}" if report.base else report.kind
    print(
        f"{report.model}: {made}, {report.family}, {_count(report.components, 'component')} in "
        f"{_count(report.blocks, 'block')}"
    )
    print(
        f"  {report.tensors.new:,} of {_count(report.tensors.total, 'tensor')} new, "
        f"{human_bytes(report.bytes.new)} of {human_bytes(report.bytes.total)}"
    )
    print(f"  {report.seconds:.1f} s, peak memory {human_bytes(report.peak_rss_bytes)}")


def _count(number: int, word: str) -> str:
    return f"{number:,} {word}" if number == 1 else f"{number:,} {word}s"


@contextmanager
def _progress(silent: bool) -> Iterator[Progress | None]:
    """Show a bar on standard error while bytes are stored; nothing if it is not a terminal."""
    if silent or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = ("storing", BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("storing", total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
