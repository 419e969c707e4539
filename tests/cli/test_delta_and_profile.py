"""`zoo delta` and `zoo profile` as scripts use them: the documented JSON, and refusals in one line."""

from __future__ import annotations

import json

import pytest

from cli.app import main
from cli.serving.models import ZooSource
from runtime.types import ModelSpec
from tests import checkpoints
from tests.surgery.deltas.tunes import tune


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    from zoo import Zoo

    with Zoo(root / "store") as zoo:
        zoo.ingest(checkpoints.make("llama", root / "base"), name="base")
        zoo.ingest(tune("llama", root / "fine", ranks=3), name="fine", base="base")
    return root / "store"


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_delta_says_what_the_contract_promises(capsys, store, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def name_{i}(first, second): return first * {i} + second" for i in range(4000)))
    code, out, _ = run(
        capsys, "delta", "fine", "--store", str(store), "--rank", "2", "--text", str(text), "--name", "near", "--json"
    )
    said = json.loads(out)
    assert code == 0 and said["variant"] == "near" and said["rank"] == 2
    assert 0.9 < said["similarity"] <= 1.0 and 0 < said["bytes"] < said["bytes_exact"]
    assert [point["rank"] for point in said["curve"]] == [2] and said["control"] < said["similarity"]
    code, out, _ = run(capsys, "ls", "--store", str(store), "--json")
    assert {model["name"]: (model["kind"], model["base"]) for model in json.loads(out)["models"]}["near"] == (
        "delta",
        "base",
    )
    code, out, _ = run(capsys, "generate", "near", "def", "--store", str(store), "--max-tokens", "4", "--json")
    assert code == 0 and json.loads(out)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(("deltas", "stand_in"), [(True, "near"), (False, None)])
def test_the_server_is_told_of_rewritings_where_it_may_use_them(store, deltas, stand_in):
    """Needs the test above, which makes `near`."""
    from zoo import Zoo

    with Zoo(store) as zoo:
        served = ZooSource(zoo, deltas).served(ModelSpec("fine", 3, 16, 256, checkpoints.VOCAB))
        assert served.stand_in == stand_in
        assert ZooSource(zoo, deltas).served(ModelSpec("near", 3, 16, 256, checkpoints.VOCAB)).stand_in is None


def test_profile_says_what_the_contract_promises_and_shows_what_is_stored(capsys, store):
    sizes = ("--batches", "1,2", "--contexts", "8", "--chunks", "8", "--kv-cache-memory-bytes", "16MiB")
    code, out, _ = run(capsys, "profile", "fine", "--store", str(store), *sizes, "--json")
    said = json.loads(out)
    assert code == 0 and said["device"] == "cpu" and said["links"]
    assert all(
        set(block["batch"]) == {"1", "2"} and block["load_seconds"] > 0 and block["bytes"] > 0
        for block in said["blocks"]
    )
    assert json.loads(run(capsys, "profile", "fine", "--store", str(store), "--stored", "--json")[1]) == said
    assert said["key"] in run(capsys, "profile", "fine", "--store", str(store), "--stored")[1]


def test_delta_keeps_to_a_budget_of_bytes(capsys, store, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("\n".join(f"def name_{i}(first, second): return first * {i} + second" for i in range(4000)))
    options = ("--store", str(store), "--text", str(text), "--embeddings", "lowrank", "--json")
    code, out, _ = run(capsys, "delta", "fine", "--bytes", "25%", *options)
    said = json.loads(out)
    assert (
        code == 0
        and said["variant"] == "fine@delta-25pct"
        and 0.2 * said["bytes_exact"] < said["bytes"] <= 0.25 * said["bytes_exact"]
    )
    code, out, _ = run(capsys, "delta", "fine", "--bytes", "30kB", "--name", "small", *options)
    assert code == 0 and 20_000 < json.loads(out)["bytes"] <= 30_000


def test_the_server_is_told_what_chains_cost_where_that_was_measured(store):
    """Needs the test above, which measures `fine`."""
    from zoo import Zoo

    with Zoo(store) as zoo:
        spec = ModelSpec("fine", 3, 16, 256, checkpoints.VOCAB)
        assert ZooSource(zoo, deltas=True).served(spec).profile.decode.at(1, 8) > 0
        assert ZooSource(zoo, deltas=False).served(spec).profile is None
        assert ZooSource(zoo, deltas=True).served(ModelSpec("near", 3, 16, 256, checkpoints.VOCAB)).profile is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("delta", "base"), "--base names one"),
        (("delta", "fine", "--target", "2"), "similarity in (0, 1]"),
        (("delta", "fine", "--rank", "0"), "at least 1"),
        (("delta", "fine", "--rank", "1", "--text", "/nowhere.txt"), "no file"),
        (("delta", "fine", "--bytes", "100%"), "between 0% and 100%"),
        (("delta", "fine", "--bytes", "many"), "no size in bytes"),
        (("delta", "fine", "--bytes", "0"), "above 0"),
        (("delta", "fine", "--bytes", "25%", "--rank", "3"), "in place of a rank"),
        (("profile", "base", "--stored"), "not measured yet"),
        (("profile", "base", "--batches", "1,x"), "whole numbers"),
        (("profile", "base", "--device", "cuda:99"), "cannot be used"),
    ],
)
def test_refusals_are_one_line(capsys, store, arguments, words):
    code, out, err = run(capsys, *arguments, "--store", str(store))
    assert (code, out) == (2, "") and words in err and len(err.strip().splitlines()) == 1
