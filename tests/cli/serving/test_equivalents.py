"""Equivalent blocks that the store has scored serve adaptive requests, without further options (BL-20)."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cli.serving.cluster import start_cluster
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.cluster.driver.driver import ClusterDriver
from runtime.engine.models.swapped import read_model
from runtime.types import SamplingParams, SequenceRequest
from surgery.scoring.compare import CompareSettings
from tests import checkpoints
from tests.surgery.helpers import edit_weights
from zoo.api import Zoo
from zoo.errors import NotFound

PROBE = CompareSettings(source=__file__, tokens=96, length=32, control=False)
#: Room for one of two models of 533 kB that share 164 kB.
OPTIONS = ServeOptions(
    backend="inline", kv_cache_memory_bytes="1MiB", device_memory="1700KiB", kernels="stock", max_model_len=256
)
PROMPTS = [tuple(range(5 + at, 5 + 3 * at)) for at in range(2, 8)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with `base`, and `tuned`: the same embedding and head, and all layers moved."""
    folder = tmp_path_factory.mktemp("equivalents")
    base = checkpoints.make("llama", folder / "base", num_hidden_layers=3)
    shutil.copytree(base, folder / "tuned")
    generator = torch.Generator().manual_seed(3)
    edit_weights(folder / "tuned", lambda key, tensor: moved(key, tensor, generator))
    with Zoo(folder / "store") as zoo:
        zoo.ingest(base, name="base")
        zoo.ingest(folder / "tuned", name="tuned", base="base")
        pairs = zoo.equate("tuned", settings=PROBE)
        assert [(pair.a.lo, pair.a.hi, pair.similarity < 1) for pair in pairs] == [(1, 7, True)], pairs
    return folder / "store"


def moved(key: str, tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if "layers" not in key or tensor.dim() != 2:
        return tensor
    return tensor + 0.05 * tensor.float().std() * torch.randn(tensor.shape, generator=generator)


@contextmanager
def served(root: Path, options: ServeOptions = OPTIONS) -> Iterator[ClusterDriver]:
    with Zoo(root) as zoo, start_cluster(zoo, options, Chosen(("base", "tuned"), ()), None, None) as driver:
        yield driver


def ask(driver: ClusterDriver, model: str, adaptive: bool = False) -> tuple[list[list[int]], set[str | None]]:
    """Return the tokens of each prompt, and by which chains they were served."""
    tokens: dict[str, list[int]] = {}
    chains: set[str | None] = set()
    for at, prompt in enumerate(PROMPTS):
        seq = f"{model}-{adaptive}-{at}"
        sampling = SamplingParams(8, ignore_eos=True)
        for event in driver.run([SequenceRequest(seq, seq, model, prompt, sampling, adaptive=adaptive)]):
            tokens.setdefault(seq, []).append(event.token)
            chains |= {event.served} if event.finish else set()
    return list(tokens.values()), chains


def test_an_equivalent_serves_adaptive_requests_while_the_model_is_not_resident(root: Path) -> None:
    with served(root) as driver:
        tuned, _ = ask(driver, "tuned")
        before = driver.state().counters.loaded_bytes
        instead, chains = ask(driver, "base", adaptive=True)
        assert chains == {"base[1:7=tuned]"}
        assert instead == tuned, "embedding and head are equal, so with all other blocks of `tuned` it is `tuned`"
        counters = driver.state().counters
        assert counters.adapted == len(PROMPTS) and 0.98 < counters.adapted_similarity / 1e6 / len(PROMPTS) < 1
        assert counters.loaded_bytes == before, "the equivalent adds no bytes"
        base, chains = ask(driver, "base")
        assert chains == {None} and base != instead
        assert ask(driver, "base", adaptive=True) == (base, {None}), "now the model is resident"
        assert driver.state().counters.adapted == len(PROMPTS)


def test_exact_requests_never_get_it(root: Path) -> None:
    with served(root) as driver:
        ask(driver, "tuned")
        exact, chains = ask(driver, "base")
        assert chains == {None} and driver.state().counters.adapted == 0
    with served(root) as alone:
        assert ask(alone, "base")[0] == exact


@pytest.mark.parametrize("changed", [{"min_equivalence": 0.999}, {"weight_sharing": "models"}])
def test_below_the_least_similarity_it_is_not_offered(root: Path, changed: dict[str, object]) -> None:
    with served(root, replace(OPTIONS, **changed)) as driver:  # type: ignore[arg-type]
        ask(driver, "tuned")
        assert ask(driver, "base", adaptive=True)[1] == {None}


def test_names_say_which_components_are_exchanged(root: Path) -> None:
    with Zoo(root) as zoo, zoo.store.catalog.reading() as reader:
        digests = reader.component_digests(["base", "tuned"])
        assert read_model(reader, "ase")[0] == reader.model("base")
        manifest, blocks = read_model(reader, "base[1:7=tuned]")
        assert manifest.name == "base[1:7=tuned]" and [(block.lo, block.hi) for block in blocks] == [
            (0, 1), (1, 7), (7, 8),
        ]  # fmt: skip
        placed = [each.component.digest for each in manifest.components]
        assert placed == [*digests["base"][:1], *digests["tuned"][1:7], *digests["base"][7:]]
        assert blocks[1] in reader.chain("tuned"), "the block is that of `tuned`: they share an instance"
        several, _ = read_model(reader, "base[0:1,1:7=tuned]")
        assert [each.component.digest for each in several.components] == placed, "their embeddings are equal"


@pytest.mark.parametrize("name", ["base[2:7=tuned]", "base[1:7=none]", "base[1:7,0:1=tuned]", "base[1:9=tuned]"])
def test_names_of_what_cannot_be_exchanged_are_unknown(root: Path, name: str) -> None:
    with Zoo(root) as zoo, zoo.store.catalog.reading() as reader, pytest.raises(NotFound):
        read_model(reader, name)


def test_a_stored_model_goes_before_a_name_of_the_same_form(root: Path, tmp_path: Path) -> None:
    shutil.copytree(root, tmp_path / "store")
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(checkpoints.make("gpt2", tmp_path / "other"), name="base[1:7=tuned]")
        with zoo.store.catalog.reading() as reader:
            assert read_model(reader, "base[1:7=tuned]")[0].family == "gpt2"
