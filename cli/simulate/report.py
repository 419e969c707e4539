"""Output of a study's document: a folder with report and plots, one JSON document, or printed tables."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from cli.shared.output import human_bytes, print_json, print_table, say
from zoo.errors import InputError

_HEADINGS = ("CASE", "POLICY", "DONE", "P50 s", "P95 s", "TOK/S", "BUSY", "MOVED", "WEIGHTS", "KV MAX", "REAL s")


def deliver(document: Mapping[str, Any], as_json: bool, out: Path | None) -> None:
    """Write and print the document. Exit code 1 if a request was not answered.

    Raises InputError if a file cannot be written.
    """
    if out is not None:
        from cli.simulate.plot import plot_study

        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / "report.json").write_text(json.dumps(document, indent=1, allow_nan=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise InputError(f"{out} cannot be written: {error.strerror}") from None
        plot_study(document, out)
    if as_json:
        print_json(document)
    else:
        show(document)
    if any(policy["errors"] for case in document["cases"] for policy in case["policies"].values()):
        raise typer.Exit(1)


def show(document: Mapping[str, Any]) -> None:
    """Print a line per run, the ratios, and the paper's numbers."""
    print_table(
        _HEADINGS,
        [_line(case["label"], name, policy) for case in document["cases"] for name, policy in case["policies"].items()],
    )
    for case in document["cases"]:
        for pair, found in case["ratios"].items():
            values = ", ".join(f"{name} {value:.2f}" for name, value in found.items())
            say(f"{case['label']}{': ' if case['label'] else ''}{pair}: {values}")
    for figure, values in document["paper"].items():
        say(f"the paper, {figure}: {json.dumps(values)}")
    for case in document["cases"]:
        for name, policy in case["policies"].items():
            for error, count in policy["errors"].items():
                say(f"note: {case['label']} {name}: {count} x {error}")


def _line(label: str, name: str, policy: Mapping[str, Any]) -> tuple[object, ...]:
    latency, memory = policy["latency"], policy["memory"]
    return (
        label,
        name,
        policy["completed"],
        f"{latency['p50']:.2f}",
        f"{latency['p95']:.2f}",
        f"{policy['throughput_tokens']:,.0f}",
        f"{policy['utilisation']:.1%}",
        human_bytes(policy["communication_bytes"]),
        human_bytes(int(memory["weights_mean"])),
        human_bytes(int(memory["kv_max"])),
        f"{policy['real']['seconds']:.1f}",
    )
