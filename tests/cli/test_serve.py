"""`zoo serve` as users start it: a process, an address, answers, a drain."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import openai
import pytest

import cli.app
from cli.serve import ended_by_sigterm
from cli.serving.models import choose
from cli.serving.options import ServeOptions, gather, size_of
from runtime.config import AgentConfig
from runtime.frontend.served_models import SamplingDefaults, defaults_from
from runtime.policy.routing.variants import DispatchLimits
from zoo.api import Zoo
from zoo.errors import InputError, NotServable

_COMMAND = "import cli.app; cli.app.VERBS = {'serve': 'cli.serve', 'ls': 'cli.ls'}; cli.app.main()"


@dataclass(frozen=True)
class Served:
    """A running `zoo serve` process, its address and its log."""

    address: str
    process: subprocess.Popen[str]
    log: Path

    def client(self, key: str = "k3y") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.address}/v1", api_key=key, max_retries=0, timeout=60)


@contextmanager
def serving(store: Path, log: Path, *arguments: str) -> Iterator[Served]:
    """Run `zoo serve` as a process, on a free port, until the block ends."""
    command = [
        sys.executable,
        "-c",
        _COMMAND,
        "serve",
        "--store",
        str(store),
        "--port",
        "0",
        "--kv-cache-memory-bytes",
        "4MiB",
        *arguments,
    ]
    environment = {**os.environ, "ZOO_API_KEY": "k3y", "OMP_NUM_THREADS": "1"}
    with log.open("w") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
    try:
        line = process.stdout.readline() if process.stdout else ""
        if not line:
            raise RuntimeError(log.read_text())
        yield Served(line.strip(), process, log)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("backend", "gone"), [("auto", "model.withdraw"), ("local", "model.withdraw")])
def test_all_models_are_served_until_the_signal(store: Path, tmp_path: Path, backend: str, gone: str) -> None:
    trace = tmp_path / "trace.jsonl"
    with (
        serving(store, tmp_path / "log", "--trace", str(trace), "--backend", backend) as served,
        served.client() as client,
    ):
        assert "(inline)" in served.log.read_text()
        assert [model.id for model in client.models.list()] == ["org/bare", "org/base", "org/lora"]
        assert "left out: org/bloom" in served.log.read_text()
        done = client.completions.create(
            model="base", prompt="def hello", max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
        )
        assert done.model == "org/base" and done.usage.completion_tokens == len(done.choices[0].token_ids)
        lora = client.chat.completions.create(
            model="lora", messages=[{"role": "user", "content": "hi"}], max_tokens=6, temperature=0
        )
        assert lora.usage.completion_tokens > 0
        with pytest.raises(openai.AuthenticationError):
            client.with_options(api_key="other").models.list()
        headers = {"Authorization": "Bearer k3y"}
        with httpx.Client(base_url=served.address, headers=headers, trust_env=False, timeout=60) as http:
            assert http.post("/zoo/models/org/bloom/load").status_code == 400
            assert http.post("/zoo/models/bare/unload").json() == {"unloaded": "org/bare"}
            assert http.post("/zoo/models/bare/load").json()["id"] == "org/bare"
            rows = {row["name"]: row["loaded"] for row in http.get("/zoo/models").json()["models"]}
            assert rows == {"org/bare": True, "org/base": True, "org/bloom": False, "org/lora": True}
            agent = http.get("/zoo/state").json()["agents"][0]
            assert agent["memory"]["weights"] < agent["memory"]["weights_unshared"]
            assert agent["pages"]["free"] == agent["pages"]["capacity"] > 0
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(30) == 0
        assert served.process.stdout is not None and served.process.stdout.read() == ""
    events = [json.loads(line)["ev"] for line in trace.read_text().splitlines()]
    assert {"arrive", "segment.run", "token", "finish", "model.load", gone} <= set(events)
    log = served.log.read_text()
    assert "POST '/v1/completions' 200" in log and "def hello" not in log and "k3y" not in log


def test_the_dense_executor_serves_what_pages_cannot(store: Path, tmp_path: Path) -> None:
    with (
        serving(store, tmp_path / "log", "--executor", "dense", "--dense-slots", "2") as served,
        served.client() as client,
    ):
        assert [model.id for model in client.models.list()] == ["org/bare", "org/base", "org/bloom", "org/lora"]
        for model in ("bloom", "lora"):
            done = client.completions.create(
                model=model, prompt=[5, 6, 7], max_tokens=5, temperature=0, n=3, extra_body={"ignore_eos": True}
            )
            assert done.usage.completion_tokens == 15 and len({choice.text for choice in done.choices}) == 1


def test_a_device_is_dense_only_where_a_named_model_needs_it(store: Path) -> None:
    with Zoo(store) as zoo:
        whole = choose(zoo, ())
        assert (whole.executor, len(whole.names), len(whole.skipped)) == ("paged", 3, 1)
        assert choose(zoo, ["base"]).executor == "paged" and choose(zoo, ["base", "bloom"]).executor == "dense"
        assert len(choose(zoo, (), executor="dense").names) == 4
        with pytest.raises(NotServable, match="--executor dense"):
            choose(zoo, ["bloom"], executor="paged")


@pytest.fixture
def refusal(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `zoo serve` with arguments that it must refuse, and return the one line of error."""
    monkeypatch.setattr(cli.app, "VERBS", {"serve": "cli.serve", "ls": "cli.ls"})
    monkeypatch.delenv("ZOO_API_KEY", raising=False)

    def run(*arguments: str) -> str:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main(["serve", "--store", str(store), "--port", "0", *arguments])
        printed = capsys.readouterr()
        assert ended.value.code == 2 and printed.out == ""
        lines = [line for line in printed.err.splitlines() if line.startswith("zoo: ")]
        assert len(lines) == 1, printed.err
        return lines[0]

    return run


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--models", "bloom", "--executor", "paged"), "dense executor"),
        (("--executor", "sparse"), "auto, paged or dense"),
        (("--executor", "dense", "--dense-mode", "relay"), "baton-pd"),
        (("--models", "nobody"), "nobody"),
        (("--agents", "0"), "at least 1"),
        (("--backend", "pigeons"), "threads, process, processes or ray"),
        (("--otlp-traces-endpoint", "collector:4318"), "http://host:4318"),
        (("--agents", "2", "--executor", "dense"), "stay on one device"),
        (("--agents", "2", "--agent-weights", "much"), "no size"),
        (("--device-memory", "4GiB", "--agent-weights", "1GiB"), "give one of them"),
        (("--device-memory", "1GiB", "--kv-cache-memory-bytes", "1GiB"), "leaves nothing for weights"),
        (("--eviction", "lru"), "--eviction has no effect without a limit of memory"),
        (("--preemption-mode", "swap"), "--preemption-mode has no effect without host memory: give --host-memory"),
        (("--agents", "2", "--backend", "inline"), "the only one"),
        (("--agents", "2", "--backend", "local"), "the only one"),
        (("--backend", "processes", "--executor", "dense"), "stay on one device"),
        (("--models", "bloom", "--async-scheduling", "on"), "--async-scheduling has no effect with the dense executor"),
        (("--api-key", ""), "empty"),
        (("--device", "abacus"), "abacus"),
        (("--max-num-batched-tokens", "0"), "max_num_batched_tokens"),
        (("--kv-cache-memory-bytes", "0"), "kv_cache_memory_bytes"),
        (("--host", "no such host"), "cannot listen"),
        (("--trace", "/nowhere/at/all"), "trace"),
        (("--config", "/nowhere.toml"), "cannot be read"),
    ],
)
def test_what_cannot_be_served_is_one_line(refusal, arguments: tuple[str, ...], word: str) -> None:
    assert word in refusal(*arguments)


