"""Every way to name a model refuses names that leave a folder, in one line and before anything is stored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import cli.app
from cli.demo import recipe
from stitch.storing import put_stitch
from tests.checkpoints import make
from tests.surgery.deltas.tunes import tune
from zoo import Zoo
from zoo.catalog.names import check_name
from zoo.errors import InputError

EVIL = "../evil"
TEXT = "\n".join(f"def name_{i}(first, second): return first * {i} + second" for i in range(200))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("names")
    (root / "text.txt").write_text(TEXT)
    (root / "chain.yaml").write_text("slices:\n  - sources: [{model: base, layer_range: [0, 2]}]\n")
    make("llama", root / "new", seed=7)
    with Zoo(root / "store") as zoo:
        zoo.ingest(make("llama", root / "base"), name="base")
        zoo.ingest(tune("llama", root / "fine", ranks=3), name="fine", base="base")
    return root


def held(folder: Path) -> set[str]:
    """Return the store's files except catalogue and locks: weights, side files and work in progress."""
    files = (path for path in (folder / "store").rglob("*") if path.is_file())
    return {str(path.relative_to(folder)) for path in files if ".db" not in path.name and "lock" not in path.name}


VERBS: dict[str, Callable[[Path], list[str]]] = {
    "ingest": lambda root: ["ingest", str(root / "new")],
    "compose": lambda root: ["compose", str(root / "chain.yaml")],
    "delta": lambda root: ["delta", "fine", "--rank", "2", "--text", str(root / "text.txt")],
    "stitch": lambda root: [
        "stitch",
        "--a",
        "base",
        "--b",
        "fine",
        "--text",
        str(root / "text.txt"),
        "--device",
        "cpu",
    ],
    "surrogate": lambda root: ["surrogate", "base", "--layers", "1-1", "--text", str(root / "text.txt")],
    "surrogate from": lambda root: [
        "surrogate",
        "base",
        "--layers",
        "1-1",
        "--from",
        "fine",
        "--text",
        str(root / "text.txt"),
    ],
}


@pytest.mark.parametrize("name", [EVIL, "", "a/./b"])
@pytest.mark.parametrize("verb", VERBS)
def test_verbs_refuse_it(folder: Path, capsys: pytest.CaptureFixture[str], verb: str, name: str) -> None:
    before = held(folder)
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*VERBS[verb](folder), f"--name={name}", "--store", str(folder / "store"), "--json"])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    assert "cannot be a model's name" in printed.err and printed.err.count("\n") == 1
    assert held(folder) == before
    with Zoo(folder / "store") as zoo:
        assert [model.name for model in zoo.models()] == ["base", "fine"]


def test_python_refuses_it(folder: Path) -> None:
    from zoo.integrations import ZooCallback

    before = held(folder)
    with Zoo(folder / "store") as zoo:
        routes: list[Callable[[], object]] = [
            lambda: zoo.ingest(folder / "new", name=EVIL),
            lambda: zoo.compose({"slices": [{"sources": [{"model": "base", "layer_range": [0, 2]}]}]}, name=EVIL),
            lambda: zoo.delta("fine", 2, text=str(folder / "text.txt"), variant=EVIL),
            lambda: put_stitch(zoo.store, EVIL, _stitch(), {"a": "base", "b": "fine"}),
            lambda: ZooCallback(folder / "store", name=EVIL),
        ]
        for route in routes:
            with pytest.raises(InputError, match="cannot be a model's name"):
                route()
        assert [model.name for model in zoo.models()] == ["base", "fine"]
    assert held(folder) == before


def _stitch():
    from stitch.block import Folded

    return Folded(torch.zeros(64, 65), torch.zeros(64))


def test_the_folder_of_a_run_names_its_checkpoints_and_is_checked_too(folder: Path) -> None:
    from transformers import TrainerControl, TrainerState, TrainingArguments

    from zoo.integrations import ZooCallback

    run = folder / "a\\b"
    args = TrainingArguments(output_dir=str(run), report_to=[], use_cpu=True)
    state = TrainerState(global_step=1, is_world_process_zero=True)
    make("llama", run / "checkpoint-1", seed=9)
    before = held(folder)
    with pytest.raises(InputError, match="cannot be a model's name"):
        ZooCallback(folder / "store", strict=True).on_save(args, state, TrainerControl())
    assert held(folder) == before


def test_the_demo_s_models_have_legal_names() -> None:
    families = [value for value in vars(recipe).values() if isinstance(value, recipe.Recipe)]
    named = [member.name for each in families for member in each.members]
    assert named and [check_name(name) for name in named] == named
