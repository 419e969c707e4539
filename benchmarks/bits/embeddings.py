"""Compare the embeddings of a served model with transformers' final hidden states, and measure their rate.

    python -m benchmarks.bits.embeddings STORE MODEL [--texts 64] [--tokens 128] [--output FILE]

The model is exported and run by transformers in float32 and in its own dtype, one text at a time. Reported is, for both
poolings, the least and the mean cosine of the server's embeddings with those of float32, and for comparison that of
transformers' own dtype; and the texts per second of one request with all texts, beside transformers' one by one.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.queue.servers import serving
from benchmarks.reports import deliver
from zoo.api import Zoo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("store")
    parser.add_argument("model")
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128, help="of the longest text")
    parser.add_argument("--vocabulary", type=int, default=40_000, help="token ids are below")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    draw = random.Random(0)
    texts = [
        [draw.randrange(10, given.vocabulary) for _ in range(draw.randint(1, given.tokens))] for _ in range(given.texts)
    ]
    found: dict[str, list[torch.Tensor]] = {}
    seconds: dict[str, float] = {}
    with serving(given.store, given.model, ["--models"]) as server, server.http() as http:
        for pooling in ("mean", "last", "mean"):  # the first one warms up
            body = {"model": given.model, "input": texts, "pooling": pooling}
            began = time.perf_counter()
            data = http.post("/v1/embeddings", json=body).raise_for_status().json()["data"]
            seconds[pooling] = time.perf_counter() - began
            found[pooling] = [torch.tensor(one["embedding"]) for one in data]
    with tempfile.TemporaryDirectory() as folder:
        with Zoo(given.store, create=False) as zoo:
            zoo.model(given.model).export(Path(folder) / "model")
        exact, _ = _states(Path(folder) / "model", torch.float32, texts)
        own, took = _states(Path(folder) / "model", None, texts)
    document: dict[str, Any] = {"model": given.model, "texts": len(texts), "tokens": sum(map(len, texts))}
    for pooling in ("mean", "last"):
        document[pooling] = {
            "served": _cosines(found[pooling], exact[pooling]),
            "transformers": _cosines(own[pooling], exact[pooling]),
            "texts_per_second": round(len(texts) / seconds[pooling], 1),
        }
    document["transformers_texts_per_second"] = round(len(texts) / took, 1)
    deliver(document, given.output)


def _states(
    folder: Path, dtype: torch.dtype | None, texts: Sequence[Sequence[int]]
) -> tuple[dict[str, list[torch.Tensor]], float]:
    """Return transformers' pooled states by pooling, and the seconds for all texts. `dtype`: None: the model's own."""
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folder, dtype="auto" if dtype is None else dtype).eval()
    pooled: dict[str, list[torch.Tensor]] = {"mean": [], "last": []}
    with torch.no_grad():
        model(torch.tensor([texts[0]]))
        began = time.perf_counter()
        for text in texts:
            states = model(torch.tensor([text])).last_hidden_state[0].float()
            pooled["mean"].append(states.mean(0))
            pooled["last"].append(states[-1])
    return pooled, time.perf_counter() - began


def _cosines(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> dict[str, float]:
    found = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(some, others, strict=True)]
    return {"least": round(min(found), 6), "mean": round(statistics.mean(found), 6)}


if __name__ == "__main__":
    main()
