"""`zoo serve --agents` on a store: profiles decide where new sequences run, the scheduler's log can be replayed."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.serving.cluster import start_cluster
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.cluster.driver.driver import ClusterDriver
from runtime.cluster.driver.log_file import LogFile
from runtime.config import EngineConfig
from runtime.engine.catalog.block_profiles import measured_pieces
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.models.registry import half_page
from runtime.engine.profiling.document import KIND, device_key, hardware_of
from runtime.scheduler.observe.replay_log import Diverged, replay
from runtime.tracing.sink import Trace
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.cluster import clusters
from zoo.api import Zoo
from zoo.errors import InputError
from zoo.records import Document

MODEL = "org/base"
OPTIONS = ServeOptions(
    agents=2, backend="threads", kv_cache_memory_bytes="1MiB", placement="replicate", kernels="stock", max_model_len=256
)


@pytest.fixture
def zoo(store: Path, tmp_path: Path) -> Iterator[Zoo]:
    """A store of the test's own, so that measurements stay in it."""
    shutil.copytree(store, tmp_path / "store")
    with Zoo(tmp_path / "store") as made:
        yield made


def measured(zoo: Zoo, load_seconds: float, seconds: float = 0.001, threads: int | None = None) -> None:
    """Store a profile as `zoo profile` does: every block takes `seconds` a step and `load_seconds` to load."""
    hardware = hardware_of("cpu") | ({} if threads is None else {"threads": threads})
    with zoo.store.catalog.writing() as writer, zoo.store.catalog.reading() as reader:
        blocks = [
            {
                "block": each.digest,
                "bytes": 1000,
                "decode": {"batches": [1, 64], "contexts": [16, 256], "seconds": [[seconds] * 2, [2 * seconds] * 2]},
                "prefill": {"1": seconds, "64": seconds},
                "load_seconds": load_seconds,
            }
            for each in reader.chain(MODEL)
        ]
        key = device_key("cpu", hardware)
        writer.put_document(Document(KIND, MODEL, key, {"device": "cpu", "key": key, "blocks": blocks, "links": []}))


@contextmanager
def started(zoo: Zoo, log: Path | None = None) -> Iterator[tuple[ClusterDriver, Trace]]:
    """Run the cluster that `zoo serve --agents` would run; `log`: file for the scheduler's log."""
    trace, threads = Trace(), torch.get_num_threads()
    journal = LogFile(log) if log is not None else None
    try:
        with start_cluster(
            zoo, OPTIONS, Chosen((MODEL,), ()), None, trace, None if journal is None else journal.write
        ) as driver:
            yield driver, trace
    finally:
        torch.set_num_threads(threads)
        if journal is not None:
            journal.close()


def ask(driver: ClusterDriver, seqs: Sequence[str], max_tokens: int = 200) -> None:
    """Start requests one after the other, each while the earlier ones run."""
    firsts = {seq: threading.Event() for seq in seqs}

    def run(seq: str) -> None:
        one = SequenceRequest(seq, seq, MODEL, (5, 6, 7), SamplingParams(max_tokens, ignore_eos=True))
        for _ in driver.run([one]):
            firsts[seq].set()

    threads = [threading.Thread(target=run, args=(seq,), daemon=True) for seq in seqs]
    for thread, seq in zip(threads, seqs, strict=True):
        thread.start()
        assert firsts[seq].wait(30)
    for thread in threads:
        thread.join(30)


def test_a_newcomer_stays_where_blocks_are_loaded_if_loading_takes_longer_than_steps(zoo: Zoo, tmp_path: Path) -> None:
    """By load alone the second sequence goes to the idle device, which then has to load all blocks.

    The first load takes far less than profiled, which is learned; it still takes longer than the profiled steps.
    """
    with started(zoo) as (driver, trace):
        ask(driver, ["a", "b"])
        assert not [event for event in trace.recent() if event.ev == "dispatch.candidates"]
        assert len(loaded(driver)) == 2, "by loads the idle device has to load it too"
    measured(zoo, load_seconds=1000.0, seconds=1e-7)
    with started(zoo, tmp_path / "log") as (driver, trace):
        ask(driver, ["a", "b"])
        assert len(loaded(driver)) == 1
        told = [event for event in trace.recent() if event.ev == "dispatch.candidates"]
        assert told and all(event.cause == "BL-21" and len(event.extra["candidates"]) == 2 for event in told)
    assert replay(tmp_path / "log") > 20
    with pytest.raises(Diverged):
        replay(without_profiles(tmp_path / "log"))


