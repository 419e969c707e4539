"""How far log-probabilities in bfloat16 are from those in float32: ours and transformers', over real text.

    python -m benchmarks.bits.rounding FOLDER TEXT… [--tokens 256] [--most 40] [--products auto]… [--output FILE]

FOLDER is a checkpoint in bfloat16, TEXT are files of UTF-8 text, cut into pieces of `--tokens` tokens; the first
`--most` pieces are read. The reference is transformers in float32 with the same weights.

- `loss`: nats per token of the text.
- `error`: mean distance of the log-probability of the text's next token from the reference's.
- `error_p99`: 99th percentile of that distance.

With several `--products` (as `zoo serve --bf16-products`), each is a side of its own.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.types import SamplingParams, SequenceRequest
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.api import Zoo
from zoo.store import Store


def pieces_of(folder: Path, texts: Sequence[Path], tokens: int, most: int) -> list[tuple[int, ...]]:
    """Return pieces of `tokens` token ids; the rest of a file is left out."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    pieces: list[tuple[int, ...]] = []
    for text in texts:
        ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"]
        pieces += [tuple(ids[at : at + tokens]) for at in range(0, len(ids) - tokens + 1, tokens)]
    return pieces[:most]


@torch.inference_mode()
def by_transformers(folder: Path, pieces: Sequence[tuple[int, ...]], dtype: torch.dtype) -> torch.Tensor:
    """Return the log-probability of each piece's tokens but the first, [pieces * (tokens - 1)]."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    rows = []
    for piece in pieces:
        ids = torch.tensor([piece])
        logits = model(ids).logits[0, :-1].float().log_softmax(-1)
        rows.append(logits.gather(1, ids[0, 1:, None])[:, 0])
    return torch.cat(rows)


def by_blocks(zoo: Zoo, pieces: Sequence[tuple[int, ...]], products: str) -> torch.Tensor:
    """Return what `by_transformers` returns, from our engine. Raises RuntimeError if a request fails."""
    sampling = SamplingParams(1, prompt_logprobs=0, ignore_eos=True)
    asked = [SequenceRequest(f"{n}", f"r{n}", "model", piece, sampling) for n, piece in enumerate(pieces)]
    parts: dict[str, list[Any]] = {one.seq: [] for one in asked}
    options = ServeOptions(max_model_len=2 * len(pieces[0]), prefix_caching="off", bf16_products=products)
    with start_driver(zoo, options, Chosen(("model",), (), "paged")) as driver:
        for event in driver.run(asked):
            if event.error is not None:
                raise RuntimeError(f"{event.seq}: {event.error}")
            parts[event.seq] += event.prompt_logprobs
    rows = []
    for one in asked:
        found = [0.0] * len(one.prompt)
        for part in parts[one.seq]:
            for at, chosen in enumerate(part.chosen, start=part.start):
                found[at] = chosen.logprob
        rows.append(torch.tensor(found[1:]))
    return torch.cat(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("text", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--most", type=int, default=40)
    parser.add_argument("--products", action="append")
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    pieces = pieces_of(asked.folder, asked.text, asked.tokens, asked.most)
    if not pieces:
        parser.error("no file has as many tokens as a piece")
    sides = {"transformers": by_transformers(asked.folder, pieces, torch.bfloat16)}
    with tempfile.TemporaryDirectory() as root:
        store = Store.open(Path(root) / "store")
        ingest(store, open_source(str(asked.folder)), name="model")
        store.close()
        with Zoo(Path(root) / "store") as zoo:
            for products in asked.products or ["auto"]:
                sides[f"ours, {products}"] = by_blocks(zoo, pieces, products)
    wanted = by_transformers(asked.folder, pieces, torch.float32)
    found: dict[str, Any] = {"tokens": len(wanted), "loss, float32": -float(wanted.mean())}
    for name, given in sides.items():
        distance = (given - wanted).abs()
        found[name] = {
            "loss": -float(given.mean()),
            "error": float(distance.mean()),
            "error_p99": float(distance.quantile(0.99)),
        }
    deliver({"benchmark": "rounding", **found}, asked.output)


if __name__ == "__main__":
    main()