def test_sigterm_while_models_load_undoes_what_was_begun() -> None:
    undone, before = [], signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, ended_by_sigterm(), ExitStack() as begun:
        begun.callback(undone.append, "all")
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait(5)
    assert (ended.value.code, undone) == (143, ["all"])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_taken_port_is_known_before_models_are_loaded(refusal) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen" in refusal("--port", str(taken.getsockname()[1]))


def test_file_then_command_line(tmp_path: Path) -> None:
    toml = tmp_path / "serve.toml"
    toml.write_text(
        'port = 9000\nmodels = ["a", "b"]\nkv-cache-memory-bytes = "2GiB"\ndrain_seconds = 5\nmax_model_len = 512\n'
    )
    options = gather(toml, {"port": 9001, "models": None, "host": None})
    assert (options.port, options.models, options.drain_seconds) == (9001, ("a", "b"), 5)
    assert options.engine().kv_cache_memory_bytes == 2 << 30 and options.engine().max_model_len == 512
    assert not options.clustered and gather(None, {"backend": "process"}).clustered
    backends = {
        "inline": ServeOptions(backend="local"),
        "processes": ServeOptions(agents=2),
        "ray": ServeOptions(backend="ray"),
    }
    assert all(given.settled().backend == backend for backend, given in backends.items())
    assert ServeOptions().settled().backend == ServeOptions(device="cuda:1").settled().backend == "inline"
    same = tmp_path / "serve.json"
    same.write_text(json.dumps({"port": 9000, "models": ["a", "b"]}))
    assert gather(same, {}).models == ("a", "b")


def test_what_agents_and_their_scheduler_are_told(tmp_path: Path) -> None:
    options = gather(
        None,
        {
            "agents": 2,
            "routing": "least-loaded",
            "batch_wait_us": 500,
            "placement": "partition",
            "prefix_caching": "off",
        },
    )
    assert (
        options.cluster().routing == "least-loaded"
        and options.cluster().prefix_caching == "off"
        and options.agent().batch_wait_us == 500
    )
    assert (
        gather(None, {"agents": 2}).agent() == AgentConfig()
        and gather(None, {"agents": 2}).cluster().routing == "least-bytes"
    )
    for wrong in ({"routing": "bytes"}, {"batch_wait_us": -1}):
        with pytest.raises(InputError):
            given = gather(None, {"agents": 2, **wrong})
            given.cluster(), given.agent()


