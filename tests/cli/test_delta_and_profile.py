"""`zoo delta` and `zoo profile` as scripts use them: the documented JSON, and refusals in one line."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cli.app import main
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.config import EngineConfig
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.profiling import kernel_report
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.runtime.engine.compiled import needs_kernels
from tests.surgery.deltas.tunes import tune

SIZES = ("--batches", "1,2", "--contexts", "8", "--chunks", "8", "--kv-cache-memory-bytes", "16MiB")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    from zoo import Zoo

    with Zoo(root / "store") as zoo:
        zoo.ingest(checkpoints.make("llama", root / "base"), name="base")
        zoo.ingest(tune("llama", root / "fine", ranks=3), name="fine", base="base")
    return root / "store"


@pytest.fixture(scope="module")
def with_delta(store, tmp_path_factory):
    """A copy of the store with `near`, a delta of `fine`."""
    root = tmp_path_factory.mktemp("delta")
    shutil.copytree(store, root / "store")
    text = text_in(root)
    with pytest.raises(SystemExit) as ended:
        main(["delta", "fine", "--store", str(root / "store"), "--rank", "2", "--text", text, "--name", "near"])
    assert not ended.value.code
    return root / "store"


def text_in(folder: Path) -> str:
    text = folder / "text.txt"
    text.write_text("\n".join(f"def name_{i}(first, second): return first * {i} + second" for i in range(4000)))
    return str(text)


def run(capsys, *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_delta_says_what_the_contract_promises(capsys, store, tmp_path):
    text, name = text_in(tmp_path), "close"
    code, out, _ = run(
        capsys, "delta", "fine", "--store", str(store), "--rank", "2", "--text", text, "--name", name, "--json"
    )
    said = json.loads(out)
    assert code == 0 and said["variant"] == name and said["rank"] == 2
    assert 0.9 < said["similarity"] <= 1.0 and 0 < said["bytes"] < said["bytes_exact"]
    assert [point["rank"] for point in said["curve"]] == [2] and said["control"] < said["similarity"]
    code, out, _ = run(capsys, "ls", "--store", str(store), "--json")
    assert {model["name"]: (model["kind"], model["base"]) for model in json.loads(out)["models"]}[name] == (
        "delta",
        "base",
    )
    code, out, _ = run(capsys, "generate", name, "def", "--store", str(store), "--max-tokens", "4", "--json")
    assert code == 0 and json.loads(out)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize("executor", ["paged", "dense"])
@pytest.mark.parametrize(
    ("deltas", "asks", "adaptive", "served"),
    [
        (True, "fine", True, "near"),
        (True, "fine", False, None),
        (True, "near", True, None),
        (False, "fine", True, None),
    ],
)
def test_adaptive_requests_get_the_delta_where_that_is_allowed(with_delta, executor, deltas, asks, adaptive, served):
    from cli.serving.cluster import start_cluster
    from zoo import Zoo

    options = ServeOptions(backend="inline", kv_cache_memory_bytes="16MiB", kernels="stock", serve_deltas=deltas)
    request = SequenceRequest("s", "s", asks, (5, 6, 7), SamplingParams(4, ignore_eos=True), adaptive=adaptive)
    with (
        Zoo(with_delta) as zoo,
        start_cluster(zoo, options, Chosen(("base", "fine", "near"), (), executor), None, None) as made,
    ):
        *_, last = made.run([request])
        assert (last.finish, last.served) == ("length", served)


@needs_kernels
def test_profile_of_the_kernels(capsys, monkeypatch):
    """The path in use and all limits, without a model; a model is needed otherwise."""
    monkeypatch.setattr(kernel_report, "_SKINNY_BYTES", 8 << 20)
    monkeypatch.setattr(kernel_report, "_READ_BYTES", 8 << 20)
    said = json.loads(run(capsys, "profile", "--kernels", "--json")[1])
    assert [one["dtype"] for one in said["products"]] == ["float32", "bfloat16"] and said["memory_bytes_s"] > 0
    assert said["products"][1]["path"] == Kernels().path
    for one in said["products"]:
        assert min(one["skinny_bytes_s"], one["prompt_flop_s"], one["peak_flop_s"]) > 0
    assert Kernels().path in run(capsys, "profile", "--kernels")[1]
    code, _, error = run(capsys, "profile")
    assert code != 0 and "--kernels" in error


def test_profile_says_what_the_contract_promises_and_shows_what_is_stored(capsys, store):
    code, out, _ = run(capsys, "profile", "fine", "--store", str(store), *SIZES, "--json")
    said = json.loads(out)
    assert code == 0 and said["device"] == "cpu" and said["links"]
    assert all(
        set(block["batch"]) == {"1", "2"} and block["load_seconds"] > 0 and block["bytes"] > 0
        for block in said["blocks"]
    )
    assert json.loads(run(capsys, "profile", "fine", "--store", str(store), "--stored", "--json")[1]) == said
    assert said["key"] in run(capsys, "profile", "fine", "--store", str(store), "--stored")[1]


def test_delta_keeps_to_a_budget_of_bytes(capsys, store, tmp_path):
    options = ("--store", str(store), "--text", text_in(tmp_path), "--embeddings", "lowrank", "--json")
    code, out, _ = run(capsys, "delta", "fine", "--bytes", "25%", *options)
    said = json.loads(out)
    assert (
        code == 0
        and said["variant"] == "fine@delta-25pct"
        and 0.2 * said["bytes_exact"] < said["bytes"] <= 0.25 * said["bytes_exact"]
    )
    code, out, _ = run(capsys, "delta", "fine", "--bytes", "30kB", "--name", "small", *options)
    assert code == 0 and 20_000 < json.loads(out)["bytes"] <= 30_000


def test_a_delta_is_weighed_by_its_own_measurement_as_a_whole(capsys, with_delta, tmp_path):
    """Its blocks are its base's, without what it adds."""
    store = shutil.copytree(with_delta, tmp_path / "store")
    from runtime.engine.catalog.block_profiles import measured_pieces
    from runtime.engine.catalog.describe import describe_chain
    from runtime.engine.catalog.variants import rewriting_of
    from runtime.engine.models.registry import half_page
    from zoo import Zoo

    def whole() -> list[float]:
        with Zoo(store) as zoo:
            half = half_page(zoo.store, EngineConfig(), ["near"])
            found = describe_chain(zoo.store, "near", EngineConfig(), half, 1 << 62).chain
            chain = replace(found, rewriting=rewriting_of(zoo.store, "near"))
            pieces = measured_pieces(zoo.store, {"near": chain}, "cpu", torch.get_num_threads())
            assert chain.rewriting.of == "fine" and rewriting_of(zoo.store, "fine") is None
        return [piece.decode.at(1, 8) for piece in pieces if piece.block == chain.version]

    run(capsys, "profile", "fine", "--store", str(store), *SIZES)
    assert not whole()
    said = json.loads(run(capsys, "profile", "near", "--store", str(store), *SIZES, "--json")[1])
    assert whole() == [pytest.approx(sum(block["decode"]["seconds"][0][0] for block in said["blocks"]), rel=1e-6)]


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
