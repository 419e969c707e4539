"""Run a preset: every case and policy, one after the other, into one document.

The same seed gives the same document, except for values named `real` and `wall_seconds`, and the same trace of the
first run, byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from runtime.sim.experiments.preset import Case, Preset
from runtime.sim.experiments.run import play
from runtime.sim.results.report import accuracy_of, classes_of, document_of, ratios
from zoo.errors import InputError

#: Values of the first run that the document repeats at its top.
_HEADLINES = ("requests", "events", "virtual_seconds", "latency", "throughput_tokens", "communication_bytes")


def narrowed(preset: Preset, requests: int | None, devices: int | None, policies: Sequence[str]) -> Preset:
    """Return the preset with other sizes and only these policies. Raises InputError."""
    cases = [replace(case, scenario=case.scenario.resized(requests, devices)) for case in preset.cases]
    if policies:
        cases = [replace(case, scenario=_only(case, policies)) for case in cases]
    return replace(preset, cases=tuple(cases))


def run_study(
    preset: Preset,
    seed: int,
    trace: Path | None = None,
    log: Path | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Run all cases of a preset and return the document.

    `trace`, `log`: files for the first run. Raises InputError for an impossible scenario, or a file that cannot be
    written.
    """
    begin = time.perf_counter()
    total = sum(case.scenario.asked.count * len(case.scenario.policies) for case in preset.cases)
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        if progress is not None:
            progress(done, total)

    cases: list[dict[str, Any]] = []
    for case in preset.cases:
        files = (trace, log) if not cases else (None, None)
        cases.append(_case(case, seed, files, count))
    first = next(iter(cases[0]["policies"].values()))
    return {
        "preset": preset.name,
        "title": preset.title,
        "seed": seed,
        **{name: first[name] for name in _HEADLINES},
        "wall_seconds": time.perf_counter() - begin,
        "policies": cases[0]["policies"],
        "axis": preset.axis,
        "cases": cases,
        "paper": dict(preset.paper),
    }


def _case(
    case: Case, seed: int, files: tuple[Path | None, Path | None], count: Callable[[int], None]
) -> dict[str, Any]:
    demand = case.scenario.demand(seed)
    policies: dict[str, Any] = {}
    for name, policy in case.scenario.policies.items():
        trace, log = files if not policies else (None, None)
        played = play(case.scenario, name, demand, trace, log, progress=count)
        policies[name] = {"settings": asdict(policy), **document_of(played), **classes_of(played, demand)}
        if case.scenario.apps.ladder:
            accuracy = dict(zip(case.scenario.apps.ladder, case.scenario.apps.accuracy, strict=True))
            policies[name]["accuracy"] = accuracy_of(played, accuracy)
    names = list(policies)
    return {
        "label": case.label,
        "x": case.x,
        "cluster": asdict(case.scenario.cluster),
        "apps": asdict(case.scenario.apps),
        "asked": asdict(case.scenario.asked),
        "policies": policies,
        "ratios": {f"{names[0]} over {other}": ratios(policies[names[0]], policies[other]) for other in names[1:]},
    }


def _only(case: Case, policies: Sequence[str]) -> Any:
    known = case.scenario.policies
    if unknown := [name for name in policies if name not in known]:
        raise InputError(f"there is no policy {unknown[0]!r} here; there are {', '.join(known)}")
    return replace(case.scenario, policies={name: known[name] for name in policies})
