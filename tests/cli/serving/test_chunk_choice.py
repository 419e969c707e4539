"""Size of prompt chunks: measured by `zoo profile --chunks`, kept with the profile, and used by what serves (TI-09)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cli.app
from cli.serving import chunk_choice
from cli.serving.chunk_choice import measure_chunks, measured_chunk, with_measured_chunk
from cli.serving.driver import start_driver
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions, gather
from runtime.config import EngineConfig
from runtime.engine.profiling.document import KIND, device_key, hardware_of
from runtime.types import SamplingParams, SequenceRequest
from tests import checkpoints
from tests.runtime.virtual import ListTrace
from zoo.api import Zoo
from zoo.errors import InputError
from zoo.records import Document

SMALL = EngineConfig(kv_cache_memory_bytes=8 << 20)
SIZES = ("--batches", "1", "--contexts", "8", "--kv-cache-memory-bytes", "8MiB")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Zoo(tmp_path / "store") as zoo:
        for seed, name in enumerate(("one", "two")):
            checkpoints.make("llama", tmp_path / name, seed=seed)
            zoo.ingest(tmp_path / name, name)
    return tmp_path / "store"


def tell(zoo: Zoo, name: str, chunks: object, key: str | None = None) -> None:
    """Store what a measurement would store."""
    here = device_key("cpu", hardware_of("cpu"))
    with zoo.store.catalog.writing() as writer:
        writer.put_document(Document(KIND, name, key or here, {"chunks": chunks} if chunks else {}))


def profile(store: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.app.main(["profile", *arguments, *SIZES, "--store", str(store)])
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def pretend(monkeypatch: pytest.MonkeyPatch, seconds: dict[int, float]) -> None:
    """Replace the clock of single prompts; everything else is measured."""
    monkeypatch.setattr(chunk_choice, "_seconds", lambda driver, name, tokens: seconds[tokens])


def test_what_was_measured_here_is_the_size(store: Path) -> None:
    with Zoo(store) as zoo:
        assert measured_chunk(zoo, ["one", "two"], "cpu") == 0
        tell(zoo, "one", {"chosen": 64}, key="cpu: another one, 2 threads")
        assert measured_chunk(zoo, ["one"], "cpu") == 0, "another machine's figures say nothing here"
        tell(zoo, "one", {"chosen": 64})
        tell(zoo, "two", {"chosen": 256})
        assert measured_chunk(zoo, ["one"], "cpu") == 64
        assert measured_chunk(zoo, ["one", "two"], "cpu") == 256
        for nothing in (None, {"chosen": None}, {"chosen": "damaged"}, {}, ["damaged"]):
            tell(zoo, "two", nothing)
            assert measured_chunk(zoo, ["one", "two"], "cpu") == 64


def test_serving_takes_the_measured_size_unless_another_is_given(store: Path) -> None:
    chosen = Chosen(("one",), ())
    plain = ServeOptions(backend="inline")
    with Zoo(store) as zoo:
        assert with_measured_chunk(zoo, plain, chosen).cluster() == plain.cluster()
        assert with_measured_chunk(zoo, plain, chosen).agent() == plain.agent()
        tell(zoo, "one", {"chosen": 1024})

        def limits(executor: str = "paged", **options: object) -> tuple[int, int]:
            made = with_measured_chunk(zoo, ServeOptions(**options), Chosen(("one",), (), executor))  # type: ignore[arg-type]
            return made.cluster().prefill_chunk, made.agent().max_num_batched_tokens

        assert limits(backend="inline") == (1024, 1024)
        assert limits(agents=2, backend="processes") == (1024, 1024)
        assert limits(backend="inline", max_num_batched_tokens=512) == (512, 512)
        assert limits(backend="inline", long_prefill_token_threshold=128) == (128, 512)
        assert limits("dense", backend="inline") == (2048, 512)
        tell(zoo, "one", {"chosen": 64})
        assert limits(agents=2, backend="processes") == (64, 512)


def test_prompts_of_a_served_model_run_in_chunks_of_that_size(store: Path) -> None:
    """The path of `zoo serve`: the steps that its agent ran, by their tokens."""
    prompt = tuple(range(3, 43))
    options = ServeOptions(kv_cache_memory_bytes="8MiB", kernels="stock", trace="segments")
    with Zoo(store) as zoo:
        for chunk, steps in ((None, [40]), ({"chosen": 16}, [16, 16, 8])):
            tell(zoo, "one", chunk)
            trace = ListTrace()
            with start_driver(zoo, options, Chosen(("one",), ()), trace=trace) as driver:
                *_, last = driver.run(
                    [SequenceRequest("s", "s", "one", prompt, SamplingParams(max_tokens=1, ignore_eos=True))]
                )
            assert last.finish == "length"
            ran: dict[int, int] = {}
            for event in trace.named("segment.run"):
                ran[event.extra["step"]] = max(ran.get(event.extra["step"], 0), event.n or 0)
            assert list(ran.values()) == steps


def test_profiling_chooses_prints_and_keeps_the_knee(store: Path, capsys, monkeypatch) -> None:
    pretend(monkeypatch, {8: 1.0, 16: 1.4, 32: 2.0, 64: 4.1})
    code, out, _ = profile(store, capsys, "one", "--chunks", "64,8,16,32,32", "--json")
    said = json.loads(out)["chunks"]
    assert code == 0 and said["chosen"] == 32 and said["rates"]["16"] == pytest.approx(16 / 1.4)
    code, out, _ = profile(store, capsys, "one", "--stored")
    assert "chunks of 32 tokens" in out and "of the best" in out
    # What is measured again without chunks keeps them; with two sizes there is no knee to choose.
    for arguments in ((), ("--chunks", "8,16")):
        assert json.loads(profile(store, capsys, "one", *arguments, "--json")[1])["chunks"]["chosen"] == 32
    with Zoo(store) as zoo:
        assert with_measured_chunk(zoo, ServeOptions(), Chosen(("one",), ())).long_prefill_token_threshold == 32
    assert "chunks" not in json.loads(profile(store, capsys, "two", "--json")[1])


def test_a_rate_that_still_grows_chooses_nothing(store: Path, capsys, monkeypatch) -> None:
    pretend(monkeypatch, {8: 1.0, 16: 1.0, 32: 1.0})
    assert "give larger ones" in profile(store, capsys, "one", "--chunks", "8,16,32")[1]
    with Zoo(store) as zoo:
        assert measured_chunk(zoo, ["one"], "cpu") == 0


def test_the_engine_is_measured(store: Path) -> None:
    with Zoo(store) as zoo:
        found = measure_chunks(zoo, "one", SMALL, (4, 32, 64))
    assert set(found["rates"]) == {"4", "32", "64"} and min(found["seconds"].values()) > 0
    assert found["rates"]["64"] == pytest.approx(64 / found["seconds"]["64"])


@pytest.mark.parametrize(
    ("chunks", "words"),
    [
        ("8,16,100000", "2 of the chunk sizes 8, 16, 100000 fit a prompt of one"),
        ("8,x,32", "whole numbers"),
        ("0,16,32", "from 1 on"),
    ],
)
def test_a_bad_grid_is_refused_in_one_line(store: Path, capsys, chunks: str, words: str) -> None:
    code, out, err = profile(store, capsys, "one", "--chunks", chunks)
    assert (code, out) == (2, "") and words in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"long_prefill_token_threshold": -1}, "number of tokens up to"),
        ({"long_prefill_token_threshold": 64, "max_num_batched_tokens": 32}, "more than a step's 32 tokens"),
        ({"long_prefill_token_threshold": 64, "executor": "dense"}, "no effect with the dense executor"),
    ],
)
def test_chunks_that_no_step_can_have_are_refused(given: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        gather(None, given)
