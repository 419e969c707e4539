"""Checkpoints are made once per session and never written to; a test that edits one copies it first."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints import make
from zoo import Zoo


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Provide `made("llama", dtype="bfloat16")`: the folder of a checkpoint, made at the first call."""
    root = tmp_path_factory.mktemp("checkpoints")
    known: dict[str, Path] = {}

    def get(name: str, **options: Any) -> Path:
        key = "-".join([name, *(f"{option}={value}" for option, value in sorted(options.items()))])
        if key not in known:
            known[key] = make(name, root / key.replace("/", "_"), **options)
        return known[key]

    return get


@pytest.fixture
def copied(made: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """Provide `copied("llama", "folder")`: a copy of a checkpoint that the test may damage."""

    def get(name: str, folder: str = "copy", **options: Any) -> Path:
        target = tmp_path / folder
        shutil.copytree(made(name, **options), target)
        return target

    return get


@pytest.fixture
def zoo(tmp_path: Path) -> Iterator[Zoo]:
    with Zoo(tmp_path / "zoo_store") as opened:
        yield opened
