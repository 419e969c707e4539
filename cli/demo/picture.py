"""Reads a server's trace and draws, as text, one step of the engine that ran rows of several models together.

Knows the trace's `segment.run` events (models, seqs, layers, components per step) and nothing of servers.
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
    """One segment, run once: its place in the depth of the models, and the rows it ran for."""

    step: int
    layers: tuple[int | None, ...]
    components: int
    models: tuple[str, ...]
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class StepPicture:
    """One iteration of the engine: its runs in order."""

    number: int
    runs: tuple[SegmentBox, ...]

    @property
    def rows(self) -> int:
        """Rows of the whole step: each passes the embedding once."""
        return sum(run.rows for run in self.runs if run.layers[0] is None and len(run.layers) > 1)

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(sorted({model for run in self.runs for model in run.models}))

    @property
    def widest(self) -> SegmentBox:
        """The run that served most models at once; of those, the one with most rows."""
        return max(self.runs, key=lambda run: (len(run.models), run.rows, run.components))


def read_runs(trace: Path) -> list[SegmentBox]:
    """All segment runs of a trace file, in order. A last line that was cut off is left out."""
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
    """The step with the run that served most models, most rows among equals; None without any run."""
    steps: dict[int, list[SegmentBox]] = defaultdict(list)
    for run in runs:
        steps[run.step].append(run)
    found = [StepPicture(number, tuple(inside)) for number, inside in steps.items()]
    return max(found, key=lambda step: (len(step.widest.models), step.widest.rows), default=None)


def draw(step: StepPicture) -> str:
    """The step as lines of text: which part, how many rows of how many models it was run for at once, and whose."""
    widest = max(run.rows for run in step.runs)
    return "\n".join(_line(run, widest) for run in step.runs)


def _line(run: SegmentBox, widest: int) -> str:
    bar = "█" * max(1, round(_BAR * run.rows / widest))
    rows = f"{_count(run.rows, 'row')} of {_count(len(run.models), 'model')} in one run"
    return f"   {place(run.layers):<27} {bar:<{_BAR}} {rows}: {', '.join(run.models)}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"


def place(layers: Sequence[int | None]) -> str:
    """What a segment covers: `embedding, layers 0-3`, `layer 2`, `layers 4-5, head`. None stands for embedding and
    head.
    """
    inside = [layer for layer in layers if layer is not None]
    if not inside:
        return "embedding or head"
    lo, hi = min(inside), max(inside)
    middle = f"layers {lo}-{hi}" if lo != hi else f"layer {lo}"
    return ("embedding, " if layers[0] is None else "") + middle + (", head" if layers[-1] is None else "")
