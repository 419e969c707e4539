"""Format the results of the demo's steps as text and as one JSON document."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cli.demo.ask import DemoAnswer, Together
from cli.demo.family import Trained
from cli.demo.picture import StepPicture, draw
from cli.demo.recipe import Recipe
from cli.demo.sharing import Shared, Sharing
from cli.shared.output import human_bytes
from surgery.text.library import Corpus


@dataclass(frozen=True, slots=True)
class Served:
    """Results of the serving step: every model queried in turn, then all at once.

    Fields:
        start_seconds: Time until the server was ready.
        step: The step with the most models in one run; None without one.
        trace: Path of the trace file.
    """

    url: str
    start_seconds: float
    answers: tuple[DemoAnswer, ...]
    together: Together
    step: StepPicture | None
    trace: str
    exit_code: int | None


def opening(recipe: Recipe, corpus: Corpus) -> str:
    text = f"{len(corpus.documents)} files ({human_bytes(corpus.nbytes)}) of Python's standard library"
    return f"1. Learning: {len(recipe.members)} models from {text}"


def learned(family: Sequence[Trained]) -> str:
    rows = [(t.name, t.kind, t.base or "", t.subject, f"{t.perplexity:.1f}", _before(t), _how(t)) for t in family]
    return _table(("model", "kind", "base", "learned from", "perplexity", "its base's", "time"), rows, right=(4, 5, 6))


def _before(trained: Trained) -> str:
    return "" if trained.perplexity_before is None else f"{trained.perplexity_before:.1f}"


def _how(trained: Trained) -> str:
    return "reused" if trained.reused else f"{trained.seconds:.0f} s"


def shared(sharing: Sharing, plots: Sequence[Path]) -> str:
    rows = [
        (m.name, m.kind, m.base or "", str(m.blocks), *(human_bytes(size) for size in (m.complete, m.files, m.added)))
        for m in sharing.models
    ]
    total = ("", "", "", "", human_bytes(sharing.complete), human_bytes(sharing.files), human_bytes(sharing.stored))
    table = _table(
        ("model", "kind", "base", "blocks", "complete", "its files", "added"), [*rows, total], right=(3, 4, 5, 6)
    )
    return "\n".join(
        (
            "2. Sharing: all of them in one zoo",
            table,
            (
                f"   {human_bytes(sharing.stored)} stored: {_saved(sharing.stored, sharing.complete)} less than a "
                "complete copy per model, "
                f"{_saved(sharing.stored, sharing.files)} less than the files"
            ),
            *(f"   plot: {plot}" for plot in plots),
            "",
        )
    )


def asked(served: Served) -> str:
    answers = "\n".join(_answer(answer) for answer in served.answers)
    return "\n".join(
        (
            f"3. Asking: `zoo serve` answered OpenAI's client at {served.url} after {served.start_seconds:.0f} s",
            answers,
            "4. Together: one batch across models",
            (
                f"   {served.together.requests} requests for {served.together.models} models at once: "
                f"{served.together.tokens:,} tokens in "
                f"{served.together.seconds:.1f} s, {served.together.tokens_per_second:.0f} tokens/s"
            ),
            _step(served.step),
            f"   every event: {served.trace}",
            f"   the server drained on SIGTERM, exit code {served.exit_code}",
            "",
        )
    )


def _step(step: StepPicture | None) -> str:
    if step is None:
        return "   the trace has no step"
    head = (
        f"   step {step.number} of the engine, {step.rows} sequences of {len(step.models)} models; each line ran "
        "once for all its rows"
    )
    return f"{head}\n{draw(step)}"


def _answer(answer: DemoAnswer) -> str:
    text = (answer.prompt + answer.text).rstrip().replace("\n", "\n   │ ")
    how = ", streamed" if answer.streamed else ""
    return f"   {answer.model} ({answer.tokens} tokens in {answer.seconds:.2f} s{how})\n   │ {text}\n"


def closing(recipe: Recipe, folder: Path, store: Path, seconds: float) -> str:
    option = "" if store == Path("zoo_store") else f" --store {shlex.quote(str(store))}"
    first, mail = recipe.members[0], recipe.members[-1]
    return "\n".join(
        (
            f"Done in {seconds:.0f} s. Models, plots and report.json are in {folder}, the zoo is in {store}.",
            "Try next:",
            f"   zoo ls{option}",
            f"   zoo show {mail.name}{option}",
            f"   zoo generate {first.name} 'class Queue:' --max-tokens 80 --temperature 0.6{option}",
            f"   zoo serve{option}",
            f"   zoo export {mail.name} my_copy{option}",
        )
    )


def document(
    corpus: Corpus, family: Sequence[Trained], sharing: Sharing, plots: Sequence[Path], served: Served | None
) -> dict[str, object]:
    """Return the report's JSON document. `serving` is None if no server was started."""
    return {
        "corpus": {"files": len(corpus.documents), "bytes": corpus.nbytes, "sha256": corpus.digest},
        "models": [asdict(trained) for trained in family],
        "sharing": _sharing_document(sharing),
        "plots": [str(plot) for plot in plots],
        "serving": None if served is None else _served_document(served),
    }


def _sharing_document(sharing: Sharing) -> dict[str, object]:
    return {
        "models": [_shared_document(model) for model in sharing.models],
        "bytes_complete": sharing.complete,
        "bytes_files": sharing.files,
        "bytes_stored": sharing.stored,
        "saved": round(1 - sharing.stored / sharing.complete, 4),
    }


def _shared_document(model: Shared) -> dict[str, object]:
    return {
        "name": model.name,
        "kind": model.kind,
        "base": model.base,
        "blocks": model.blocks,
        "bytes": model.complete,
        "bytes_files": model.files,
        "bytes_added": model.added,
    }


def _served_document(served: Served) -> dict[str, object]:
    step = served.step
    return {
        "start_seconds": round(served.start_seconds, 2),
        "answers": [asdict(answer) for answer in served.answers],
        "together": {**asdict(served.together), "tokens_per_second": round(served.together.tokens_per_second, 1)},
        "shared_step": None if step is None else {"step": step.number, "runs": [asdict(run) for run in step.runs]},
        "trace": served.trace,
        "exit_code": served.exit_code,
    }


def _saved(part: int, whole: int) -> str:
    return f"{1 - part / whole:.0%}"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int]) -> str:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column, heading in enumerate(headings):
        table.add_column(heading, justify="right" if column in right else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=120).print(table)
    return "\n".join("   " + line.rstrip() for line in out.getvalue().splitlines()) + "\n"
