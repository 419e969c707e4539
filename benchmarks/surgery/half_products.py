"""Time a bfloat16 model's passes in torch, with its products as torch computes them and as scores and training do here.

    python -m benchmarks.surgery.half_products FOLDER [--tokens 48] [--rounds 3]

FOLDER is a checkpoint. Seconds of processor time of one thread, so that other work on the machine counts little: a
forward pass (`zoo eval`, `zoo compare`), and one with its backward pass through all weights (training). The sides take
turns. On a processor with instructions for bfloat16 products both sides are the same.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from benchmarks.reports import deliver


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    import torch
    from transformers import AutoModelForCausalLM

    from surgery.tensors.half_products import fast_products

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.bfloat16)
    ids = torch.arange(2, 2 + args.tokens)[None]

    def forward() -> None:
        with torch.no_grad():
            model(ids)

    def learn() -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(args.rounds):
        for work, run in (("forward", forward), ("with backward", learn)):
            for side, products in (("torch", nullcontext), ("here", fast_products)):
                with products():
                    seconds[f"{work}, {side}"].append(_processor_time(run))
    rows = {name: [round(each, 3) for each in some] for name, some in seconds.items()}
    deliver({"tokens": args.tokens, "seconds": rows}, args.output)


def _processor_time(run: Callable[[], None]) -> float:
    begun = time.process_time()
    run()
    return time.process_time() - begun


if __name__ == "__main__":
    main()
