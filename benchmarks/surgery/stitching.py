"""Measure stitches of a family: Table 3 and Figure 13 of BlockLLM with the available models.

    python -m benchmarks.surgery.stitching --store DIR --pair A:B [--pair B:A …] [--steps N] [--output FILE]
        [--plots DIR]

Per pair:
- the stitch's training: seconds, similarity at trained and at other places, against its least-squares start and against
  a stitch without the position;
- per place, the stitched chain against its two parents: accuracy and perplexity on held-out text, weights, operations
  and measured seconds per token.

Each pair is also a point of the curves over model size and over the similarity of the two models. A stitch that the
store has with the same settings is not trained again.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from cli.stitch import plain_lines
from stitch import StitchSettings, train_stitch
from stitch.plot import LIKENESS, plot_curve, plot_stitch
from surgery.chains.compose import compose
from surgery.chains.composition import parse
from surgery.modules.stack import Stack, open_stack
from zoo import Zoo
from zoo.manifest import ModelManifest

_PROMPT, _TOKENS, _ROUNDS = 16, 32, 3


@torch.inference_mode()
def seconds_per_token(stack: Stack) -> float:
    """Return the seconds per token of greedy decoding with a cache at batch 1, the best of several rounds.

    The same code runs chains and whole models.
    """
    ids = torch.arange(5, 5 + _PROMPT, device=stack.device).unsqueeze(0)
    best = float("inf")
    for _ in range(_ROUNDS):
        cache = DynamicCache()
        token = _next(stack, ids, cache)
        begin = time.perf_counter()
        for _ in range(_TOKENS):
            token = _next(stack, token, cache)
        int(token)  # waits for the device
        best = min(best, (time.perf_counter() - begin) / _TOKENS)
    return best


def _next(stack: Stack, ids: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    hidden = stack.run(ids, stack.course(ids, cache=cache), 0, stack.end)
    return stack.head(hidden[:, -1:]).argmax(-1)


def cost(zoo: Zoo, manifest: ModelManifest) -> dict[str, float]:
    """Return a model's weights, operations per token and measured seconds per token.

    An operation count is two per weight of each matrix that is multiplied.
    """
    elements = {tensor.digest: tensor for tensor in manifest.tensors}
    multiplied = sum(
        elements[digest].elements
        for placed in manifest.components
        if placed.component.kind != "embedding"
        for _, digest in placed.component.tensors
        if len(elements[digest].shape) == 2
    )
    return {
        "params": sum(tensor.elements for tensor in manifest.tensors),
        "flops_per_token": 2 * multiplied,
        "seconds_per_token": seconds_per_token(open_stack(zoo.store, manifest)),
    }


def chain_cost(zoo: Zoo, document: Mapping[str, Any], point: Mapping[str, Any]) -> dict[str, float]:
    """Return the costs of the chain with the stitch at a place. The chain is composed, measured and removed."""
    a, b, name = document["a"], document["b"], f"bench-{document['stitch']}-{point['a_layer']}-{point['b_layer']}"
    layers = 1 + max(placed.layer for placed in zoo.model(b).manifest.components if placed.layer is not None)
    slices = ((a, [0, point["a_layer"] + 1]), (b, [point["b_layer"], layers]))
    compose(
        zoo.store,
        parse({"slices": [{"sources": [{"model": model, "layer_range": bounds}]} for model, bounds in slices]}),
        name,
    )
    try:
        return cost(zoo, zoo.model(name).manifest)
    finally:
        zoo.remove(name)


def pair_report(zoo: Zoo, a: str, b: str, settings: StitchSettings, device: str) -> dict[str, Any]:
    """Return a stitch's document with costs added. The stitch is trained if the store has none with these settings."""
    document = dict(train_stitch(zoo, a, b, settings, device=device, progress=plain_lines()).document)
    document["parents"] = {
        key: {**of, **cost(zoo, zoo.model(document[key]).manifest)} for key, of in document["parents"].items()
    }
    document["points"] = [{**point, **chain_cost(zoo, document, point)} for point in document["points"]]
    document["claims"] = claims(document)
    return document


