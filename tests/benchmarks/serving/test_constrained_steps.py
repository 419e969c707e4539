"""What rows by a schema cost the step beside them: the benchmark sees what is on the step's way, and only that."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.constrained import steps
from benchmarks.serving.constrained.steps import interval, main, measure, take_turn
from cli.serving.models import Chosen
from cli.serving.one_device import start_one_device
from runtime.cluster.driver.driver import ClusterDriver
from runtime.config import EngineConfig
from runtime.grammars.state import GrammarState
from tests import checkpoints
from zoo.api import Zoo


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("steps")
    with Zoo(root / "store") as zoo:
        zoo.ingest(checkpoints.make("llama", root / "llama"), "base")
    return root / "store"


@pytest.fixture(scope="module")
def driver(folder: Path) -> Iterator[ClusterDriver]:
    config = EngineConfig(kv_cache_memory_bytes=8 << 20)
    with (
        Zoo(folder, create=False) as zoo,
        start_one_device(zoo, config, Chosen(("base",), ()), prefix_caching="off") as driver,
    ):
        yield driver


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let each mask but the first of an answer take so long."""
    allowed = GrammarState.allowed

    def slow(state: GrammarState, kept: int, new: Any = (), slow: bool = False) -> Any:
        time.sleep(seconds if kept or new else 0.0)
        return allowed(state, kept, new)

    monkeypatch.setattr(GrammarState, "allowed", slow)


def test_slow_masks_are_seen_in_steps_with_rows_by_a_schema_and_in_no_others(
    driver: ClusterDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slowed(monkeypatch, 0.02)
    found = measure(driver, "base", 4, 10, 3, 0.0)
    steps_ms = found["step_ms"]
    assert steps_ms["mixed"] > 35 and steps_ms["bound"] > 70, "two and four masks of 20 ms each"
    assert max(steps_ms["free"], steps_ms["control"]) < 30
    assert found["ratio"]["mixed"]["low"] > 1.2 > 1 / 1.2 and set(found["ratio"]) == {"control", "mixed", "bound"}
    ratio = found["ratio"]["bound"]
    assert ratio["low"] <= ratio["median"] <= ratio["high"]
    masks = found["processor_ms_per_step"]["zoo-masks_0"]
    assert max(masks["free"], masks["control"]) < masks["mixed"] < 20, "sleep takes no processor"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_step_is_timed_between_the_tokens_of_all_rows(
    driver: ClusterDriver, monkeypatch: pytest.MonkeyPatch, temperature: float
) -> None:
    """The compiling of a grammar, before the first tokens, is not of a step."""
    take_turn(driver, "base", 1, 1, 6, temperature)
    begun = time.perf_counter()
    slowed(monkeypatch, 0.05)
    found = take_turn(driver, "base", 2, 1, 12, temperature)
    whole = 1000 * (time.perf_counter() - begun)
    assert 50 < found.step < whole / 11
    assert sum(found.processor.values()) > 0


def test_rows_that_do_not_begin_together_are_no_measurement(
    driver: ClusterDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A first mask takes longer than the step: the free rows go on without the other ones."""
    allowed, firsts = GrammarState.allowed, list[bool]()

    def late(state: GrammarState, kept: int, new: Any = (), slow: bool = False) -> Any:
        if not (kept or new):
            firsts.append(len(firsts) < 2)
            time.sleep(0.2 if firsts[-1] else 0.0)
        return allowed(state, kept, new)

    monkeypatch.setattr(GrammarState, "allowed", late)
    assert take_turn(driver, "base", 1, 1, 12, 0.0).step > 0
    assert firsts == [True, True, False], "two turns were taken again"
    firsts.clear()
    monkeypatch.setattr(steps, "_TRIES", 2)
    with pytest.raises(RuntimeError, match="did not begin together in 2 turns"):
        take_turn(driver, "base", 1, 1, 12, 0.0)


def test_an_answer_that_ends_early_is_no_measurement(driver: ClusterDriver) -> None:
    with pytest.raises(RuntimeError, match="of 2 answers have 100000 tokens"):
        take_turn(driver, "base", 2, 0, 100_000, 0.0)


def test_intervals_hold_the_median_and_shrink_with_the_spread() -> None:
    wide = interval([0.8, 0.9, 1.0, 1.1, 1.2, 1.0, 1.0])
    assert wide["median"] == 1.0 and 0.8 <= wide["low"] < 1.0 < wide["high"] <= 1.2
    assert interval([1.5] * 9) == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert interval([0.8, 0.9, 1.0, 1.1, 1.2, 1.0, 1.0]) == wide, "the same each time"


def test_the_command_writes_a_report_of_each_temperature(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.json"
    given = ["steps", str(folder), "base", "--batch", "4", "--tokens", "60", "--rounds", "2", "--output", str(out)]
    monkeypatch.setattr("sys.argv", given)
    monkeypatch.setattr(steps, "_RESAMPLED", 80)
    main()
    found = json.loads(out.read_text())
    assert found["batch"] == 4 and found["rounds"] == 2
    for heat in ("temperature 0.0", "temperature 1.0"):
        assert set(found[heat]) == {"step_ms", "ratio", "ratio_of_processor_times", "processor_ms_per_step"}
        assert set(found[heat]["step_ms"]) == {"free", "control", "mixed", "bound"}
