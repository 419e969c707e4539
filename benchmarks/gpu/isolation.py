"""Run checks one after the other, each in a process of its own with a time limit, and report all of them.

A CUDA error makes every later call of a process fail, and a hanging kernel cannot be ended from within. So a check that
fails, hangs or dies costs its own result only. A check writes its values to a file as JSON; its output goes to a log.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "failed", "timed out", "skipped"]
#: Seconds of the budget below which no further check is started.
_LEAST_S = 5.0
#: Lines of a failed check's log that its report shows.
_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Check:
    """One check.

    Fields:
        run: `module:function`, imported in the check's process only. Takes the run's settings; returns values for the
            report; raises if something is wrong.
        limit_s: Seconds that it may take, the start of its process included.
        needs: Checks without which it is skipped.
    """

    name: str
    run: str
    limit_s: float
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunSettings:
    """What all checks of a run share.

    Fields:
        folder: Where models, logs and results lie.
        small: Tiny shapes, for a machine without a GPU.
    """

    folder: Path
    device: str = "cuda"
    small: bool = False


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. `why`: the end of its log if it has not passed, or why it was skipped."""

    name: str
    status: Status
    seconds: float = 0.0
    values: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


def run_checks(
    checks: Sequence[Check], command: Callable[[str], Sequence[str]], settings: RunSettings, budget_s: float,
    tell: Callable[[CheckResult], object] = lambda result: None,
) -> list[CheckResult]:  # fmt: skip
    """Run all checks within the budget and return their results, in order.

    Args:
        command: Returns the command line that runs one check, by name.
        tell: Receives each result as soon as it is known.
    """
    end, results = time.monotonic() + budget_s, dict[str, CheckResult]()
    for check in checks:
        left = end - time.monotonic()
        lacking = [name for name in check.needs if name in results and results[name].status != "passed"]
        if lacking:
            result = CheckResult(check.name, "skipped", why=f"it needs: {', '.join(lacking)}")
        elif left < _LEAST_S:
            result = CheckResult(check.name, "skipped", why="the time was used up")
        else:
            result = _run_alone(check, command(check.name), settings.folder, min(check.limit_s, left))
        results[check.name] = result
        tell(result)
    return list(results.values())


def _run_alone(check: Check, command: Sequence[str], folder: Path, limit_s: float) -> CheckResult:
    """Run a check's process and return its result."""
    log, begin = folder / f"{check.name}.log", time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = None
    seconds = round(time.monotonic() - begin, 1)
    if code is None:
        return CheckResult(check.name, "timed out", seconds, why=f"no end after {limit_s:.0f} s; {_end_of(log)}")
    values = _values_of(folder, check.name)
    if code or values is None:
        return CheckResult(check.name, "failed", seconds, values or {}, f"exit code {code}; {_end_of(log)}")
    return CheckResult(check.name, "passed", seconds, values)


def run_one(check: Check, settings: RunSettings) -> None:
    """Run one check in this process and write its values. Raises what the check raises."""
    module, _, function = check.run.partition(":")
    values: Mapping[str, Any] = getattr(importlib.import_module(module), function)(settings)
    _path(settings.folder, check.name).write_text(json.dumps(dict(values), indent=1) + "\n")


def report_of(results: Sequence[CheckResult], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return the report as a document."""
    counts = {
        status: sum(each.status == status for each in results)
        for status in ("passed", "failed", "timed out", "skipped")
    }
    return {"benchmark": "gpu bring-up", **about, "counts": counts, "checks": [asdict(each) for each in results]}


def table_of(results: Sequence[CheckResult]) -> str:
    """Return the report as text: one line per check with its values, then the ends of the logs of failed ones."""
    wide = max(len(each.name) for each in results)
    lines = []
    for each in results:
        said = ", ".join(f"{key} {_shown(value)}" for key, value in each.values.items())
        lines.append(f"{each.name:<{wide}}  {each.status:<9} {each.seconds:6.1f} s  {said}".rstrip())
    for each in results:
        if each.status != "passed":
            lines += ["", f"{each.name}: {each.status}", *(f"    {line}" for line in each.why.splitlines())]
    return "\n".join(lines)


def own_command(settings: RunSettings) -> Callable[[str], Sequence[str]]:
    """Return what makes the command line of a check's process."""
    base = [
        sys.executable,
        "-m",
        "benchmarks.gpu_bringup",
        "--folder",
        str(settings.folder),
        "--device",
        settings.device,
    ]
    return lambda name: [*base, *(["--small"] if settings.small else []), "--check", name]


def _shown(value: object) -> str:
    if isinstance(value, Mapping):
        return "(" + ", ".join(f"{key} {_shown(each)}" for key, each in value.items()) + ")"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _path(folder: Path, name: str) -> Path:
    return folder / f"{name}.json"


def _values_of(folder: Path, name: str) -> dict[str, Any] | None:
    try:
        found = json.loads(_path(folder, name).read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return "the end of its log:\n" + "\n".join(lines[-_SHOWN:]) if lines else "its log is empty"
