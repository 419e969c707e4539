"""Output of a benchmark's document: a file with every request, a plot, one JSON document or a printed table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from cli.shared.output import human_bytes, print_json, print_table, say
from zoo.errors import InputError


def deliver(document: Mapping[str, Any], as_json: bool, output: Path | None, plot: Path | None) -> None:
    """Write and print the document. Exit code 1 if a target answered nothing or not all rounds were run.

    Raises InputError if a file cannot be written.
    """
    if output is not None:
        _write(output, json.dumps(document, indent=1, allow_nan=False) + "\n")
    if plot is not None:
        from cli.bench.plot import plot_bench

        plot_bench(document, plot)
    if as_json:
        print_json(
            {
                **document,
                "runs": [{key: value for key, value in run.items() if key != "answers"} for run in document["runs"]],
            }
        )
    else:
        show(document)
    if document["interrupted"] or any(not _completed(document, index) for index in range(len(document["targets"]))):
        raise typer.Exit(1)


def _write(path: Path, text: str) -> None:
    """Write a file atomically."""
    beside = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        beside.unlink(missing_ok=True)


def _completed(document: Mapping[str, Any], target: int) -> int:
    return sum(run["completed"] for run in document["runs"] if run["target"] == target)


def show(document: Mapping[str, Any]) -> None:
    """Print a line per target, notes about failures, and the ratios of two targets."""
    headings = (
        "TARGET",
        "REQ/S",
        "TOK/S",
        "GOODPUT/S",
        "TTFT ms 50/95/99",
        "TPOT ms 50/95/99",
        "E2E ms 50/95/99",
        "ERRORS",
        "MEMORY",
    )
    print_table(headings, [_line(document, index) for index in range(len(document["targets"]))])
    for run in document["runs"]:
        if run["errors"]:
            kinds = ", ".join(f"{count} x {kind}" for kind, count in run["errors"].items())
            say(
                f"note: {document['targets'][run['target']]['name']}, round {run['round'] + 1}: {kinds}; the first: "
                f"{run['first_error']}"
            )
    if ratios := document.get("ratios"):
        first, second = (target["name"] for target in document["targets"])
        print(f"\n{first} over {second}, {document['rounds']} alternating pairs: median (least to greatest)")
        rows = [
            (name, f"{found['median']:.2f}", f"({found['low']:.2f} to {found['high']:.2f})")
            for name, found in ratios.items()
        ]
        print_table(("FIGURE", "RATIO", "SPREAD"), rows)


def _line(document: Mapping[str, Any], index: int) -> tuple[str, ...]:
    target = document["targets"][index]
    figures = target["typical"]
    errors = sum(sum(run["errors"].values()) for run in document["runs"] if run["target"] == index)
    rates = (f"{figures[name]:.1f}" for name in ("requests_per_second", "tokens_per_second", "goodput"))
    latencies = (_latency(figures, name) for name in ("ttft", "tpot", "e2e"))
    return (target["name"], *rates, *latencies, str(errors), _memory(target["memory"]))


def _memory(held: Mapping[str, int | None]) -> str:
    """Return a server's peak memory, or the bytes that an engine in this process reports.

    The process's peak is not shown, since both targets may run in it.
    """
    if (peak := held.get("server_peak")) is not None:
        return human_bytes(peak)
    if (weights := held.get("weights")) is not None:
        return f"{human_bytes(weights)} + {human_bytes(held.get('kv_pool') or 0)}"
    return "-"


def _latency(figures: Mapping[str, float], name: str) -> str:
    values = [figures.get(f"{name}.{part}") for part in ("median", "p95", "p99")]
    return " / ".join("-" if value is None else f"{value * 1000:.1f}" for value in values)
