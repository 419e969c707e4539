"""`zoo bench` as users run it, on servers and engines with tiny models, alone and in pairs.

Covered: the document, the table, the picture and bad input.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cli.app
from cli.bench.batches import Batches
from runtime.bench.answers import TokenTimes
from runtime.bench.drive import WallClock, drive
from runtime.bench.workload import Workload, WorkloadRequest
from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.conftest import tokenizer  # noqa: F401
from tests.runtime.server.harness import running
from zoo.errors import InputError, ZooError


@dataclass(frozen=True)
class Result:
    """Exit code and output of one run of the command."""

    code: int
    out: str
    err: str

    def document(self) -> dict[str, Any]:
        assert self.code == 0, self.err
        return dict(json.loads(self.out))


Run = Callable[..., Result]


@pytest.fixture
def bench(store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `zoo bench` on the store, with a small KV cache."""
    monkeypatch.setattr(cli.app, "VERBS", {"bench": "cli.bench", "ls": "cli.ls"})

    def run(*arguments: str) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main(["bench", "--store", str(store), "--kv-cache-memory-bytes", "4MiB", *arguments])
        printed = capsys.readouterr()
        return Result(int(ended.value.code or 0), printed.out, printed.err)

    return run


def test_a_server_under_open_load(bench: Run, tokenizer: Tokenizer, tmp_path: Path) -> None:  # noqa: F811
    out, plot = tmp_path / "deep" / "bench.json", tmp_path / "bench.png"
    with running(tokenizer, pace=lambda _: time.sleep(0.002)) as server:
        result = bench(
            "--url",
            server.address,
            "--requests",
            "20",
            "--rate",
            "500",
            "--arrivals",
            "gamma",
            "--cv",
            "3",
            "--vocabulary",
            "256",
            "--prompt-tokens",
            "uniform:3-9",
            "--answer-tokens",
            "6",
            "--slo-ttft",
            "60000",
            "--slo-e2e",
            "0.000001",
            "--output",
            str(out),
            "--plot",
            str(plot),
            "--json",
            "--seed",
            "4",
        )
    printed, written = result.document(), json.loads(out.read_text())
    (run,) = printed["runs"]
    assert (run["requests"], run["completed"], run["tokens"], run["errors"], run["goodput"]) == (20, 20, 120, {}, 0.0)
    assert set(run["ttft"]) == {"median", "p95", "p99", "mean", "max"} and run["ttft"]["median"] < run["e2e"]["median"]
    assert printed["targets"][0]["models"] == ["org/base", "org/fine"]
    assert printed["targets"][0]["memory"]["server_peak"] > 0
    assert printed["seed"] == 4 and printed["workload"]["arrivals"] == {"rate": 500.0, "kind": "gamma", "cv": 3.0}
    assert (
        printed["where"]["versions"]["transformers"]
        and printed["where"]["hardware"]["name"]
        and printed["where"]["of"] == "client"
    )
    assert run["client_cpu_seconds"] > 0
    assert "answers" not in run and len(written["runs"][0]["answers"]) == 20
    assert [answer["due"] for answer in written["runs"][0]["answers"]] == sorted(
        answer["due"] for answer in written["runs"][0]["answers"]
    )
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_two_servers_by_turns(bench: Run, tokenizer: Tokenizer) -> None:  # noqa: F811
    with running(tokenizer) as one, running(tokenizer) as other:
        result = bench(
            "--url",
            one.address,
            "--against",
            f"{other.address}/v1",
            "--requests",
            "6",
            "--clients",
            "2",
            "--rounds",
            "3",
            "--vocabulary",
            "256",
            "--answer-tokens",
            "4",
            "--json",
        )
    document = result.document()
    assert [(run["round"], run["target"]) for run in document["runs"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    ]
    ratio = document["ratios"]["tokens_per_second"]
    assert ratio["pairs"] == 3 and ratio["low"] <= ratio["median"] <= ratio["high"]
    pairs = [
        (document["runs"][at]["tokens_per_second"], document["runs"][at + 1]["tokens_per_second"]) for at in (0, 2, 4)
    ]
    assert sorted(a / b for a, b in pairs) == pytest.approx([ratio["low"], ratio["median"], ratio["high"]])


def test_our_engine_beside_transformers_on_the_same_requests(bench: Run) -> None:
    result = bench(
        "--against",
        "transformers",
        "--models",
        "org/base",
        "--models",
        "lora",
        "--requests",
        "6",
        "--popularity",
        "distinct",
        "--prompt-tokens",
        "uniform:3-9",
        "--answer-tokens",
        "uniform:1-5",
        "--rounds",
        "2",
        "--batch",
        "2",
        "--json",
    )
    document = result.document()
    assert [target["name"] for target in document["targets"]] == ["zoo", "transformers"]
    assert document["targets"][0]["models"] == document["targets"][1]["models"] == ["org/base", "org/lora"]
    assert document["targets"][0]["memory"]["weights"] < document["targets"][0]["memory"]["weights_unshared"]
    assert {run["completed"] for run in document["runs"]} == {6}
    assert len({(run["tokens"], run["prompt_tokens"]) for run in document["runs"]}) == 1
    assert {run["client_cpu_seconds"] for run in document["runs"]} == {None}
    assert document["ratios"]["tokens_per_second"]["pairs"] == 2 and document["where"]["of"] == "engine and client"


def test_the_table_names_both_and_the_ratios(bench: Run, tokenizer: Tokenizer) -> None:  # noqa: F811
    with running(tokenizer, fail_at=(9,)) as server:
        result = bench(
            "--url",
            server.address,
            "--against",
            server.address,
            "--requests",
            "4",
            "--vocabulary",
            "256",
            "--rounds",
            "2",
            "--warm",
            "0",
        )
    assert (
        result.code == 0
        and "TTFT ms 50/95/99" in result.out
        and "alternating pairs" in result.out
        and "e2e.p99" in result.out
    )
    assert "; the first: the engine failed: FakeFault" in result.err


def test_rounds_that_ended_before_an_interrupt_are_reported(
    bench: Run,
    tokenizer: Tokenizer,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    import cli.bench.rounds

    calls: list[Any] = []

    async def interrupted(*given: Any) -> Any:
        calls.append(given[1])
        if len(calls) == 6:  # two to warm up, a pair, half a pair
            raise asyncio.CancelledError
        return await drive(*given)

    out = tmp_path / "bench.json"
    with running(tokenizer) as server:
        monkeypatch.setattr(cli.bench.rounds, "drive", interrupted)
        common = [
            "--url",
            server.address,
            "--against",
            server.address,
            "--requests",
            "2",
            "--vocabulary",
            "256",
            "--warm",
            "0",
        ]
        result = bench(*common, "--rounds", "3", "--output", str(out))
    document = json.loads(out.read_text())
    assert result.code == 1 and document["interrupted"] and document["rounds"] == 1
    first, second = calls[:2]
    assert calls[2:] == [first, second, second, first]  # every second pair runs in reverse order
    assert [run["target"] for run in document["runs"]] == [0, 1] and document["ratios"]["tokens_per_second"][
        "pairs"
    ] == 1


def test_a_trace_with_texts(bench: Run, tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "def hello(world):"}, {"from": "gpt", "value": "return world"}]
    trace = tmp_path / "share.json"
    trace.write_text(json.dumps([{"conversations": turns}] * 3))
    common = ["--models", "org/base", "--trace", str(trace), "--json"]
    document = bench(*common, "--tokenizer", "base").document()
    assert document["runs"][0]["requests"] == 3 and document["runs"][0]["prompt_tokens"] > 3
    assert document["trace"] == {"file": "share.json", "format": "sharegpt"} and document["tokenizer"] == "base"
    assert bench(*common).code == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--url", "nowhere"], "neither an address"),
        (["--against", "triton"], "neither an address"),
        (["--url", "http://127.0.0.1:1"], "does not say what it serves"),
        (["--url", "http://127.0.0.1:1", "--models", "m"], "answers nothing (connect)"),
        (["--models", "org/none"], "org/none"),
        (["--rate", "-1"], "rate of arrivals must be positive"),
        (["--requests", "0"], "1 to 1,000,000"),
        (["--prompt-tokens", "many"], "is no length"),
        (["--trace", "/nowhere/trace.json"], "cannot be read"),
        (["--models", "org/base", "--engine", "vllm"], "pip install 'blockzoo[vllm]'"),
    ],
)
def test_bad_input_is_one_line(bench: Run, arguments: list[str], line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    result = bench(*arguments)
    assert result.code == 2 and line in result.err and result.err.count("\n") == 1 and result.out == ""


class Scripted:
    """A runner that records its batches. `wrong`: models that fail."""

    def __init__(self, wrong: Sequence[str] = ()) -> None:
        self.batches: list[tuple[str, list[int]]] = []
        self.closed = False
        self._wrong = wrong

    def run(self, model: str, asks: Sequence[WorkloadRequest]) -> list[tuple[float, ...]]:
        self.batches.append((model, [ask.number for ask in asks]))
        if model in self._wrong:
            raise ZooError("no such\nluck")
        return [tuple(float(1e9 + step) for step in range(ask.answer)) for ask in asks]

    def close(self) -> None:
        self.closed = True


def asks(models: str) -> tuple[WorkloadRequest, ...]:
    return tuple(WorkloadRequest(number, 0.0, model, (1, 2), 1 + number) for number, model in enumerate(models))


def test_batches_are_of_one_model_and_the_longest_wait_first() -> None:
    runner = Scripted(wrong="c")

    async def act() -> list[TokenTimes]:
        client = Batches(runner, 2)
        jobs = [asyncio.ensure_future(client.send_request(ask)) for ask in asks("abacaab")]
        await asyncio.sleep(0)  # all wait before the thread starts
        with client:
            return await asyncio.gather(*jobs)

    heard = asyncio.run(act())
    assert runner.batches == [("a", [0, 2]), ("b", [1, 6]), ("c", [3]), ("a", [4, 5])] and runner.closed
    assert [one.tokens for one in heard] == [1, 2, 3, 0, 5, 6, 7]
    assert (heard[3].error, heard[3].detail) == ("engine", "no such luck")
    with pytest.raises(InputError, match="tokenizer"):
        asyncio.run(Batches(runner, 1).send_request(WorkloadRequest(0, 0.0, "a", "text", 1)))


def test_the_baseline_holds_so_many_models_and_stamps_every_token(store: Path) -> None:
    from cli.bench.baseline import TransformersRunner
    from zoo.api import Zoo

    with Zoo(store) as zoo:
        loads: list[str] = []
        real = zoo.model
        zoo.model = lambda name: loads.append(name) or real(name)  # type: ignore[assignment, func-returns-value, method-assign]
        runner = TransformersRunner(zoo, WallClock(), "cpu", None, resident=1)
        both = [WorkloadRequest(0, 0.0, "org/base", (5, 6, 7), 4), WorkloadRequest(1, 0.0, "org/base", (5,), 2)]
        stamps = runner.run("org/base", both)
        for name in ("org/base", "org/lora", "org/base"):
            runner.run(name, both[1:])
    assert (
        [len(own) for own in stamps] == [4, 2]
        and list(stamps[0]) == sorted(set(stamps[0]))
        and stamps[1] == stamps[0][:2]
    )
    assert loads == ["org/base", "org/lora", "org/base"]


def test_vllm_is_stepped_with_the_very_requests_of_the_workload(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses a stand-in with the parts of vLLM's V1 interface that the baseline calls; vLLM itself is not installed."""
    made: list[dict[str, Any]] = []

    class Engine:
        def __init__(self) -> None:
            self.live: dict[str, list[int]] = {}
            self.requests: list[tuple[Any, Any]] = []

        def add_request(self, name: str, prompt: Any, params: Any, lora_request: Any = None) -> None:
            self.live[name] = [0, params.max_tokens]
            self.requests.append((prompt, lora_request))

        def has_unfinished_requests(self) -> bool:
            return bool(self.live)

        def step(self) -> list[Any]:
            outputs = []
            for name, state in list(self.live.items()):
                state[0] += 1
                outputs.append(
                    types.SimpleNamespace(request_id=name, outputs=[types.SimpleNamespace(token_ids=[7] * state[0])])
                )
                if state[0] == state[1]:
                    del self.live[name]
            return outputs

    engines: list[Engine] = []

    def llm(**options: Any) -> Any:
        made.append(options)
        assert Path(options["model"], "blockzoo.json").exists()
        engines.append(Engine())
        return types.SimpleNamespace(llm_engine=engines[-1])

    fake = types.SimpleNamespace(LLM=llm, SamplingParams=lambda **options: types.SimpleNamespace(**options))
    monkeypatch.setitem(sys.modules, "vllm", fake)  # type: ignore[arg-type]
    loras = types.SimpleNamespace(LoRARequest=lambda *given: given)
    monkeypatch.setitem(sys.modules, "vllm.lora.request", loras)  # type: ignore[arg-type]
    from cli.bench.vllm import VllmRunner
    from zoo.api import Zoo

    async def act(client: Batches) -> list[Any]:
        requests = [
            WorkloadRequest(0, 0.0, "org/base", (5, 6), 3),
            WorkloadRequest(1, 0.0, "org/lora", (5,), 2),
            WorkloadRequest(2, 0.0, "org/base", (8,), 1),
        ]
        return await drive(Workload(tuple(requests), clients=1), client, WallClock())

    with Zoo(store) as zoo, Batches(VllmRunner(zoo, WallClock(), None, ("org/base", "org/lora")), 4) as client:
        answers = asyncio.run(act(client))
        runner = VllmRunner(zoo, WallClock(), "bfloat16", ("org/base",))
        runner.run("org/base", [WorkloadRequest(0, 0.0, "org/base", (5,), 1)])
        runner.close()
    assert [(answer.error, answer.tokens) for answer in answers] == [(None, 3), (None, 2), (None, 1)]
    # The LoRA runs on its base's engine, with the maximum rank it needs; without one, LoRA is off.
    shared, alone = made
    assert shared["enable_lora"] and shared["max_lora_rank"] == 8 and "enable_lora" not in alone
    assert (shared["dtype"], alone["dtype"]) == ("float32", "bfloat16") and not shared["enable_prefix_caching"]
    (first, none), (second, lora), _ = engines[0].requests
    assert (first, none, second) == ({"prompt_token_ids": [5, 6]}, None, {"prompt_token_ids": [5]})
    assert lora[:2] == ("org/lora", 1) and not Path(lora[2]).exists()
