"""Other verbs on quantised models: what each makes of them, or refuses; and servers of several devices and tiers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import cli.app
from surgery.quantize.make import quantize
from tests.checkpoints import make, make_lora
from tests.cli.test_delta_and_profile import text_in
from tests.cli.test_serve import serving
from tests.surgery.deltas.tunes import tune
from tests.surgery.quantize.test_ingest import FORMATS, written
from zoo.api import Zoo

PROMPT = [5, 9, 200, 31, 7]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of an exact base and fine-tune, both also in int8, an int4 checkpoint, and a LoRA over int8."""
    root = tmp_path_factory.mktemp("family")
    with Zoo(root / "store") as zoo:
        folder = make("llama", root / "base", dtype="bfloat16")
        zoo.ingest(folder, "base")
        zoo.ingest(tune("llama", root / "fine", ranks=3, dtype="bfloat16"), "fine", "base")
        for name in ("base", "fine"):
            quantize(zoo.store, name, "int8")
        form = FORMATS["int4 by group"]()
        zoo.ingest(written(Path(shutil.copytree(folder, root / "four")), form.config, form.write), "four")
        zoo.ingest(make_lora(folder, root / "lora"), "lora", "base-int8")
    text_in(root)
    return root


@pytest.fixture
def root(family: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    shutil.copytree(family / "store", tmp_path / "store")
    shutil.copy(family / "text.txt", tmp_path)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str, code: int = 0) -> Any:
    """Run a verb; return its document, or with a code its error line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*arguments, "--store", str(root / "store"), "--json"])
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err
    return printed.err.strip() if code else json.loads(printed.out)


def tokens(capsys: pytest.CaptureFixture[str], root: Path, name: str) -> list[int]:
    given = ("--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", "6", "--ignore-eos")
    return list(run(capsys, root, "generate", name, *given)["token_ids"])


def test_parameters_are_those_of_the_exact_models(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {each["name"]: each["params"] for each in run(capsys, root, "ls")["models"]}
    assert found["four"] == found["base"] > 0
    assert found["base-int8"] == found["base"] and found["fine-int8"] == found["fine"]


def test_deltas_of_quantised_models_are_refused(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = ("--text", str(root / "text.txt"), "--rank", "2")
    for arguments, words in (
        (["fine-int8"], "is of kind quantized"),
        (["fine", "--base", "base-int8"], "base-int8 is quantized"),
        (["four", "--base", "base"], "four is quantized"),
    ):
        error = run(capsys, root, "delta", *arguments, *text, code=2)
        assert words in error and error.count("\n") == 0


def test_packing_keeps_what_quantised_models_compute(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: tokens(capsys, root, name) for name in ("fine", "fine-int8", "four", "lora")}
    error = run(capsys, root, "pack", "fine-int8", code=2)
    assert "no full fine-tune" in error and error.count("\n") == 0
    assert run(capsys, root, "pack")["packed"] > 0
    run(capsys, root, "pack", "--alone")
    assert run(capsys, root, "verify")["damaged"] == []
    assert {name: tokens(capsys, root, name) for name in before} == before


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("base-int8",), "base-int8"),
        (("four",), "four"),
        (("four", "--importance", "magnitude", "--plan-only"), "four"),
        (("four", "--from", "base", "--take", "0-0"), "four"),
        (("base", "--from", "base-int8", "--take", "0-0"), "base-int8"),
    ],
)
def test_surrogates_of_quantised_models_are_refused(
    root: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    given = (*arguments, "--layers", "1-1", "--text", str(root / "text.txt"), "--device", "cpu")
    error = run(capsys, root, "surrogate", *given, code=2)
    assert f"{named} is quantized" in error and error.count("\n") == 0


@pytest.mark.parametrize(
    "options",
    [
        ("--agents", "2"),
        ("--agents", "2", "--backend", "processes"),
        ("--residency", "swap", "--host-memory", "16MiB"),
    ],
    ids=["agents", "processes", "tiers"],
)
def test_servers_answer_as_one_device_does(
    family: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    names = ("base", "base-int8", "fine-int8", "four", "lora")
    expected = {name: tokens(capsys, family, name) for name in names}
    asked: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    with serving(family / "store", tmp_path / "log", *options) as served, served.client() as client:
        for _ in range(2):
            for name in names:
                done = client.completions.create(model=name, **asked, extra_body=extra)
                assert done.choices[0].token_ids == expected[name], name  # type: ignore[attr-defined]
