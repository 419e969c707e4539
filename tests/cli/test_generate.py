"""`zoo generate`: the tokens of transformers, the documented JSON, one line per refusal."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

import cli.app
from zoo.api import Zoo

PROMPT = "def hello(world):"


@dataclass(frozen=True)
class Result:
    """Exit code and output of one run of the command."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def generate(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `zoo generate` on the store, with a small KV cache."""
    monkeypatch.setattr(cli.app, "VERBS", {"generate": "cli.generate", "ls": "cli.ls"})

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main(["generate", "--store", str(store), "--kv-cache-memory-bytes", "4MiB", *arguments])
        printed = capsys.readouterr()
        return Result(int(ended.value.code or 0), printed.out, printed.err)

    return run


def reference(store: Path, name: str, ids: list[int], count: int) -> list[int]:
    """Return the tokens that transformers generates greedily."""
    import torch

    with Zoo(store) as zoo:
        model = zoo.model(name).load()
    out = model.generate(torch.tensor([ids]), max_new_tokens=count, do_sample=False, use_cache=True)
    return out[0, len(ids) :].tolist()


@pytest.mark.parametrize("name", ["org/base", "lora"])
def test_json_has_the_tokens_of_transformers(generate: Run, store: Path, name: str) -> None:
    result = generate(name, PROMPT, "--max-tokens", "12", "--json")
    document = json.loads(result.out)
    with Zoo(store) as zoo:
        tokenizer = zoo.model(name).tokenizer()
    prompt = tokenizer(PROMPT)["input_ids"]
    assert document["token_ids"] == reference(store, name, prompt, 12)
    assert document["model"] == f"org/{name.removeprefix('org/')}"
    assert document["text"] == tokenizer.decode(prompt + document["token_ids"], skip_special_tokens=True)[len(PROMPT) :]
    assert document["finish_reason"] in ("length", "stop")
    count = len(document["token_ids"])
    assert document["usage"] == {
        "prompt_tokens": len(prompt),
        "completion_tokens": count,
        "total_tokens": len(prompt) + count,
    }


def test_text_goes_to_standard_output_alone(generate: Run) -> None:
    result = generate("base", PROMPT, "--max-tokens", "6")
    document = json.loads(generate("base", PROMPT, "--max-tokens", "6", "--json").out)
    assert result.out == document["text"] + "\n" and result.code == 0


def test_stop_ends_the_text(generate: Run) -> None:
    whole = json.loads(generate("base", PROMPT, "--max-tokens", "20", "--json").out)["text"]
    stop = whole[8:10]
    cut = json.loads(generate("base", PROMPT, "--max-tokens", "20", "--stop", stop, "--json").out)
    assert cut["text"] == whole[: whole.index(stop)] and cut["finish_reason"] == "stop"


def test_a_seed_repeats_a_draw(generate: Run) -> None:
    options = ("base", PROMPT, "--max-tokens", "8", "--temperature", "1.5", "--json", "--seed")
    one, again, other = (json.loads(generate(*options, seed).out)["token_ids"] for seed in ("1", "1", "2"))
    assert one == again != other


def test_a_model_without_a_tokenizer_takes_token_ids(generate: Run) -> None:
    result = generate("bare", "--token-ids", "5, 6,7", "--max-tokens", "4", "--json")
    document = json.loads(result.out)
    assert len(document["token_ids"]) == 4 and document["text"] == "" and "token ids only" in result.err
    refused = generate("bare", "text")
    assert refused.code == 2 and "token ids" in refused.err.splitlines()[-1]


def test_both_executors_say_the_same(generate: Run) -> None:
    options = ("base", PROMPT, "--max-tokens", "8", "--json")
    paged, dense = (json.loads(generate(*options, "--executor", each).out)["token_ids"] for each in ("paged", "dense"))
    assert paged == dense and len(paged) == 8


def test_what_needs_the_dense_executor_gets_it(generate: Run, store: Path) -> None:
    document = json.loads(generate("bloom", "--token-ids", "5,6,7", "--max-tokens", "4", "--json").out)
    assert document["model"] == "org/bloom" and document["token_ids"] == reference(store, "bloom", [5, 6, 7], 4)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("nobody", "x"), "nobody"),
        (("bloom", "x", "--executor", "paged"), "dense executor"),
        (("base", ""), "no tokens"),
        (("base",), "--token-ids"),
        (("base", "x", "--token-ids", "1"), "--token-ids"),
        (("base", "--token-ids", "1,x"), "whole numbers"),
        (("base", "--token-ids", ""), "prompt is empty"),
        (("base", "--token-ids", "5,320"), "vocabulary"),
        (("base", "x", "--max-tokens", "256"), "maximum context length"),
        (("base", "x", "--max-tokens", "0"), "max_tokens"),
        (("base", "x", "--temperature", "nan"), "temperature"),
        (("base", "x", "--top-p", "2"), "top_p"),
        (("base", "x", "--device", "abacus"), "abacus"),
        (("base", "x", "--dtype", "int3"), "dtype"),
        (("base", "x", "--kv-cache-memory-bytes", "many"), "size"),
        (("base", "x", "--kv-cache-memory-bytes", "900TB"), "lower --kv-cache-memory-bytes"),
    ],
)
def test_refusals_are_one_line_and_exit_code_two(generate: Run, arguments: tuple[str, ...], word: str) -> None:
    result = generate(*arguments)
    assert result.code == 2 and result.out == ""
    assert word in result.err and "Traceback" not in result.err
    assert len([line for line in result.err.splitlines() if line.startswith("zoo: ")]) == 1
