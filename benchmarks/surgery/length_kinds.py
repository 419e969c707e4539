"""Measure how well lengths are predicted for kinds of questions that were not learned from (TI-10).

    python -m benchmarks.surgery.length_kinds STORE MODEL [--number 1800] [--max-tokens 320] [--layers 15,30]
        [--folds 4] [--output FILE]

The model answers the questions that `zoo lengths` asks. In turns a quarter of their kinds is held out, and two
predictors learn from the rest: that of `zoo lengths`, and a probe (ARES, arXiv 2510.13668): logistic regression on the
model's own hidden state of the last prompt token behind some of its layers, for each regularisation. Means over the
turns: accuracy at each granularity, and `majority`, that of the most frequent bucket.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from cli.lengths import answers_of
from surgery.models.load import load_model
from surgery.tensors.pool import stored_tensor
from surrogates.lengths.buckets import edges_of, score
from surrogates.lengths.probe_training import fitted
from surrogates.lengths.prompts import questions_by_kind
from surrogates.lengths.storing import embedding_of
from surrogates.lengths.training import LengthExample, LengthTraining, train_apart
from zoo.api import Zoo

#: Weights of the squared weights in the probe's loss.
_DECAYS = (0.05, 0.2, 0.5)


@torch.inference_mode()
def last_states(model: Any, prompts: Sequence[Sequence[int]], layers: Sequence[int]) -> dict[int, torch.Tensor]:
    """Return the hidden state of each prompt's last token behind each of these layers, [prompts, width]."""
    rows: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for prompt in prompts:
        states = model.base_model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        for layer in layers:
            rows[layer].append(states[layer][0, -1].float())
    return {layer: torch.stack(some) for layer, some in rows.items()}


def measured(zoo: Zoo, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Return the means of all turns."""
    manifest = zoo.model(model).manifest
    kinds = questions_by_kind(args.number)
    asked = [[{"role": "user", "content": text}] for text in kinds]
    limit, widths, examples = answers_of(zoo, manifest, asked, (), args.max_tokens, 0.0, 0, None, None)
    if len(examples) != len(kinds):
        raise RuntimeError("some questions leave no room for an answer: give a lower --max-tokens")
    kind = list(kinds.values())
    finest = widths[0]
    layers = [int(each) for each in args.layers.split(",")]
    embedding = stored_tensor(zoo.store, embedding_of(manifest).digest)
    states = last_states(load_model(zoo.store, manifest, dtype="float32"), [each.prompt for each in examples], layers)
    found: dict[str, dict[int, list[float]]] = {}

    def record(name: str, width: int, value: float) -> None:
        found.setdefault(name, {}).setdefault(width, []).append(value)

    for turn in range(args.folds):
        learned = torch.tensor([each % args.folds != turn for each in kind])
        mine: list[LengthExample] = [each for each, own in zip(examples, learned.tolist(), strict=True) if own]
        rest: list[LengthExample] = [each for each, own in zip(examples, learned.tolist(), strict=True) if not own]
        trained = train_apart(embedding, mine, rest, LengthTraining(widths, limit))
        lengths, before = [each.length for each in rest], [each.length for each in mine]
        for width, each in trained.scores.items():
            record("zoo lengths", width, each.accuracy)
            record("majority", width, each.majority)
        for layer in layers:
            for decay in _DECAYS:
                probe = fitted(states[layer][learned], before, layer, edges_of(finest, limit), decay)
                masses = probe.masses(states[layer][~learned]).tolist()
                for width in widths:
                    name = f"probe behind {layer}, {decay}"
                    record(name, width, score(masses, lengths, before, finest, width).accuracy)
    return {
        name: {str(width): statistics.mean(values) for width, values in some.items()} for name, some in found.items()
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("store", type=Path)
    parser.add_argument("model")
    parser.add_argument("--number", type=int, default=1800)
    parser.add_argument("--max-tokens", type=int, default=320)
    parser.add_argument("--layers", default="15,30")
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args(arguments)
    with Zoo(given.store, create=False) as zoo:
        deliver(measured(zoo, given.model, given), given.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
