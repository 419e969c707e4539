"""Read a server's trace and draw, as text, one engine step that ran rows of several models together.

It uses the trace's `segment.run` events (models, seqs, layers, components per step).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

_BAR = 24


@dataclass(frozen=True, slots=True)
class SegmentBox:
    """One run of a segment.

    Fields:
        step: Number of the engine's step.
        layers: Layer of each component, None for embedding and head.
        components: Number of components.
        rows: Number of sequences.
        tokens: Tokens of all rows.
    """

    step: int
    layers: tuple[int | None, ...]
    components: int
    models: tuple[str, ...]
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPicture:
    """One step of the engine: its segment runs in order."""

    number: int
    runs: tuple[SegmentBox, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole step: each passes the embedding once."""
        return sum(run.rows for at, run in enumerate(self.runs) if self.starts_rows(at))

    def starts_rows(self, at: int) -> bool:
        """Return whether run `at` begins with the embedding: no run before it had one of its models."""
        before = {model for run in self.runs[:at] for model in run.models}
        run = self.runs[at]
        return run.layers[0] is None and (len(run.layers) > 1 or before.isdisjoint(run.models))

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({model for run in self.runs for model in run.models}))

    @property
    def widest(self) -> SegmentBox:
        """The run with the most models, and among those the most rows."""
        return max(self.runs, key=lambda run: (len(run.models), run.rows, run.components))


def read_runs(trace: Path) -> list[SegmentBox]:
    """Return all segment runs of a trace file, in order. A truncated last line is skipped."""
    return list(_runs(trace.read_text(encoding="utf-8").splitlines()))


def _runs(lines: Iterable[str]) -> Iterable[SegmentBox]:
    for line in lines:
        if '"segment.run"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        yield SegmentBox(
            step=event["step"],
            layers=tuple(event["layers"]),
            components=len(event["components"]),
            models=tuple(sorted(set(event["models"]))),
            rows=event["seqs"],
            tokens=event["n"],
        )


def busiest_step(runs: Sequence[SegmentBox]) -> StepPicture | None:
    """Return the step that contains the run with the most models, then the most rows; None without any run."""
    steps: dict[int, list[SegmentBox]] = defaultdict(list)
    for run in runs:
        steps[run.step].append(run)
    found = [StepPicture(number, tuple(inside)) for number, inside in steps.items()]
    return max(found, key=lambda step: (len(step.widest.models), step.widest.rows), default=None)


def draw(step: StepPicture) -> str:
    """Return the step as lines of text: which part ran, for how many rows of how many models, and the models' names."""
    widest = max(run.rows for run in step.runs)
    return "\n".join(_line(run, step.starts_rows(at), widest) for at, run in enumerate(step.runs))


def _line(run: SegmentBox, begins: bool, widest: int) -> str:
    bar = "█" * max(1, round(_BAR * run.rows / widest))
    rows = f"{_count(run.rows, 'row')} of {_count(len(run.models), 'model')} in one run"
    where = place(run.layers) if run.layers != (None,) else "embedding" if begins else "head"
    return f"   {where:<27} {bar:<{_BAR}} {rows}: {', '.join(run.models)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def place(layers: Sequence[int | None]) -> str:
    """Return what a segment covers: `embedding, layers 0-3`, `layer 2`, `layers 4-5, head`.

    None in `layers` stands for embedding and head.
    """
    inside = [layer for layer in layers if layer is not None]
    if not inside:
        return "embedding or head"
    lo, hi = min(inside), max(inside)
    middle = f"layers {lo}-{hi}" if lo != hi else f"layer {lo}"
    return ("embedding, " if layers[0] is None else "") + middle + (", head" if layers[-1] is None else "")
