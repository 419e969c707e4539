"""A store of tiny models for the verbs that run models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import make, make_lora
from zoo.api import Zoo


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, a LoRA on it, a model of a family that is not served paged, and a model without a tokenizer."""
    root = tmp_path_factory.mktemp("served")
    make("llama", root / "base")
    config = root / "base" / "generation_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "temperature": 0.5, "top_k": 7, "do_sample": True}))
    make_lora(root / "base", root / "lora")
    make("bloom", root / "bloom")
    make("qwen2", root / "bare", tokenizer=False)
    with Zoo(root / "zoo_store") as zoo:
        for name, base in (("base", None), ("lora", "org/base"), ("bloom", None), ("bare", None)):
            zoo.ingest(root / name, f"org/{name}", base)
    return root / "zoo_store"
