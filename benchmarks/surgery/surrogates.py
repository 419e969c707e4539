"""Reproduce Table 4 (BL-10): similarity and speed of blocks pruned to half, by method of pruning and recovery.

    python -m benchmarks.surgery.surrogates MODEL_FOLDER [--ratio 0.5] [--steps 150] [--only trained|random]
        [--threads N] [--output FILE]

The rows are the paper's: the 5th attention, the 5th FFN, the 5th layer, layers 5 to 7 (fewer in models with fewer
layers). Per row:
- what is removed;
- similarity after the block and at the model's end on held-out text for each method (Taylor or magnitude; with and
  without closed form and training), against leaving the block out;
- the block's time over that of its surrogate at batch 16, for the trained model and for blocks of larger shapes with
  random weights, where computation and not call overhead dominates.

Ratios are medians over alternating pairs, with quartiles. The paper's speed-ups of 18 to 37 are not possible for half
of a dense block and are not a goal.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from surgery.families.settings import config_of
from surrogates.block import open_subject
from surrogates.making import make_plan, prune_and_recover
from surrogates.material import Material, gather
from surrogates.options import SurrogateOptions
from surrogates.pruning.draft import PruneTarget, pruned_run, target_of
from surrogates.pruning.groups import Part
from surrogates.recovery.recover import RecoverySettings
from surrogates.scoring.agreement import agree
from surrogates.scoring.timing import TimingSettings, measure
from zoo import Zoo

#: (row of the paper's table, part, first and last layer, the paper's removed share and similarity)
ROWS: tuple[tuple[str, Part, tuple[int, int], float, float], ...] = (
    ("5th attention", "attention", (4, 4), 0.4971, 0.70),
    ("5th FFN", "ffn", (4, 4), 0.4983, 0.77),
    ("5th layer", "layer", (4, 4), 0.4979, 0.94),
    ("layers 5-7", "layer", (4, 6), 0.4979, 0.84),
)
#: (importance, closed form, training)
WAYS = (
    ("magnitude", False, "none"),
    ("taylor", False, "none"),
    ("magnitude", True, "none"),
    ("taylor", True, "none"),
    ("taylor", False, "lora"),
    ("taylor", True, "lora"),
    ("taylor", True, "full"),
)
#: Shapes of layers with random weights: the demo's small family, and models of up to about a billion parameters.
SHAPES: dict[str, dict[str, int]] = {
    "hidden 256": {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 8, "num_key_value_heads": 2},
    "hidden 1024": {
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "hidden 2048": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
}


def clipped(layers: tuple[int, int], count: int) -> tuple[int, int]:
    last = min(layers[1], count - 1)
    return min(layers[0], last), last


def trained_rows(folder: Path, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as root, Zoo(Path(root) / "zoo") as zoo:
        zoo.ingest(folder, name="model")
        manifest = zoo.model("model").manifest
        count = 1 + max(placed.layer for placed in manifest.components if placed.layer is not None)
        for row, part, layers, removed, similarity in ROWS:
            target = target_of(manifest, config_of(zoo.store, manifest), clipped(layers, count), part)
            options = SurrogateOptions(
                part=part, ratio=args.ratio, text=args.text, windows=args.windows, device=args.device
            )
            material = gather(zoo, zoo.model("model"), target.layers, (target.lo, target.hi), options)
            yield {
                "row": row,
                "paper": {"removed": removed, "similarity": similarity},
                **one_row(zoo, target, material, options, args),
            }


def one_row(
    zoo: Zoo, target: PruneTarget, material: Material, options: SurrogateOptions, args: argparse.Namespace
) -> dict[str, Any]:
    ways = []
    found: dict[str, Any] = {"layers": target.layers, "part": target.part}
    for importance, refit, how in WAYS:
        recovery = RecoverySettings(how=how, steps=args.steps, rate=4e-3 if how == "lora" else 5e-4)  # type: ignore
        chosen = replace(options, importance=importance, refit=refit, recovery=recovery)  # type: ignore[arg-type]
        begin = time.monotonic()
        plan = make_plan(target, material.subject, material, chosen)
        run, recovered = prune_and_recover(zoo, target, plan, material, chosen, None)
        block = material.subject.block(run)
        agreement = agree(
            material.subject, lambda hidden, ids, block=block: block(hidden, block.course(ids)), material.measure
        )
        seconds = time.monotonic() - begin
        ways.append(
            {
                "importance": importance,
                "refit": refit,
                "recover": how,
                "similarity": agreement.block,
                "similarity_end": agreement.end,
                "loss": agreement.loss,
                "recovery": None if recovered is None else asdict(recovered),
                "seconds": seconds,
            }
        )
        found |= {"removed": plan.removed_ratio, "after": asdict(plan.after), "loss_exact": agreement.loss_exact}
        found |= {"left_out": {"similarity": agreement.skipped, "similarity_end": agreement.skipped_end}, "ways": ways}
        print(f"# {target.part} {target.layers} {ways[-1]}", file=sys.stderr, flush=True)
    found["speed"] = asdict(measure(material.subject.block(), block, material.measure.inputs.shape[-1], timing(args)))
    return found


def timing(args: argparse.Namespace) -> TimingSettings:
    return TimingSettings(batch=args.batch, context=args.context)


def random_rows(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Time blocks of larger shapes with random weights; half is removed, by magnitude."""
    from transformers import LlamaConfig, LlamaForCausalLM

    for size, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as root, Zoo(Path(root) / "zoo") as zoo:
            torch.manual_seed(0)
            model = LlamaForCausalLM(
                LlamaConfig(vocab_size=256, num_hidden_layers=3, max_position_embeddings=512, **shape)
            )
            model.save_pretrained(Path(root) / "model")
            zoo.ingest(Path(root) / "model", name="model")
            manifest = zoo.model("model").manifest
            for row, part, layers, _, _ in ROWS:
                target = target_of(manifest, config_of(zoo.store, manifest), (0, layers[1] - layers[0]), part)
                subject = open_subject(zoo.store, manifest, target.layers, (target.lo, target.hi), args.device)
                plan = make_plan(
                    target, subject, None, SurrogateOptions(part=part, ratio=args.ratio, importance="magnitude")
                )
                pruned = subject.block(pruned_run(target, plan, subject.tensors))
                speed = measure(subject.block(), pruned, shape["hidden_size"], timing(args))
                found = {"size": size, "row": row, "removed": plan.removed_ratio, "speed": asdict(speed)}
                print(f"# {found}", file=sys.stderr, flush=True)
                yield found


def main() -> None:
    parser = argparse.ArgumentParser(description="Table 4: similarity and speed of blocks pruned to half.")
    parser.add_argument("model", type=Path)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--windows", type=int, default=256)
    parser.add_argument("--text")
    parser.add_argument("--only", choices=("trained", "random"))
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report = {
        "benchmark": "surrogates",
        "model": args.model.name,
        "threads": args.threads,
        "device": args.device,
        "torch": version("torch"),
        "transformers": version("transformers"),
        "settings": {
            "ratio": args.ratio,
            "steps": args.steps,
            "windows": args.windows,
            "batch": args.batch,
            "context": args.context,
        },
        "rows": [] if args.only == "random" else list(trained_rows(args.model, args)),
        "random": [] if args.only == "trained" else list(random_rows(args)),
    }
    deliver(report, args.output)


if __name__ == "__main__":
    main()
