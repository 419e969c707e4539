"""`zoo compose` as scripts use it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cli.app
from tests.checkpoints import make
from zoo.api import Zoo


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Zoo(tmp_path / "store") as zoo:
        for seed, name in enumerate(("org/a", "org/b")):
            zoo.ingest(make("llama", tmp_path / name, seed=seed), name)
    return tmp_path / "store"


def run(store: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*arguments, "--store", str(store)])
    return int(ended.value.code or 0)


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_file_becomes_a_model_of_its_name(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(
        tmp_path / "mixed.yaml",
        "slices:\n  - sources: [{model: a, layer_range: [0, 2]}]\n  - sources: [{model: b, layer_range: [2, 3]}]\n",
    )
    assert run(store, "compose", file, "--json") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["model"], document["exportable"], document["family"]) == ("mixed", True, "llama")
    assert [block["shared_with"] for block in document["chain"]] == [["org/a"], ["org/b"]]
    assert run(store, "generate", "mixed", "x y", "--max-tokens", "3", "--json") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "mixed"


def test_a_chain_that_is_no_checkpoint_is_served_as_it_computes(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chain has layers with other heads, from another model."""
    with Zoo(store) as zoo:
        zoo.ingest(make("llama", tmp_path / "thin", num_key_value_heads=1, intermediate_size=48), "org/thin")
    lines = [
        f"  - sources: [{{model: {name}, layer_range: [{lo}, {hi}]}}]\n"
        for name, lo, hi in (("a", 0, 2), ("thin", 1, 3))
    ]
    assert run(store, "compose", write(tmp_path / "chain.yaml", "slices:\n" + "".join(lines)), "--json") == 0
    assert json.loads(capsys.readouterr().out)["family"] == "blockzoo_chain"
    assert run(store, "generate", "chain", "--token-ids", "5,6,7", "--max-tokens", "8", "--json") == 0
    tokens = json.loads(capsys.readouterr().out)["token_ids"]
    with Zoo(store) as zoo:
        out = zoo.model("chain").load().generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    assert tokens == out[0, 3:].tolist()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("slices: [", "no YAML"),
        ("slices: 3", "slices"),
        ("slices:\n  - sources: [{model: nobody, layer_range: [0, 2]}]\n", "nobody"),
        ("slices:\n  - sources: [{model: org, layer_range: [0, 2]}]\n", "org"),
        ("!!python/object/apply:os.getcwd []", "no YAML"),
    ],
)
def test_bad_files_are_one_line(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    assert run(store, "compose", write(tmp_path / "bad.yaml", text)) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and complaint in printed.err and printed.err.count("\n") == 1


def test_a_missing_file_is_one_line(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(store, "compose", str(tmp_path / "none.yaml")) == 2
    assert "cannot be read" in capsys.readouterr().err
