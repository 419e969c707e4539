"""A store with checkpoints, made once per test module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from tests import checkpoints
from tests.bottlenecks import make_bottleneck
from tests.runtime.engine.oracle import Answers
from zoo.store import Store


class Bench:
    """A store and the folders of the checkpoints in it, by model name."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.store = Store.open(root / "store")
        self.folders: dict[str, Path] = {}
        self._answers: dict[str, Answers] = {}

    def add(self, name: str, folder: Path, base: str | None = None) -> str:
        ingest(self.store, open_source(str(folder)), name=name, base=base)
        self.folders[name] = folder
        return name

    def family(self, family: str, name: str | None = None, **options) -> str:
        name = name or family
        return self.add(name, checkpoints.make(family, self.root / "hf" / name, tokenizer=False, **options))

    def lora(self, base: str, name: str, **options) -> str:
        folder = checkpoints.make_lora(self.folders[base], self.root / "hf" / name, **options)
        return self.add(name, folder, base=base)

    def peft(self, base: str, name: str, config, **options) -> str:
        folder = checkpoints.make_peft(self.folders[base], self.root / "hf" / name, config, **options)
        return self.add(name, folder, base=base)

    def answers(self, name: str, make: Callable[[], Any]) -> Answers:
        """Return a reference's answers; the reference is made once and shared by the module's tests."""
        if name not in self._answers:
            self._answers[name] = Answers(make())
        return self._answers[name]

    def bottleneck(self, base: str, name: str, **options) -> str:
        return self.add(name, make_bottleneck(self.folders[base], self.root / "hf" / name, **options), base=base)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    made = Bench(tmp_path_factory.mktemp("bench"))
    yield made
    made.store.close()
    torch.set_num_threads(threads)
