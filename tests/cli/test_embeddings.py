"""Embeddings on `zoo serve`: those of transformers' final hidden states, whichever way a prompt is cut and placed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.checkpoints import make
from tests.cli.test_serve import Served, serving
from zoo.api import Zoo

FAMILIES = ("llama", "gpt2", "gemma2", "opt", "gpt_neox", "phi3")
#: One token, one chunk, a chunk and one token, several chunks.
PROMPTS = [[5], [*range(3, 19)], [*range(3, 20)], [(7 * at) % 90 + 3 for at in range(60)]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("embeddings")
    with Zoo(root / "store") as zoo:
        for name in FAMILIES:
            make(name, root / name)
            zoo.ingest(root / name, name)
    return root


@pytest.fixture(scope="module", params=["one device", "two agents", "dense"])
def served(folders: Path, request: pytest.FixtureRequest) -> Iterator[Served]:
    chunks = ("--long-prefill-token-threshold", "16")
    how = {"one device": chunks, "two agents": ("--agents", "2", *chunks), "dense": ("--executor", "dense")}
    with serving(folders / "store", folders / "log", "--dtype", "float32", *how[request.param]) as made:
        yield made


@pytest.mark.parametrize("name", FAMILIES)
def test_embeddings_are_transformers_hidden_states(served: Served, folders: Path, name: str) -> None:
    from transformers import AutoModel

    model: Any = AutoModel.from_pretrained(folders / name, dtype=torch.float32, attn_implementation="eager").eval()
    with httpx.Client(base_url=served.address, timeout=60, trust_env=False, headers={"x-api-key": "k3y"}) as http:
        for pooling in ("mean", "last", "mean"):  # later ones find prefixes of earlier ones cached
            body = {"model": name, "input": PROMPTS, "normalize": False, "pooling": pooling}
            found = http.post("/v1/embeddings", json=body).raise_for_status().json()["data"]
            for ids, one in zip(PROMPTS, found, strict=True):
                with torch.no_grad():
                    states = model(torch.tensor([ids])).last_hidden_state[0]
                expected = states.mean(0) if pooling == "mean" else states[-1]
                torch.testing.assert_close(torch.tensor(one["embedding"]), expected, atol=1e-4, rtol=1e-4)
        # Beside answers, in the same steps.
        answer = http.post("/v1/completions", json={"model": name, "prompt": PROMPTS, "max_tokens": 3})
        assert len(answer.raise_for_status().json()["choices"]) == len(PROMPTS)