def without_profiles(log: Path) -> Path:
    """Return the same log with a scheduler that has no profiles."""
    head, events = log.read_bytes().split(b"\n", 1)
    known = json.loads(head)
    known["adaptation"]["profiles"] = None
    other = log.with_name("other")
    other.write_bytes(json.dumps(known).encode() + b"\n" + events)
    return other


def loaded(driver: ClusterDriver) -> list[str]:
    picture: Any = driver.snapshot()
    return [each["device"] for each in picture["devices"] if each["stages"] or each["loading"]]


def test_pieces_share_what_was_measured_of_their_block(zoo: Zoo) -> None:
    found = describe_chain(zoo.store, MODEL, EngineConfig(), half_page(zoo.store, EngineConfig(), [MODEL]), 1)
    assert not measured_pieces(zoo.store, {MODEL: found.chain}, "cpu", 1), "nothing was measured"
    measured(zoo, 3.0, seconds=0.5)
    with zoo.store.catalog.reading() as reader:
        blocks = len(reader.chain(MODEL))
    pieces = measured_pieces(zoo.store, {MODEL: found.chain}, "cpu", 77)
    assert len(pieces) == len(found.blocks) > blocks
    assert [piece.block for piece in pieces] == [use.block for use in found.chain.uses]
    assert sum(piece.decode.at(1, 16) for piece in pieces) == pytest.approx(0.5 * blocks)
    assert sum(piece.load_seconds for piece in pieces) == pytest.approx(3.0 * blocks)
    measured(zoo, 4.0, seconds=0.5, threads=77)
    agents_own = measured_pieces(zoo.store, {MODEL: found.chain}, "cpu", 77)
    assert sum(piece.load_seconds for piece in agents_own) == pytest.approx(4.0 * blocks)


def test_a_log_has_what_was_moved_and_nobody_else_reads_it(tmp_path: Path) -> None:
    """A sequence of a threaded cluster is moved by hand while it runs; the command then replays the log."""
    log = tmp_path / "log"
    log.touch()
    log.chmod(0o644)
    journal = LogFile(log)
    with clusters.cluster("threads", log=journal.write) as driver:
        assert driver.move("nobody", range(1), "b") == "no sequence nobody"
        # The first sequences may end before the other device has loaded its blocks.
        assert any(moved(driver, clusters.request(f"s{number}", range(40), max_tokens=400)) for number in range(8))
        assert driver.state().running == 0
    journal.close()
    assert log.stat().st_mode & 0o77 == 0
    kinds = [json.loads(line)[1] for line in log.read_text().splitlines()[1:]]
    assert kinds.count("MoveSequence") >= 2 and {
        "AgentHello",
        "AddRequest",
        "RowsDone",
        "MigrationReady",
        "Tick",
    } <= set(kinds)
    command = [sys.executable, "-c", "from cli.app import main; main()", "simulate", "--replay", str(log), "--json"]
    assert json.loads(subprocess.run(command, capture_output=True, check=True, text=True).stdout)["same"] is True


def moved(driver: ClusterDriver, one: SequenceRequest) -> bool:
    """Return whether a move could be started while the sequence ran.

    Which device has the sequence's first block depends on the order in which agents joined.
    """
    begun = False
    for event in driver.run([one]):
        if not begun and event.index > 2 and event.finish is None:
            begun = any(driver.move(one.seq, range(1), name) is None for name in clusters.DEVICES)
    return begun


def test_a_log_that_cannot_be_written_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be written"):
        LogFile(tmp_path / "nowhere" / "log")