def test_a_device_that_looks_ahead_reports_once_for_several_tokens() -> None:
    given = {"cpu": ServeOptions(), "ahead": ServeOptions(async_scheduling="on"), "cuda": ServeOptions(device="cuda:1")}
    assert {name: options.cluster().stride for name, options in given.items()} == {"cpu": 1, "ahead": 8, "cuda": 8}
    assert ServeOptions(device="cuda", async_scheduling="off").cluster().stride == 1
    assert gather(None, {"decode_credit": 3}).cluster().stride == 3
    with pytest.raises(InputError, match="decode_credit"):
        gather(None, {"decode_credit": -1})


def test_what_is_as_it_is_by_default_is_not_refused() -> None:
    assert gather(
        None, {"placement": "auto", "batch_wait_us": 2000, "min_equivalence": 0.98, "dense_slots": 16}
    ) == gather(None, {})


def test_what_agents_keep_for_moves() -> None:
    assert gather(None, {"agents": 2, "activation_cache_bytes": "2MiB"}).agent().activation_cache_bytes == 2 << 20
    assert gather(None, {}).agent().activation_cache_bytes == 0
    with pytest.raises(InputError, match="activation-cache-bytes has no effect"):
        gather(None, {"activation_cache_bytes": "1MiB"})


def test_how_adaptive_requests_are_dispatched(tmp_path: Path) -> None:
    assert gather(None, {}).adaptation() == DispatchLimits()
    toml = tmp_path / "serve.toml"
    toml.write_text(
        'agents = 2\nserve_deltas = true\nadaptive = "accuracy"\nadaptive_ms = 50\nmin_equivalence = '
        "0.9\nmin_stitched = 0.8\n"
    )
    assert gather(toml, {}).adaptation() == DispatchLimits("accuracy", 0.9, 0.8, limit=0.05)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("prot = 9000", "unknown option 'prot'"),
        ('port = "9000"', "port must be int"),
        ("port = true", "port must be int"),
        ("port = 70000", "no port"),
        ('models = "a"', "list of names"),
        ("models = [1]", "list of names"),
        ("host = 5", "host must be str"),
        ("port = ", "neither TOML nor JSON"),
        ('api_key = ""', "empty"),
        ('adaptive = "speed"', "latency or accuracy"),
        ("adaptive_ms = 5", "give --adaptive accuracy"),
        ("min_equivalence = 1.5", "from 0 to 1"),
        ("max_queued = 0", "positive"),
        ('placement = "partition"', "--placement has no effect on one device"),
        ('agents = 1\nbackend = "inline"\nrebalance = "owner"', "--rebalance has no effect on one device"),
        ('backend = "local"\nbatch_wait_us = 0', "--batch-wait-us has no effect on the only agent"),
        ('executor = "dense"\nasync_scheduling = "on"', "--async-scheduling has no effect with the dense executor"),
        ("batch_wait_us = 0", "--batch-wait-us has no effect on the only agent"),
        ("agents = 2\ndense_slots = 4", "--dense-slots has no effect without the dense executor"),
        ("agents = 2\nmin_stitched = 0.9", "--min-stitched has no effect without stand-ins"),
        ('tensor_transport = "direct"', "--tensor-transport has no effect on one device"),
        ('agents = 2\ntensor_transport = "nccl"', "tensor-transport must be host, direct or network"),
        ('agents = 2\ntensor_transport = "network"', "give --tensor-transport direct, or --backend ray"),
        ('agents = 2\nspeculation_lane = "shared"', "--speculation-lane has no effect where no hop is predicted"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, word: str) -> None:
    path = tmp_path / "serve.toml"
    path.write_text(text)
    with pytest.raises(InputError, match=word):
        gather(path, {})


@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), (7, 7), ("512MB", 512_000_000), ("4GiB", 4 << 30), ("2k", 2000), (" 1 kib ", 1024)],
)
def test_sizes(text: str | int, size: int) -> None:
    assert size_of(text) == size


@pytest.mark.parametrize("text", ["", "-1", "1.5GB", "GB", "1XB", "9" * 20])
def test_no_sizes(text: str) -> None:
    with pytest.raises(InputError):
        size_of(text)


def test_a_models_own_sampling_defaults_are_vllms_five() -> None:
    assert defaults_from(None) == defaults_from({}) == SamplingDefaults()
    given = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "min_p": 0.1,
        "repetition_penalty": 1.05,
        "max_new_tokens": 5,
        "do_sample": False,
    }
    assert defaults_from(given) == SamplingDefaults(0.6, 0.9, 20, 0.1, 1.05)
    assert (
        defaults_from(
            {"temperature": None, "top_p": "x", "top_k": float("nan"), "min_p": True, "repetition_penalty": -1}
        )
        == SamplingDefaults()
    )
