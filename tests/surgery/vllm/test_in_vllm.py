"""Stock vLLM gives each model's own tokens from folders without weights.

vLLM takes gigabytes and an environment of its own, with this package in it (docs/vllm.md): `BLOCKZOO_VLLM` names that
environment's Python. Without it the tests say so and are skipped.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch

from tests.chains import put_chain, put_stitch
from tests.checkpoints import make_lora
from zoo import Zoo

PYTHON = os.environ.get("BLOCKZOO_VLLM", "")
pytestmark = pytest.mark.skipif(not PYTHON, reason="STOCK VLLM IS NOT TESTED: BLOCKZOO_VLLM names no Python with vLLM")

ENGINE = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
TOKENS = 16
#: vLLM's attention on CPUs has heads of 32 and more.
WIDE = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 192}
WIDER = {"hidden_size": 256, "head_dim": 32, "intermediate_size": 192}

_ASK = f"""
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM(sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=128, max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens={TOKENS}, ignore_eos=True, detokenize=False)
    asked = [{{"prompt_token_ids": each}} for each in json.loads(sys.argv[2])]
    print("ANSWERS", json.dumps([list(each.outputs[0].token_ids) for each in llm.generate(asked, params)]))
"""


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory, made: Callable[..., Path]) -> Zoo:
    root = tmp_path_factory.mktemp("zoo")
    zoo = Zoo(root / "store")
    zoo.ingest(made("llama", **WIDE), name="org/base")
    zoo.ingest(made("llama", seed=1, **WIDE), name="org/tune")
    zoo.ingest(made("qwen3", **WIDER), name="org/wide")
    zoo.ingest(make_lora(made("llama", **WIDE), root / "lora"), name="org/lora", base="org/base")
    put_stitch(zoo.store, "org/base", "org/wide")
    put_chain(zoo.store, "org/stitched", ("org/base", 0, 2), ("org/wide", 1, 3))
    return zoo


def answers(zoo: Zoo, model: str, prompts: list[list[int]]) -> list[list[int]]:
    loaded = zoo.model(model).load()
    found = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        with torch.no_grad():
            out = loaded.generate(ids, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0)
        found.append(out[0, len(prompt) :].tolist())
    return found


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 300, (length,), generator=generator).tolist() for length in (3, 9, 20)]


@pytest.mark.parametrize("model", ["org/base", "org/tune", "org/lora", "org/stitched"])
def test_tokens_are_the_models_own(zoo: Zoo, tmp_path: Path, model: str) -> None:
    zoo.model(model).export(tmp_path / "out", for_engine="vllm")
    command = [PYTHON, "-c", _ASK, str(tmp_path / "out"), json.dumps(prompts())]
    environment = {**ENGINE, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=tmp_path)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")] or [done.stderr[-3000:]]
    assert json.loads(line.removeprefix("ANSWERS ")) == answers(zoo, model, prompts())


def test_vllm_serves_a_folder(zoo: Zoo, tmp_path: Path) -> None:
    zoo.model("org/lora").export(tmp_path / "out", for_engine="vllm")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve = [PYTHON, "-m", "vllm.entrypoints.openai.api_server"]  # `vllm serve`, which lacks its package's name on CPUs
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "128", "--host", "127.0.0.1"]
    with (tmp_path / "log").open("w") as log:
        server = subprocess.Popen(
            [*serve, "--model", str(tmp_path / "out"), *options, "--port", str(port)],
            stdout=log,
            stderr=log,
            env=ENGINE,
            cwd=tmp_path,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=120) as http:
            body = {"model": str(tmp_path / "out"), "prompt": prompts()[1], "max_tokens": TOKENS, "temperature": 0}
            asked = {**body, "ignore_eos": True, "return_token_ids": True}
            assert _is_up(http, server), (tmp_path / "log").read_text()[-3000:]
            answer = http.post("/v1/completions", json=asked).json()
        assert answer["choices"][0]["token_ids"] == answers(zoo, "org/lora", [prompts()[1]])[0]
    finally:
        server.terminate()
        server.wait(120)


def _is_up(http: httpx.Client, server: subprocess.Popen[bytes]) -> bool:
    end = time.monotonic() + 600
    while time.monotonic() < end and server.poll() is None:
        try:
            if http.get("/health").status_code == 200:
                return True
        except httpx.TransportError:
            time.sleep(0.5)
    return False
