"""Measure how often served probes are right: forecasts made in prompts' steps beside the lengths of the answers.

    python -m benchmarks.roles.length_probe STORE MODEL [--agents 1] [--number 1800] [--output FILE]

MODEL has a probe (`zoo lengths MODEL --kind probe`). Of the questions that `zoo lengths` asks, those that scored it, of
which it did not learn, are asked of a served model (`--lengths probe`) and answered to the end. `accuracy` at each
granularity is the share of answers in the likeliest bucket, `stored` what the training wrote down.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.reports import deliver
from cli.lengths import request_of
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from cli.serving.source import ZooSource
from runtime.types import SequenceRequest, TraceEvent
from surgery.families.settings import side_json
from surrogates.lengths.buckets import score
from surrogates.lengths.probe_storing import PROBE_ENDING
from surrogates.lengths.prompts import questions_by_kind
from surrogates.lengths.storing import DOCUMENT_FILE
from surrogates.lengths.training import scores_only
from zoo.api import Zoo
from zoo.errors import InputError


class TracedMasses:
    """Forecasts in a trace: masses of the buckets, by sequence."""

    def __init__(self) -> None:
        self.masses: dict[str, list[float]] = {}

    def emit(self, event: TraceEvent) -> None:
        if event.ev == "length.predicted" and event.seq is not None:
            self.masses[event.seq] = list(event.extra["mass"])


def measured(zoo: Zoo, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the figures. Raises RuntimeError if an answer had no forecast."""
    name = zoo.model(model).name
    document = side_json(zoo.store, zoo.model(name + PROBE_ENDING).manifest, DOCUMENT_FILE)
    if document is None:
        raise InputError(f"{name} has no length probe: `zoo lengths {name} --kind probe` makes one")
    options = ServeOptions(agents=args.agents, lengths="probe", decode_admission="peak")
    source, trace = ZooSource(zoo), TracedMasses()
    source.read_tokenizers((name,))
    with start_driver(zoo, options, choose(zoo, [name]), trace=trace) as driver:
        served = source.served(driver.models()[0])
        settings = {"model": name, **document["sampling"], "seed": 0}
        asked: list[SequenceRequest] = []
        for at, question in enumerate(questions_by_kind(args.number)):
            made = request_of(served, f"q{at}", [{"role": "user", "content": question}], settings)
            if made is not None and scores_only(made.prompt):
                asked.append(made)
        lengths = dict.fromkeys((each.seq for each in asked), 0)
        for event in driver.run(asked):
            lengths[event.seq] += event.token is not None
    if lengths.keys() != trace.masses.keys():
        raise RuntimeError(f"{len(lengths)} answers had {len(trace.masses)} forecasts")
    masses, finest = [trace.masses[seq] for seq in lengths], document["edges"][1]
    return {
        "answers": len(lengths),
        "granularity": {
            width: {
                "accuracy": score(masses, list(lengths.values()), [0], finest, int(width)).accuracy,
                "stored": each["accuracy"],
                "majority": each["majority"],
            }
            for width, each in document["granularity"].items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--agents", type=int, default=1)
    parser.add_argument("--number", type=int, default=1800, help="questions that `zoo lengths` was given")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    with Zoo(given.store, create=False) as zoo:
        deliver(measured(zoo, given.model, given), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
