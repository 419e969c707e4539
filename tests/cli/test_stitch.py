"""`zoo stitch` as scripts use it, and stitches in the other verbs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cli.app
from cli.serving.models import choose
from tests.checkpoints import VOCAB, make
from tests.surgery.helpers import edit_weights
from zoo import Zoo


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a store of models of two widths, and text for training."""
    generator = torch.Generator().manual_seed(0)
    lines = [json.dumps({"token_ids": torch.randint(3, VOCAB, (40,), generator=generator).tolist()}) for _ in range(60)]
    (tmp_path / "ids.jsonl").write_text("\n".join(lines))
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(make("llama", tmp_path / "narrow"), name="org/narrow")
        zoo.ingest(make("llama", tmp_path / "wide", seed=1, hidden_size=96), name="org/wide")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*arguments, "--store", str(folder / "store")])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def options(folder: Path, *more: str) -> list[str]:
    small = ["--steps", "4", "--batch", "2", "--length", "16", "--measured", "4", "--device", "cpu"]
    return ["stitch", "--a", "narrow", "--b", "wide", "--text", str(folder / "ids.jsonl"), *small, *more]


def test_the_contract_and_the_verbs_around_it(folder, capsys):
    code, out, err = run(
        capsys,
        folder,
        *options(
            folder,
            "--points",
            "0:1,2:2",
            "--unseen",
            "1:2",
            "--name",
            "s",
            "--plot",
            str(folder / "s.png"),
            "--labels",
            "0.5",
            "--json",
        ),
    )
    assert code == 0, err
    document = json.loads(out)
    assert {
        "stitch",
        "a",
        "b",
        "dims",
        "points",
        "similarity_mean",
        "loss_first",
        "loss_last",
        "seconds",
    } <= document.keys()
    assert (document["stitch"], document["a"], document["b"], document["dims"]) == (
        "s",
        "org/narrow",
        "org/wide",
        [64, 96],
    )
    assert [(p["a_layer"], p["b_layer"], p["seen"]) for p in document["points"]] == [
        (0, 1, True),
        (1, 2, False),
        (2, 2, True),
    ]
    assert all(0 <= p["similarity"] <= 1 for p in document["points"])
    assert (folder / "s.png").is_file()
    assert document["settings"]["labels"] == 0.5

    again = options(folder, "--points", "0:1,2:2", "--unseen", "1:2", "--name", "s", "--labels", "0.5")
    code, out, err = run(capsys, folder, *again)
    assert code == 0 and "mean similarity" in out and "trained before" in err

    code, out, _ = run(capsys, folder, "ls", "--json")
    assert {model["name"]: model["kind"] for model in json.loads(out)["models"]}["s"] == "stitch"
    code, out, _ = run(capsys, folder, "show", "s", "--json")
    (block,) = json.loads(out)["chain"]
    assert [component["kind"] for component in block["components"]] == ["stitch"]
    assert run(capsys, folder, "show", "s")[0] == 0
    assert run(capsys, folder, "verify")[0] == 0
    code, out, _ = run(capsys, folder, "export", "s", str(folder / "out"), "--json")
    assert json.loads(out)["files"] == ["stitch.json", "stitch.safetensors"]
    code, _, err = run(capsys, folder, "generate", "s", "hello")
    assert code == 2 and "is a stitch, not a model" in err
    with Zoo(folder / "store") as zoo:
        chosen = choose(zoo, [])
    assert chosen.names == ("org/narrow", "org/wide")
    assert run(capsys, folder, "rm", "s")[0] == 0
    assert run(capsys, folder, "gc")[0] == 0


def test_a_stitched_chain_is_served_token_for_token(folder, capsys):
    """From training to the engine's tokens: the tail's KV cache comes from stitched states of the whole context."""
    code, out, err = run(capsys, folder, *options(folder, "--json"))
    assert code == 0 and json.loads(out)["stitch"] == "narrow-to-wide-stitch", err
    slices = [
        {"sources": [{"model": "narrow", "layer_range": [0, 2]}]},
        {"sources": [{"model": "wide", "layer_range": [2, 3]}]},
    ]
    (folder / "chain.yaml").write_text(json.dumps({"slices": slices}))
    code, _, err = run(capsys, folder, "compose", str(folder / "chain.yaml"), "--name", "stitched")
    assert code == 0, err
    ids = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(4))
    with Zoo(folder / "store") as zoo:
        expected = (
            zoo.model("stitched")
            .load()
            .generate(ids, max_new_tokens=16, do_sample=False, use_cache=False, eos_token_id=-1)
        )
    arguments = [
        "--token-ids",
        ",".join(map(str, ids[0].tolist())),
        "--max-tokens",
        "16",
        "--ignore-eos",
        "--kv-cache-memory-bytes",
        "4MiB",
        "--json",
    ]
    code, out, err = run(capsys, folder, "generate", "stitched", *arguments)
    assert code == 0, err
    assert json.loads(out)["token_ids"] == expected[0, 20:].tolist()


def test_bad_input_is_one_line(folder, capsys):
    for more, words in (
        (["--points", "0-1"], "no place for a stitch"),
        (["--unseen", "0:1"], "--unseen goes with --points"),
        (["--precision", "fp4"], "precision"),
        (["--device", "cuda:99"], "device"),
        (["--steps", "0"], "at least one step"),
        (["--text", str(folder / "none.txt")], "no file"),
    ):
        code, out, err = run(capsys, folder, *options(folder, *more))
        assert (code, out) == (2, "") and words in err and len(err.strip().splitlines()) == 1


def test_values_that_are_not_finite_end_with_one(folder, capsys):
    edit_weights(folder / "wide", lambda key, tensor: tensor * torch.nan if "embed" in key else tensor)
    with Zoo(folder / "store") as zoo:
        zoo.ingest(folder / "wide", name="sick")
    arguments = options(folder)
    arguments[arguments.index("wide")] = "sick"
    code, out, err = run(capsys, folder, *arguments)
    assert (code, out) == (1, "") and "not finite" in err and len(err.strip().splitlines()) == 1
