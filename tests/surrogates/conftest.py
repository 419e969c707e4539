"""Tiny checkpoints and a zoo of them; the text is token IDs, valid in any tiny vocabulary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from surrogates import RecoverySettings, SurrogateOptions
from surrogates.scoring.timing import TimingSettings
from tests import checkpoints
from zoo import Zoo

#: The smallest possible timing: tests do not look at times.
FAST = TimingSettings(batch=2, context=4, pairs=1, rounds=1)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of token IDs with learnable structure: a random walk with a few step sizes."""
    path = tmp_path_factory.mktemp("text") / "ids.jsonl"
    generator = torch.Generator().manual_seed(5)
    lines = []
    for _ in range(40):
        steps = torch.randint(1, 4, (160,), generator=generator)
        lines.append(json.dumps({"token_ids": (3 + steps.cumsum(0) % (checkpoints.VOCAB - 3)).tolist()}))
    path.write_text("\n".join(lines))
    return str(path)


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[Zoo]:
    with Zoo(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def stored(zoo: Zoo, tmp_path: Path) -> Callable[..., str]:
    """Provide `stored("qwen2", hidden_size=32)`: put a tiny model without a tokenizer into the zoo, return its name."""

    def put(family: str = "llama", name: str | None = None, **options: Any) -> str:
        name = name or family
        options.setdefault("tokenizer", False)
        zoo.ingest(checkpoints.make(family, tmp_path / f"checkpoint-{name}", **options), name=name)
        return name

    return put


@pytest.fixture
def options(text: str) -> Callable[..., SurrogateOptions]:
    """Provide options with few windows, and no training unless `steps` are given."""

    def make(steps: int = 0, how: str = "lora", **changes: Any) -> SurrogateOptions:
        recovery = RecoverySettings(how=how if steps else "none", steps=max(1, steps), rank=8, batch=8, rate=1e-2)
        settings = {
            "text": text,
            "windows": 48,
            "length": 16,
            "held_out": 12,
            "scored": 16,
            "device": "cpu",
            "timing": FAST,
            **changes,
        }
        return SurrogateOptions(recovery=recovery, **settings)

    return make
