"""The comparison of more models than fit, on a tiny family: the accounts agree, and wrong answers are noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.residency.family import BASE, make, names
from benchmarks.residency.more_than_fit import SIDES, FitSetting, differing, measure, room_for
from benchmarks.residency.sides import OpenSide
from runtime.bench.lengths import Lengths
from runtime.bench.workload import WorkloadSettings
from tests import checkpoints
from tests.chains import manifest_of
from zoo.api import Zoo

FULL, LORA, FIT = 4, 2, 2


def vary_norms(folder: Path) -> None:
    """Give every norm weights of its own, as trained models have."""
    path = folder / "model.safetensors"
    weights, random = load_file(path), torch.Generator().manual_seed(0)
    for name, tensor in weights.items():
        if tensor.dim() == 1:
            weights[name] = tensor + torch.randn(tensor.shape, generator=random) / 10
    save_file(weights, path, {"format": "pt"})


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("residency")
    folder = checkpoints.make("llama", root / "llama", tokenizer=False, num_hidden_layers=4, tie_word_embeddings=True)
    vary_norms(folder)
    assert make(folder, root / "store", FULL, LORA) == names(FULL, LORA)
    return root / "store"


def test_a_family_shares_half_of_its_layers(store: Path) -> None:
    with Zoo(store) as zoo:
        base, full, lora = (manifest_of(zoo.store, name) for name in (BASE, "full00", "lora00"))
        digests = [{tensor.digest for tensor in manifest.tensors} for manifest in (base, full, lora)]
    assert digests[0] < digests[2], "a LoRA has all of its base"
    for placed, own in zip(base.components, full.components, strict=True):
        assert (placed.component == own.component) == (placed.layer is None or placed.layer < 2)


def test_making_a_family_again_adds_nothing(store: Path) -> None:
    with Zoo(store) as zoo:
        before = [model.created for model in zoo.models()]
    make(store.parent / "llama", store, FULL, LORA)
    with Zoo(store) as zoo:
        assert [model.created for model in zoo.models()] == before


def test_sides_answer_exactly_and_the_accounts_agree(store: Path) -> None:
    workload = WorkloadSettings(
        count=24, clients=4, prompts=Lengths("fixed", 5), answers=Lengths("fixed", 4), popularity="skewed",
        vocabulary=60, seed=1,
    )  # fmt: skip
    made = measure(store, FitSetting(names(FULL, LORA), FIT, workload, None, 1, 1 << 20))
    room = room_for(store, names(FULL, LORA), FIT, 1 << 20)
    assert made["budget"] == room.weights and made["errors"] == dict.fromkeys(SIDES, 0)
    assert [made["answers"][name]["other"] for name in ("blocks", "shared", "models")] == [0, 0, 0]
    for side, account in made["memory"].items():
        fits = side == "shared"  # the memory that pages leave is enough for all models, which are loaded at the start
        assert account["loaded"] == (0 if fits else account["grown"]) and account["missing"] >= account["read"] > 0
        assert (
            account["over"] == 0 < account["most_engine"] <= account["budget"] and account["checks"] > account["loads"]
        )
    blocks, models = (made["memory"][name] for name in ("blocks", "models"))
    assert blocks["loaded"] < models["loaded"] and blocks["loads"] <= models["loads"]
    assert made["rate"] == pytest.approx(0.8 * made["figures"]["models"]["closed"]["requests_per_second"])
    assert len(made["ratios"]["models"]["open"]["p95"]) == 1


def test_an_answer_of_another_model_is_counted() -> None:
    side = OpenSide("blocks", client=None)  # type: ignore[arg-type]
    side.answers = {0: (1, 2), 1: (1, 3)}
    assert differing(side, {0: (1, 2), 1: (1, 2), 2: (4,)}) == 2
