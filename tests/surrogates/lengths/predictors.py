"""Predictors for tests: untrained ones, stored beside a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from surgery.models.load import load_model
from surrogates.lengths.classifier import LengthClassifier
from surrogates.lengths.storing import ENDING, put_predictor
from surrogates.lengths.training import TrainedLengths
from zoo.api import Zoo
from zoo.manifest import ModelManifest


def put(
    zoo: Zoo, name: str, edges: Sequence[int], seed: int, replace: bool, target: ModelManifest | None = None
) -> None:
    """Store an untrained predictor of a model; `target`: what it was made for, if that is not the model as stored."""
    model = zoo.model(name).manifest
    torch.manual_seed(seed)
    module = LengthClassifier(load_model(zoo.store, model).get_input_embeddings().weight.detach(), len(edges)).eval()
    document: dict[str, Any] = {
        "fingerprint": model.fingerprint, "edges": list(edges), "spread": module.spread, "seed": seed,
    }  # fmt: skip
    put_predictor(zoo.store, name + ENDING, target or model, TrainedLengths(module, {}, 0, 0), document, replace)
