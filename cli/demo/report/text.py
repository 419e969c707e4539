"""Format the results of the demo's steps as text and as one JSON document."""

from __future__ import annotations

import io
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cli.demo.family import Trained
from cli.demo.lessons import Curriculum
from cli.demo.recipe import Recipe
from cli.demo.remakes import Remade
from cli.demo.report.picture import StepPicture, draw
from cli.demo.serving.ask import DemoAnswer, Together
from cli.demo.sharing import Shared, Sharing
from cli.shared.output import human_bytes


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


def opening(recipe: Recipe, curriculum: Curriculum) -> str:
    return f"Learning: {len(recipe.members)} models from {curriculum.summary}"


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
            "Sharing: all of them in one zoo",
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
    answers = _chats(served.answers) if served.answers[0].chat else "\n".join(map(_answer, served.answers))
    return "\n".join(
        (
            f"Asking: `zoo serve` answered OpenAI's client at {served.url} after {served.start_seconds:.0f} s",
            answers,
            "Together: one batch across models",
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


def _chats(answers: Sequence[DemoAnswer]) -> str:
    """Return the answers by question, one model below the other."""
    width = max(len(answer.model) for answer in answers)
    lines = []
    for question in dict.fromkeys(answer.prompt for answer in answers):
        lines.append(f"   {question}")
        for answer in answers:
            if answer.prompt == question:
                text = answer.text.strip().replace("\n", "\n" + " " * (width + 7))
                lines.append(f"     {answer.model:<{width}}  {text}")
        lines.append("")
    tokens, seconds = sum(answer.tokens for answer in answers), sum(answer.seconds for answer in answers)
    return "\n".join((*lines, f"   {len(answers)} answers, {tokens} tokens, one after the other in {seconds:.1f} s\n"))


def remade(made: Remade) -> str:
    """Return what was compared, composed and rewritten."""
    comparison, delta = made.comparison, made.delta
    last = comparison.pairs[-1]
    control = "" if comparison.control is None else f", against random weights {comparison.control:.2f}"
    runs = ", ".join(f"layers {run.lo}-{run.hi - 1} of {run.model}" for run in made.composition.runs)
    return "\n".join(
        (
            "Remaking: new models from stored blocks, without training",
            f"   compared  {comparison.a} and {comparison.b}: similarity {comparison.mean:.2f} over the layers, "
            f"{last.similarity:.2f} at the last{control}",
            f"             plot: {made.plot}",
            f"   composed  {made.composed.model}: {runs}; {made.composed.bytes_new} new bytes of weights",
            f"   delta     {delta.variant}: {human_bytes(delta.bytes)} instead of {human_bytes(delta.bytes_exact)}, "
            f"similarity {delta.similarity:.3f} to the exact model (the base's: {delta.base_similarity:.3f})",
            "",
        )
    )


def closing(recipe: Recipe, folder: Path, store: Path, seconds: float) -> str:
    option = "" if store == Path("zoo_store") else f" --store {shlex.quote(str(store))}"
    first, last = recipe.members[0], recipe.members[-1]
    sample = "The capital of France is" if recipe.questions else "class Queue:"
    return "\n".join(
        (
            f"Done in {seconds:.0f} s. Models, plots and report.json are in {folder}, the zoo is in {store}.",
            "Try next:",
            f"   zoo ls{option}",
            f"   zoo show {last.name}{option}",
            f"   zoo generate {first.name} '{sample}' --max-tokens 80 --temperature 0.6{option}",
            f"   zoo serve{option}",
            f"   zoo export {last.name} my_copy{option}",
        )
    )


def document(
    curriculum: Curriculum,
    family: Sequence[Trained],
    sharing: Sharing,
    plots: Sequence[Path],
    remade: Remade | None,
    served: Served | None,
) -> dict[str, object]:
    """Return the report's JSON document.

    `remakes` is None if nothing was made in the store, `serving` if no server was started.
    """
    return {
        "corpus": curriculum.document,
        "models": [asdict(trained) for trained in family],
        "sharing": _sharing_document(sharing),
        "plots": [str(plot) for plot in plots],
        "remakes": None if remade is None else _remade_document(remade),
        "serving": None if served is None else _served_document(served),
    }


def _remade_document(made: Remade) -> dict[str, object]:
    comparison, delta = made.comparison, made.delta
    return {
        "compared": {
            "a": comparison.a,
            "b": comparison.b,
            "mean": comparison.mean,
            "control": comparison.control,
            "layers": [pair.similarity for pair in comparison.pairs],
            "seconds": round(comparison.seconds, 1),
            "plot": str(made.plot),
        },
        "composed": {"model": made.composed.model, "blocks": made.composed.blocks, "bytes": made.composed.bytes_new},
        "delta": {
            "variant": delta.variant,
            "rank": delta.rank,
            "similarity": delta.similarity,
            "base_similarity": delta.base_similarity,
            "bytes": delta.bytes,
            "bytes_exact": delta.bytes_exact,
        },
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
