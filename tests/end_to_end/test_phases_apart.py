"""`zoo serve --roles` gives the answers of one device, and each agent runs its phase alone (TI-02).

The models are a foundation, a partial fine-tune, a LoRA and a stitched chain; requests are greedy, sampled, with
penalties and with log-probabilities. `BLOCKZOO_SIDES=all` runs all sides of the benchmark; by default two.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from benchmarks.roles.phases_apart import SIDES, measured, requests_of
from tests import checkpoints
from tests.chains import put_chain, put_stitch
from zoo.api import Zoo

MODELS = ("llama", "tuned", "lora", "stitched")
#: The side on which sequences go on until their hand-off, so that phases are apart only behind it.
MEANWHILE = "1+1 meanwhile"
RUN = (
    tuple(SIDES) if os.environ.get("BLOCKZOO_SIDES") == "all" else ("1+1", "1+2 chunk cut", "2+1 layer cut", MEANWHILE)
)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    root = tmp_path_factory.mktemp("apart")
    size: dict[str, Any] = {"num_hidden_layers": 3, "max_position_embeddings": 1024, "tokenizer": False}
    base = checkpoints.make("llama", root / "hf" / "llama", **size)
    tuned = checkpoints.make("llama", root / "hf" / "tuned", **size)
    weights = load_file(tuned / "model.safetensors")
    save_file(
        {name: each * 1.3 if ".layers.2." in name else each for name, each in weights.items()},
        tuned / "model.safetensors",
        {"format": "pt"},
    )
    wide = checkpoints.make("llama", root / "hf" / "wide", **size | {"hidden_size": 96, "seed": 2})
    with Zoo(root / "store") as zoo:
        for name, folder in (("llama", base), ("tuned", tuned), ("wide", wide)):
            zoo.ingest(folder, name=name)
        zoo.ingest(checkpoints.make_lora(base, root / "hf" / "lora"), name="lora", base="llama")
        put_stitch(zoo.store, "llama", "wide")
        put_chain(zoo.store, "stitched", ("llama", 0, 2), ("wide", 1, 3))
    yield root / "store"


def test_answers_and_phases(store: Path) -> None:
    bodies = requests_of(MODELS, 64, checkpoints.VOCAB, 12)
    found = measured(str(store), MODELS, RUN, bodies)
    meanwhile = found.pop(MEANWHILE)
    assert (meanwhile["equal"], meanwhile["aborted"], meanwhile["prompt_devices"]) == (1.0, 0, ["agent-0"])
    assert meanwhile["handoffs"] > 0 and meanwhile["decode_devices"] == ["agent-0", "agent-1"]
    # Prompts that begin alike share pages where both are at a time, which is a matter of the moment.
    sent = [(side["present"], side["bytes"]) for name, side in found.items() if "cached" not in name]
    whole = {count for present, count in sent if not present}
    assert len(whole) <= 1 and all(count < max(whole, default=count + 1) for present, count in sent if present)
    for name, side in found.items():
        decoding = [f"agent-{at}" for at, role in enumerate(side["roles"].split(",")) if role == "decode"]
        prompts = [f"agent-{at}" for at, role in enumerate(side["roles"].split(",")) if role == "prefill"]
        assert (side["equal"], side["prompt_devices"], side["decode_devices"]) == (1.0, prompts, decoding), name
        assert (side["handoffs"], side["aborted"], side["recomputed"]) == (len(bodies), 0, 0), name
        if "chunk" not in name and "layer" not in name:
            assert side["transfers"] == len(bodies)
        elif "cached" not in name:
            assert len(bodies) < side["transfers"] <= side["expected_transfers"]
