"""A zoo of two tiny models of different width with the same token IDs, and text for them."""

from __future__ import annotations

import json
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from stitch import StitchSettings
from tests.checkpoints import VOCAB, make
from zoo import Zoo


@pytest.fixture(scope="session")
def stocked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `narrow` (width 64, 3 layers) and `wide` (width 96, 3 layers)."""
    root = tmp_path_factory.mktemp("stitched")
    with Zoo(root / "store") as zoo:
        zoo.ingest(make("llama", root / "narrow", seed=0), name="narrow")
        zoo.ingest(make("llama", root / "wide", seed=1, hidden_size=96, num_attention_heads=4), name="wide")
    return root / "store"


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Token IDs in JSONL: short repeating sequences, so that there is something to learn."""
    chance = random.Random(3)
    path = tmp_path_factory.mktemp("text") / "ids.jsonl"
    lines = [json.dumps({"token_ids": [chance.randrange(3, VOCAB) for _ in range(16)] * 4}) for _ in range(80)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture
def zoo(stocked: Path, tmp_path: Path) -> Iterator[Zoo]:
    """A copy of the store that the test may write to."""
    shutil.copytree(stocked, tmp_path / "store")
    with Zoo(tmp_path / "store") as opened:
        yield opened


@pytest.fixture
def settings(text: str) -> StitchSettings:
    """Settings of a training that takes a second."""
    return StitchSettings(
        text=text, steps=12, rate=5e-3, batch=2, length=16, places=2, windows=64, start=32, measured=8
    )


@pytest.fixture(autouse=True)
def interruptible():
    """Make Ctrl-C raise, as in a shell; workers of parallel test runs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
