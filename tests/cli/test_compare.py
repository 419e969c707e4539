"""`zoo compare`, and what `zoo show` lists of it, as scripts use them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cli.app
from tests.checkpoints import make
from tests.surgery.helpers import edit_weights
from zoo.api import Zoo

SMALL = ("--probe", __file__, "--tokens", "64", "--window", "32")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """A store with base; tuned, slightly changed from it; deep, with more layers; and other, of another family."""
    root = tmp_path_factory.mktemp("compared")
    make("llama", root / "base")
    make("llama", root / "tuned")
    generator = torch.Generator().manual_seed(0)
    edit_weights(
        root / "tuned",
        lambda key, tensor: tensor + 0.002 * tensor.std() * torch.randn(tensor.shape, generator=generator),
    )
    make("llama", root / "deep", seed=3, num_hidden_layers=6)
    make("qwen2", root / "other", vocab_size=500, tokenizer=False)
    with Zoo(root / "zoo_store") as zoo:
        zoo.ingest(root / "base", name="base")
        zoo.ingest(root / "tuned", name="tuned", base="base")
        zoo.ingest(root / "deep", name="deep")
        zoo.ingest(root / "other", name="other")
    return root / "zoo_store"


@pytest.fixture
def zoo(store, monkeypatch, capsys):
    """Run the command with `compare`, `show` and `ingest` only; return exit code, output and errors."""
    monkeypatch.setattr(cli.app, "VERBS", {verb: cli.app.VERBS[verb] for verb in ("compare", "show", "ingest")})

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main([*map(str, arguments), "--store", str(store)])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_the_document_of_the_contract(zoo):
    code, out, _ = zoo("compare", "base", "tuned", *SMALL, "--json")
    document = json.loads(out)
    assert code == 0
    assert (document["a"], document["b"], document["probe"]["tokens"], len(document["probe"]["sha"])) == (
        "base",
        "tuned",
        64,
        64,
    )
    assert [(pair["a"], pair["b"]) for pair in document["pairs"]] == [([n, n + 1], [n, n + 1]) for n in range(3)]
    assert all(
        0.98 < pair["similarity"] <= 1 and 0 <= pair["control"] < pair["similarity"] for pair in document["pairs"]
    )
    assert document["mean"] == pytest.approx(sum(pair["similarity"] for pair in document["pairs"]) / 3)
    assert document["control"] < document["mean"]
    assert "matrix" not in document


def test_components_of_a_chain_are_named_by_their_place(zoo):
    _, out, _ = zoo(
        "compare", "base", "tuned", *SMALL, "--granularity", "component", "--no-control", "--matrix", "--json"
    )
    document = json.loads(out)
    assert [pair["a"] for pair in document["pairs"]] == [[n, n + 1] for n in range(8)]
    assert document["control"] is None and len(document["matrix"]["similarity"]) == 8


def test_show_lists_what_was_scored_against_exactly_a_block(zoo, store):
    """Both chains are one block; layers are no block, so scores at layers are not listed until the whole is scored."""
    zoo("compare", "base", "tuned", *SMALL, "--no-control")
    assert [block["equivalents"] for block in json.loads(zoo("show", "base", "--json")[1])["chain"]] == [[]]
    from zoo.records import Equivalence, ScoredRun

    with Zoo(store) as opened, opened.store.catalog.writing() as writer:
        writer.put_equivalences(
            [Equivalence("equivalent", ScoredRun("tuned", 0, 8), ScoredRun("base", 0, 8), "0" * 64, 0.99)]
        )
    for name, other in (("base", "tuned"), ("tuned", "base")):
        (block,) = json.loads(zoo("show", name, "--json")[1])["chain"]
        (whole,) = json.loads(zoo("show", other, "--json")[1])["chain"]
        assert block["equivalents"] == [
            {"block": whole["block"], "model": other, "similarity": 0.99, "blocks": [whole["block"]]}
        ]
    assert json.loads(zoo("show", "base", "--threshold", "0.995", "--json")[1])["chain"][0]["equivalents"] == []
    assert "tuned 0.990" in zoo("show", "base")[1]


@pytest.mark.parametrize("other", ["tuned", "deep"])
def test_a_heatmap_and_a_table_for_people(zoo, tmp_path, other):
    code, out, err = zoo("compare", "base", other, *SMALL, "--plot", tmp_path / "map.png")
    assert code == 0
    assert (tmp_path / "map.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "map.png" in err and "similarity" in out and "mean " in out
    assert max(len(line) for line in out.splitlines() if "probe" not in line) <= 80


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("base", "other"), "different tokenizers"),
        (("base", "nobody"), "nobody"),
        (("base", "tuned", "--probe", "/nowhere/at/all.txt"), "there is no file"),
        (("base", "tuned", "--dtype", "float99"), "no dtype"),
        (("base", "tuned", "--device", "abacus"), "there is no device 'abacus' here"),
        (("base", "deep", "--granularity", "layer"), "use the granularity `group`"),
        (("base", "deep", "--granularity", "component"), "use the granularity `layer` or `group`"),
        (("base", "tuned", "--plot", "/nowhere/at/all.png"), "cannot be written"),
    ],
)
def test_bad_input_is_one_line_and_two(zoo, arguments, reason):
    code, _, err = zoo("compare", *arguments, *(() if "--probe" in arguments else SMALL))
    lines = [line for line in err.splitlines() if line.startswith("zoo: ")]
    assert (code, len(lines)) == (2, 1)
    assert reason in lines[0]


def test_a_text_without_text(zoo, tmp_path: Path):
    (tmp_path / "empty.txt").write_text("\n\n")
    code, _, err = zoo("compare", "base", "tuned", "--probe", tmp_path / "empty.txt")
    assert code == 2 and "a probe file without text" in err


@pytest.fixture
def fresh(store, tmp_path, monkeypatch, capsys):
    """Run `fresh("ingest", …)` in a store of its own; the checkpoints lie in `store.parent`."""
    monkeypatch.setattr(cli.app, "VERBS", {verb: cli.app.VERBS[verb] for verb in ("ingest", "show")})

    def run(verb, *arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main([verb, *map(str, arguments), "--store", str(tmp_path / "zoo_store"), "--json"])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), json.loads(printed.out) if printed.out else None, printed.err

    return run


def test_an_ingest_with_a_probe_cuts_where_models_stop_being_alike(store, fresh):
    code, report, err = fresh("ingest", store.parent / "base", "--probe", __file__)
    assert code == 0 and report["equivalents"] == [] and "the zoo has no base of it" in err
    code, report, _ = fresh("ingest", store.parent / "tuned", "--base", "base", "--probe", __file__)
    assert code == 0 and report["blocks"] == 1
    (pair,) = report["equivalents"]
    assert (pair["model"], pair["a"], pair["b"]) == ("base", [0, 8], [0, 8]) and 0.98 < pair["lowest"] <= pair[
        "similarity"
    ] <= 1
    (block,) = fresh("show", "base")[1]["chain"]
    assert [each["model"] for each in block["equivalents"]] == ["tuned"]
    _, report, _ = fresh("ingest", store.parent / "tuned", "--base", "base", "--threshold", "1", "--probe", __file__)
    assert report["equivalents"] == []
    assert all(each["model"] == "tuned" for block in fresh("show", "base")[1]["chain"] for each in block["equivalents"])


def test_without_a_threshold_an_ingest_scores_nothing(store, fresh):
    fresh("ingest", store.parent / "base")
    _, report, _ = fresh("ingest", store.parent / "tuned", "--base", "base")
    assert report["equivalents"] == [] and report["blocks"] == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [(("--threshold", "2"), "between 0 and 1"), (("--probe", "/nowhere/at/all.txt"), "there is no file")],
)
def test_bad_scoring_is_refused_before_anything_is_stored(store, fresh, options, reason, tmp_path):
    code, _, err = fresh("ingest", store.parent / "base", *options)
    assert code == 2 and reason in err
    assert not (tmp_path / "zoo_store").exists()
