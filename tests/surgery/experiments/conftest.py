"""Two models of one shape and a surrogate of the second's middle layers, each on disk and in one store."""

from __future__ import annotations

import shutil
from types import SimpleNamespace

import pytest

from surgery.text.text import Text
from tests.checkpoints import make
from tests.surgery.evaluation.test_items import source
from tests.surgery.helpers import edit_weights
from zoo import Zoo

#: Sources of a few kB each, half of them held out.
TEXT = Text("test", tuple(source(seed) for seed in range(4)), tuple(source(seed, 80) for seed in range(4, 9)))
LAYERS = 4


@pytest.fixture(scope="session")
def family(tmp_path_factory):
    """A zoo and folder with a, b and pruned (b with two changed layers), and models of other shapes."""
    root = tmp_path_factory.mktemp("experiments")
    make("llama", root / "a", num_hidden_layers=LAYERS)
    make("llama", root / "b", num_hidden_layers=LAYERS, seed=1)
    shutil.copytree(root / "b", root / "pruned")
    edit_weights(
        root / "pruned", lambda key, tensor: tensor * 0.5 if ".layers.1.mlp" in key or ".layers.2." in key else tensor
    )
    make("llama", root / "deep", num_hidden_layers=LAYERS + 1)
    make("llama", root / "wide", num_hidden_layers=LAYERS, hidden_size=128)
    make("mistral", root / "other", num_hidden_layers=LAYERS)
    with Zoo(root / "store") as zoo:
        for name in ("a", "b", "pruned", "deep", "wide", "other"):
            zoo.ingest(root / name)
        yield SimpleNamespace(zoo=zoo, root=root)
