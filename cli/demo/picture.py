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
class Run:
    """One segment, run once: its place in the depth of the models, and the rows it ran for."""

    step: int
    kind: str
    layers: tuple[int | None, ...]
    components: int
    models: tuple[str, ...]
    rows: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration of the engine: its runs in order."""

    number: int
    runs: tuple[Run, ...]

    @property
    def rows(self) -> int:
        """Rows of the embedding and of every run that stands at its depth: each row is embedded once."""
        return sum(run.rows for run in self.runs if run.layers[0] is None and run is not self.runs[-1]) or max(run.rows for run in self.runs)

    @property
    def widest(self) -> Run:
        """The run that served most models at once; of those, the one with most rows."""
        return max(self.runs, key=lambda run: (len(run.models), run.rows, run.components))


def read_runs(trace: Path) -> list[Run]:
    """All segment runs of a trace file, in order. A last line that was cut off is left out."""
    return list(_runs(trace.read_text(encoding="utf-8").splitlines()))


def _runs(lines: Iterable[str]) -> Iterable[Run]:
    for line in lines:
        if '"segment.run"' not in line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            continue
        yield Run(
            step=event["step"],
            kind=event["kind"],
            layers=tuple(event["layers"]),
            components=len(event["components"]),
            models=tuple(sorted(set(event["models"]))),
            rows=event["seqs"],
            tokens=event["n"],
        )


def busiest_step(runs: Sequence[Run]) -> Step | None:
    """The step with the run that served most models, most rows among equals; None without any run."""
    steps: dict[int, list[Run]] = defaultdict(list)
    for run in runs:
        steps[run.step].append(run)
    found = [Step(number, tuple(inside)) for number, inside in steps.items()]
    return max(found, key=lambda step: (len(step.widest.models), step.widest.rows), default=None)


def draw(step: Step) -> str:
    """The step as lines of text: where, how many rows of how many models, and whose."""
    widest = max(run.rows for run in step.runs)
    lines = [_line(run, widest) for run in step.runs]
    return "\n".join(lines)


def _line(run: Run, widest: int) -> str:
    bar = "█" * max(1, round(_BAR * run.rows / widest))
    rows = f"{run.rows} row{'s' * (run.rows != 1)} of {len(run.models)} model{'s' * (len(run.models) != 1)} in one run"
    return f"  {place(run):<22} {bar:<{_BAR}} {rows}: {', '.join(run.models)}"


def place(run: Run) -> str:
    """`embedding`, `layers 0-3`, `layer 2 attention`, `head`."""
    inside = [layer for layer in run.layers if layer is not None]
    if not inside:
        return run.kind.replace("lm_head", "head")
    lo, hi = min(inside), max(inside)
    return f"layers {lo}-{hi}" if lo != hi else f"layer {lo} {run.kind}"
