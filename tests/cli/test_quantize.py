"""`zoo quantize` as scripts use it, and quantised models behind `zoo generate`, `zoo ls` and a server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import cli.app
from surgery.quantize.make import quantize
from tests.checkpoints import make, make_lora
from tests.cli.test_serve import serving
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


def test_a_server_answers_by_the_model_that_is_asked_for(tmp_path: Path) -> None:
    """Exact, int8, fp8 and a LoRA over int8 in one engine, each near its own weights computed by transformers."""
    store = tmp_path / "store"
    with Zoo(store) as zoo:
        folder = make("llama", tmp_path / "m", dtype="bfloat16")
        zoo.ingest(folder, "m")
        for scheme in ("int8", "fp8"):
            quantize(zoo.store, "m", scheme)
        zoo.ingest(make_lora(folder, tmp_path / "lora"), "lora", "m-int8")
    prompt = [5, 9, 200, 31, 7]
    names = ("m", "m-int8", "m-fp8", "lora")
    with serving(store, tmp_path / "log") as served, served.client() as client:
        assert {model.id for model in client.models.list().data} == set(names)
        got = {
            name: client.completions.create(
                model=name, prompt=prompt, max_tokens=4, temperature=0, logprobs=0, extra_body={"ignore_eos": True}
            )
            for name in names
        }
    with Zoo(store) as zoo:
        for name in names:
            ours = [float(each) for each in got[name].choices[0].logprobs.token_logprobs]
            model, ids, wanted = zoo.model(name).load(dtype="float32"), torch.tensor([prompt]), []
            with torch.no_grad():
                for _ in ours:
                    logits = model(ids).logits[0, -1].log_softmax(-1)
                    wanted.append(float(logits.max()))
                    ids = torch.cat((ids, logits.argmax().view(1, 1)), dim=1)
            assert max(abs(a - b) for a, b in zip(ours, wanted, strict=True)) < 0.02
    answers = {tuple(each.choices[0].logprobs.token_logprobs) for each in got.values()}
    assert len(answers) == 4, "each has weights of its own"
