"""`zoo serve` (all families and LoRAs at once) and `zoo generate` give transformers' and peft's token IDs.

One server process, queried through the real client: the pool is too small for all requests, prompts come in chunks,
and requests arrive while earlier ones run. Then each model runs once more through the command line.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest
from peft import PeftModel

import cli.app
from tests import checkpoints
from tests.cli.test_serve import serving
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from zoo.api import Zoo

COUNT = 24
ADAPTED = ("llama", "gpt2", "gpt_neox")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with checkpoints in `hf/<name>` and the store they were ingested into."""
    root = tmp_path_factory.mktemp("served")
    with Zoo(root / "store") as zoo:
        for family in checkpoints.SERVED:
            zoo.ingest(checkpoints.make(family, root / "hf" / family, shards="60KB"), name=family)
        for family in ADAPTED:
            lora = checkpoints.make_lora(root / "hf" / family, root / "hf" / f"{family}-lora")
            zoo.ingest(lora, name=f"{family}-lora", base=family)
    yield root


def names() -> list[str]:
    return [*checkpoints.SERVED, *(f"{family}-lora" for family in ADAPTED)]


def oracle(root: Path, name: str):
    if name.endswith("-lora"):
        return PeftModel.from_pretrained(reference(root / "hf" / name.removesuffix("-lora")), root / "hf" / name).eval()
    return reference(root / "hf" / name)


def prompts(name: str) -> list[list[int]]:
    rng = random.Random(name)
    return [[rng.randrange(3, checkpoints.VOCAB) for _ in range(length)] for length in (2, 27, 11)]


@pytest.mark.parametrize("memory", ["of all models", "of two models"])
def test_the_server_gives_the_models_own_tokens(root: Path, tmp_path: Path, memory: str) -> None:
    small = ["--kv-cache-memory-bytes", "256KiB", "--max-num-batched-tokens", "24", "--max-num-seqs", "24"]
    swaps = memory == "of two models"
    if swaps:  # named first, each by itself; its stages come and go
        small += ["--agent-weights", str(2 * largest(root))]
    with (
        serving(root / "store", tmp_path / "log", *small, "--trace", str(tmp_path / "trace")) as served,
        served.client() as client,
    ):
        asked = [
            (name, prompt)
            for prompt_number in range(3)
            for name in names()
            for prompt in [prompts(name)[prompt_number]]
        ]
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda pair: ask(client, *pair), asked))
    events = [json.loads(line)["ev"] for line in (tmp_path / "trace").read_text().splitlines()]
    assert ("stage.unload" if swaps else "batch.preempt") in events, "the memory was to be too small"
    for name in names():
        model = oracle(root, name)
        for (asked_name, prompt), got in zip(asked, answers, strict=True):
            if asked_name == name:
                assert same_tokens(model, prompt, greedy(model, prompt, COUNT), got) == len(got), name


def largest(root: Path) -> int:
    """Return the bytes of the largest model."""
    with Zoo(root / "store") as zoo:
        return max(model.bytes for model in zoo.models())


def ask(client: openai.OpenAI, name: str, prompt: list[int]) -> list[int]:
    extra = {"return_token_ids": True}
    done = client.completions.create(model=name, prompt=prompt, max_tokens=COUNT, temperature=0, extra_body=extra)
    return list(done.choices[0].token_ids)


@pytest.mark.parametrize("name", names())
def test_the_command_line_gives_the_models_own_tokens(
    root: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = prompts(name)[2]
    ids = ",".join(map(str, prompt))
    arguments = [
        "generate",
        name,
        "--token-ids",
        ids,
        "--max-tokens",
        str(COUNT),
        "--kv-cache-memory-bytes",
        "4MiB",
        "--store",
        str(root / "store"),
        "--json",
    ]
    with pytest.raises(SystemExit) as end:
        cli.app.main(arguments)
    assert end.value.code in (0, None)
    got = json.loads(capsys.readouterr().out)
    model = oracle(root, name)
    assert same_tokens(model, prompt, greedy(model, prompt, COUNT), got["token_ids"]) == len(got["token_ids"])