def claims(document: Mapping[str, Any]) -> dict[str, bool | None]:
    """Return each claim of the benchmark and whether it holds."""
    points, parents, compared = document["points"], list(document["parents"].values()), document["compared"]
    cheapest, dearest = (choose(parent["flops_per_token"] for parent in parents) for choose in (min, max))
    unseen, without = document["similarity_unseen"], compared.get("without_position")
    return {
        "trained places at least 0.96": document["similarity_seen"] >= 0.96,
        "other places at least 0.95": None if unseen is None else unseen >= 0.95,
        "better than the least-squares start": document["similarity_mean"] > compared["start"]["similarity_mean"],
        "better than without the position": None
        if without is None
        else document["similarity_mean"] > without["similarity_mean"],
        "accuracy between the parents' or above": all(
            p["accuracy"] >= min(parent["accuracy"] for parent in parents) for p in points
        ),
        "operations between the parents'": all(cheapest <= p["flops_per_token"] <= dearest for p in points),
    }


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return Table 3, and a table per pair as in Figure 13."""
    lines = [
        "| stitch | widths | seconds | trained places | other places | start | without position |",
        "|---|---|---|---|---|---|---|",
    ]
    for report in reports:
        compared = report["compared"]
        cells = (
            f"{report['a']} to {report['b']}",
            "{} to {}".format(*report["dims"]),
            f"{report['seconds']:.0f}",
            _figure(report["similarity_seen"]),
            _figure(report["similarity_unseen"]),
            _figure(compared["start"]["similarity_mean"]),
            _figure(compared.get("without_position", {}).get("similarity_mean")),
        )
        lines.append(f"| {' | '.join(cells)} |")
    for report in reports:
        lines += [
            "",
            "| model | similarity | accuracy | perplexity | weights (M) | Mflop per token | ms per token |",
            "|---|---|---|---|---|---|---|",
        ]
        rows = [(report[key], report["parents"][key].get("similarity"), report["parents"][key]) for key in ("a", "b")]
        rows += [
            (f"{p['a_layer']}:{p['b_layer']}{'' if p['seen'] else ' (not trained)'}", p["similarity"], p)
            for p in report["points"]
        ]
        lines += [f"| {name} | {_figure(similarity)} | {_costs(row)} |" for name, similarity, row in rows]
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _costs(row: Mapping[str, float]) -> str:
    size = f"{row['params'] / 1e6:.2f} | {row['flops_per_token'] / 1e6:.2f} | {1e3 * row['seconds_per_token']:.2f}"
    return f"{row['accuracy']:.4f} | {row['perplexity']:.1f} | {size}"


def main() -> None:
    usual = StitchSettings()
    parser = argparse.ArgumentParser(description="Stitches of a family.")
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--pair", action="append", required=True, metavar="A:B")
    parser.add_argument("--steps", type=int, default=usual.steps)
    parser.add_argument("--rate", type=float, default=usual.rate)
    parser.add_argument("--measured", type=int, default=usual.measured)
    parser.add_argument("--text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--plots", type=Path)
    args = parser.parse_args()
    settings = StitchSettings(text=args.text, steps=args.steps, rate=args.rate, measured=args.measured, controls=True)
    with Zoo(args.store, create=False) as zoo:
        pairs = [(a, b) for a, b in (pair.split(":", 1) for pair in args.pair)]
        reports = [pair_report(zoo, a, b, settings, args.device) for a, b in pairs]
    if args.plots:
        for report in reports:
            plot_stitch(report, args.plots / f"{report['stitch']}.png")
        plot_curve(reports, args.plots / "stitching-by-size.png")
        plot_curve(reports, args.plots / "stitching-by-likeness.png", LIKENESS)
    text = json.dumps(
        {"benchmark": "stitching", "torch": version("torch"), "threads": torch.get_num_threads(), "pairs": reports},
        indent=2,
    )
    if args.output:
        args.output.write_text(text + "\n")
    print(markdown(reports))
    for report in reports:
        print(
            f"\n{report['a']} to {report['b']}: "
            + ", ".join(f"{claim}: {held}" for claim, held in report["claims"].items())
        )


if __name__ == "__main__":
    main()
