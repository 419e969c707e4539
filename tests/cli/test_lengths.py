"""`zoo lengths` trains a predictor on a model's own answers, and `zoo serve --lengths` uses it (TI-10, TI-11)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import cli.app
from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import gather
from runtime.types import SamplingParams, SequenceRequest, TraceEvent
from tests.checkpoints import make
from zoo.api import Zoo
from zoo.errors import InputError

QUICK = ("--number", "150", "--max-tokens", "24", "--temperature", "1", "--epochs", "1")


def run(store: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.app.main(["lengths", *arguments, "--store", str(store)])
    return int(ended.value.code or 0)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lengths")
    with Zoo(root / "store") as zoo:
        zoo.ingest(make("llama", root / "m"), "org/m")
        zoo.ingest(make("llama", root / "other", seed=4), "org/other")
        zoo.ingest(make("qwen2", root / "bare", tokenizer=False), "org/bare")
    return root / "store"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(" ".join(f"word{at % 97} and {at}" for at in range(4000)))
    return path


@pytest.fixture(scope="module")
def made(store: Path, text: Path) -> dict[str, Any]:
    path = store.parent / "made.json"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as file:
        patch.setattr("sys.stdout", file)
        assert run(store, "org/m", "--text", str(text), *QUICK, "--granularity", "4,8,12", "--json") == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_what_it_prints_is_what_scripts_rely_on(made: dict[str, Any]) -> None:
    assert made["predictor"] == "org/m@lengths" and made["target"] == "org/m" and 60 < made["examples"] <= 150
    assert list(made["granularity"]) == ["4", "8", "12"] and made["edges"] == [0, 4, 8, 12, 16, 20, 24]
    for width, each in made["granularity"].items():
        assert set(each) == {"accuracy", "majority", "confusion"}
        assert len(each["confusion"]) == -(-7 // (int(width) // 4))
        assert sum(map(sum, each["confusion"])) == made["scored"]
    assert made["sampling"] == {"max_tokens": 24, "temperature": 1.0} and len(made["corpus"]) == 64


def test_a_second_one_replaces_the_first_only_if_asked(
    store: Path, text: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, "org/m", "--text", str(text), *QUICK) == 2
    assert "--replace trains it anew" in capsys.readouterr().err
    assert run(store, "org/m", "--text", str(text), *QUICK, "--replace", "--seed", "1") == 0
    shown = capsys.readouterr()
    assert "most frequent bucket" in shown.out and "org/m@lengths" in shown.err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["org/bare"], "no chat"),
        (["org/bare", "--text", "t", "--prompts", "p"], "not both"),
        (["org/bare", "--prompts", "missing.jsonl"], "cannot be read"),
        (["org/nobody"], "org/nobody"),
        (["org/m@lengths", "--text", "TEXT", "--replace"], "no embedding"),
    ],
)
def test_what_cannot_be_is_refused(
    store: Path, text: Path, made: dict[str, Any], arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, *[str(text) if each == "TEXT" else each for each in arguments], *QUICK) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(("granularity", "why"), [("4,x", "whole numbers"), ("4,6", "multiples"), ("24", "below")])
def test_wrong_granularities_are_refused_before_anything_is_answered(
    store: Path,
    text: Path,
    granularity: str,
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def run_requests(*_: object) -> None:
        raise AssertionError("something was answered")

    monkeypatch.setattr("runtime.cluster.driver.base.BaseDriver.run", run_requests)
    assert run(store, "org/other", "--text", str(text), *QUICK, "--granularity", granularity) == 2
    assert why in capsys.readouterr().err


def test_a_probe_is_made_beside_the_predictor(
    store: Path, text: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    quick = (*QUICK[:-2], "--text", str(text), "--kind", "probe", "--granularity", "4,8")
    assert run(store, "org/m", *quick, "--layer", "2", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["predictor"] == "org/m@probe" and told["kind"] == "probe" and told["at"] == 5
    assert told["edges"] == made["edges"] and told["corpus"] == made["corpus"], "the same answers"
    assert set(told["granularity"]["4"]) == set(made["granularity"]["4"])
    assert run(store, "org/m", *quick) == 2 and "org/m@probe is there" in capsys.readouterr().err
    assert run(store, "org/m", *quick, "--replace") == 0
    assert "--lengths probe` predicts" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--kind", "probe", "--epochs", "3"], "--epochs has no effect on a probe"),
        (["--layer", "2"], "--layer has no effect without --kind probe"),
        (["--kind", "probe", "--layer", "3"], "--layer is from 1 to 2"),
    ],
)
def test_options_of_the_other_kind_are_refused(
    store: Path, arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(store, "org/other", *arguments) == 2
    assert why in " ".join(capsys.readouterr().err.split())


def test_prompts_come_from_lines(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = tmp_path / "prompts.jsonl"
    lines.write_text("".join(json.dumps({"prompt": f"tell me {at} things"}) + "\n\n" for at in range(120)))
    assert run(store, "org/other", "--prompts", str(lines), *QUICK, "--json") == 0
    assert json.loads(capsys.readouterr().out)["examples"] == 120
    lines.write_text('{"prompt": "a"}\n{"text": 3}\n')
    assert run(store, "org/other", "--prompts", str(lines), *QUICK, "--replace") == 2
    assert "prompts.jsonl:2" in capsys.readouterr().err


class Traced:
    def __init__(self) -> None:
        self.events: list[TraceEvent] = []

    def emit(self, event: TraceEvent) -> None:
        self.events.append(event)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_what_serves_predicts(store: Path, made: dict[str, Any], mode: str) -> None:
    options = gather(None, {"lengths": mode, "decode_admission": "peak"})
    trace = Traced()
    sampling = SamplingParams(max_tokens=12)
    asked = [
        SequenceRequest("a", "a", "org/m", (5, 6, 7), sampling),
        SequenceRequest("b", "b", "org/m", (5, 6, 7), SamplingParams(max_tokens=3, ignore_eos=True)),
    ]
    with Zoo(store) as zoo:
        chosen = choose(zoo, ["org/m"], None, options.executor, "cpu")
        with start_driver(zoo, options, chosen, trace=trace) as driver:
            events = list(driver.run(asked))
            for _ in range(2000):
                if driver.lengths is not None and driver.lengths.predicted:
                    break
                list(driver.run([SequenceRequest(f"w{_}", "w", "org/m", (1,), sampling)]))
    told = [each for each in trace.events if each.ev == "length.predicted"]
    assert {each.seq for each in told} >= ({"a"} if mode == "sequential" else set()) and told
    assert all(each.seq != "b" for each in told), "its length is given"
    assert [each for each in events if each.finish is not None]
    arrived = next(at for at, each in enumerate(trace.events) if each.ev == "arrive" and each.seq == "a")
    if mode == "sequential":
        inserted = next(at for at, each in enumerate(trace.events) if each.ev == "batch.insert" and each.seq == "a")
        assert arrived < trace.events.index(told[0]) < inserted


def test_serving_without_a_predictor_is_refused(store: Path, tmp_path: Path) -> None:
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(make("llama", tmp_path / "m"), "org/m")
        options = gather(None, {"lengths": "parallel", "decode_admission": "peak"})
        chosen = choose(zoo, ["org/m"], None, options.executor, "cpu")
        with pytest.raises(InputError, match="zoo lengths org/m"):
            start_driver(zoo, options, chosen)
        with pytest.raises(InputError, match="--decode-admission or --decode-choice"):
            start_driver(zoo, gather(None, {"lengths": "parallel"}), chosen)


def test_a_predictor_is_not_served(store: Path, made: dict[str, Any]) -> None:
    with Zoo(store) as zoo:
        assert "org/m@lengths" not in choose(zoo, [], None, "auto", "cpu").names
        with pytest.raises(InputError, match="serve its target"):
            choose(zoo, ["org/m@lengths"], None, "auto", "cpu")


def test_a_predictor_is_shown_without_blocks(
    store: Path, made: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.app.main(["show", "org/m@lengths", "--json", "--store", str(store)])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["chain"] == []
