"""`zoo quantize` as scripts use it, and quantised models behind `zoo generate`, `zoo ls`, `zoo export`, `zoo compare`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cli.app
from tests.checkpoints import make
from zoo.api import Zoo


def run(store: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*arguments, "--store", str(store)])
    return int(ended.value.code or 0)


def test_models_are_quantized_listed_and_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    with Zoo(store) as zoo:
        for name, seed in (("org/m", 0), ("org/other", 5)):
            zoo.ingest(make("llama", tmp_path / name, dtype="bfloat16", seed=seed), name)
    assert run(store, "quantize", "org/m", "other", "--json") == 0
    found = json.loads(capsys.readouterr().out)["models"]
    assert [each["model"] for each in found] == ["org/m-int8", "org/other-int8"]
    assert found[0]["tensors"] == 22 and found[0]["base"] == "org/m" and found[0]["bytes_new"] < found[0]["bytes"]
    assert run(store, "quantize", "org/m", "--scheme", "fp8", "--as", "small", "--exact-head") == 0
    assert "small" in capsys.readouterr().out
    answers = []
    for name in ("org/m", "org/m-int8", "small"):
        assert run(store, "generate", name, "--token-ids", "5,6,7", "--max-tokens", "4", "--ignore-eos", "--json") == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert all(len(each["token_ids"]) == 4 for each in answers)
    assert run(store, "ls", "--json") == 0
    kinds = {each["name"]: each["kind"] for each in json.loads(capsys.readouterr().out)["models"]}
    assert kinds["org/m-int8"] == kinds["small"] == "quantized" and kinds["org/m"] == "foundation"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("org/m", "--scheme", "int2"), "no scheme; there are int8, fp8"),
        (("org/m", "org/m", "--as", "x"), "--as names the result of one model"),
        (("nothing",), "nothing"),
    ],
)
def test_misuse_ends_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(make("llama", tmp_path / "m"), "org/m")
    capsys.readouterr()
    assert run(tmp_path / "store", "quantize", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1
