"""`zoo pack` and `zoo export --card` as scripts use them: one JSON document, exit codes, one line per error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cli.app
from tests.checkpoints import make
from tests.surgery.helpers import edit_weights
from tests.zoo.factory import flip_byte
from zoo import Zoo

Runner = Callable[..., tuple[int, Any, str]]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("family")
    make("llama", root / "base", dtype="bfloat16", hidden_size=64, intermediate_size=96)
    shutil.copytree(root / "base", root / "tuned")
    edit_weights(root / "tuned", lambda key, tensor: tensor * (1 + 1 / 128))
    with Zoo(root / "zoo_store") as zoo:
        zoo.ingest(root / "base")
        zoo.ingest(root / "tuned", base="base")
    return root / "zoo_store"


@pytest.fixture
def zoo(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Run the command on a store of the test's own; return exit code, JSON document (or text), and errors."""
    store = shutil.copytree(family, tmp_path / "zoo_store")
    monkeypatch.setattr(cli.app, "VERBS", {verb: cli.app.VERBS[verb] for verb in ("pack", "ls", "verify")})

    def run(*arguments: str, as_json: bool = True) -> tuple[int, Any, str]:
        with pytest.raises(SystemExit) as ended:
            cli.app.main([*arguments, "--store", str(store), *(["--json"] if as_json else [])])
        printed = capsys.readouterr()
        return (
            int(ended.value.code or 0),
            json.loads(printed.out) if as_json and printed.out else printed.out,
            printed.err,
        )

    return run


def test_pack_and_undo(zoo: Runner) -> None:
    before = zoo("ls")[1]["store"]
    code, measured, _ = zoo("pack", "--dry-run")
    assert code == 0
    assert zoo("ls")[1]["store"] == before
    code, report, errors = zoo("pack", "--threads", "1")
    assert (code, errors) == (0, "")
    assert list(report) == ["packed", "skipped", "bytes_before", "bytes_after", "seconds", "damaged"]
    assert report["packed"] > 10
    assert (report["packed"], report["bytes_after"]) == (measured["packed"], measured["bytes_after"])
    after = zoo("ls")[1]["store"]
    assert before["bytes_stored"] - after["bytes_stored"] == report["bytes_before"] - report["bytes_after"] > 0
    assert after["objects"] == before["objects"]
    assert zoo("verify")[0] == 0
    code, text, _ = zoo("pack", "--undo", "tuned", as_json=False)
    assert text.startswith(f"unpacked {report['packed']} objects")
    assert zoo("ls")[1]["store"] == before


def test_damage_is_exit_code_1_and_bad_names_2(zoo: Runner, tmp_path: Path) -> None:
    with Zoo(tmp_path / "zoo_store") as opened:
        tensor = max(opened.model("tuned").manifest.tensors, key=lambda one: one.nbytes)
        flip_byte(opened.store.objects.path(tensor.digest), -1)
    code, report, _ = zoo("pack")
    assert (code, report["damaged"]) == (1, [tensor.digest])
    assert zoo("verify")[1]["damaged"] == [{"digest": tensor.digest, "models": ["tuned"]}]
    code, printed, errors = zoo("pack", "base")
    assert (code, printed, errors.count("\n")) == (2, "", 1)
    assert "nothing to pack it against" in errors
    assert zoo("pack", "nobody")[0] == 2
    assert zoo("pack", "--level", "99")[0] == 2


def test_export_with_a_card(zoo: Runner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.app, "VERBS", {"export": "cli.export", "pack": "cli.pack"})
    assert zoo("pack")[0] == 0
    code, report, _ = zoo("export", "tuned", str(tmp_path / "out"), "--card")
    assert (code, "README.md" in report["files"]) == (0, True)
    assert (tmp_path / "out" / "README.md").read_text().startswith("---\nlibrary_name")
    assert "README.md" not in zoo("export", "tuned", str(tmp_path / "plain"))[1]["files"]
