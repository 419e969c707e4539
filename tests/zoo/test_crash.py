"""Several processes on one store, some of them killed: no object that a model names is lost or damaged."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.zoo.factory import ingest
from zoo.objects.objects import BUFFER_BYTES
from zoo.store import Store
from zoo.upkeep.audit import audit
from zoo.upkeep.collect import collect

REPOSITORY = Path(__file__).parents[2]


@contextmanager
def child(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start a process of `tests.zoo.children`, wait until it is ready, and kill it when the block ends."""
    command = [sys.executable, "-m", "tests.zoo.children", *map(str, arguments)]
    with subprocess.Popen(
        command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", process.stderr.read() if process.stderr else ""
            yield process
        finally:
            process.kill()


def finish(process: subprocess.Popen[str]) -> list[str]:
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return output.split()


def check_sound(store: Store) -> None:
    """Check that nothing is damaged and that, after a collection, the store holds exactly what the models name."""
    assert audit(store).damaged == ()
    collect(store)
    with store.catalog.reading() as reader:
        assert set(store.objects.digests()) == reader.live_tensors()
        assert set(store.blobs.digests()) == reader.live_blobs()
    assert not [*store.objects.shelf.temporaries(), *store.blobs.shelf.temporaries()]


def test_kill_at_any_moment(tmp_path: Path) -> None:
    """Two processes ingest and are killed repeatedly. Each model is there completely or not at all."""
    chance = random.Random(7)
    left_over = 0
    for turn in range(6):
        with child("ingest", tmp_path, 2 * turn) as first, child("ingest", tmp_path, 2 * turn + 1) as second:
            time.sleep(chance.uniform(0, 0.25))
            for process in (first, second):
                process.send_signal(signal.SIGKILL)
            committed = [len((process.communicate()[0] or "").split()) for process in (first, second)]
        with Store.open(tmp_path) as store:
            with store.catalog.reading() as reader:
                names = reader.names()
                unnamed = set(store.objects.digests()) - reader.live_tensors()
                for worker, count in zip((2 * turn, 2 * turn + 1), committed, strict=True):
                    assert {f"model-{worker}-{number}" for number in range(count)} <= set(names)
                for name in names:
                    assert all(store.objects.has(tensor.digest) for tensor in reader.model(name).tensors)
            left_over += len(unnamed) + len(list(store.objects.shelf.temporaries()))
            if turn % 3 == 2:
                check_sound(store)
    assert left_over, "no kill came in the middle of an ingest: this test showed nothing"
    with Store.open(tmp_path) as store:
        ingest(store, "again", range(30), size=20_000)
        check_sound(store)


def test_the_same_objects_from_several_processes(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store, store.keeping():
        with child("put", tmp_path, 3 * BUFFER_BYTES) as a, child("put", tmp_path, 3 * BUFFER_BYTES) as b:
            digests = [finish(process) for process in (a, b)]
        assert digests[0] == digests[1]
        assert sorted(digests[0]) == list(store.objects.digests())
        assert all(store.objects.check(digest) for digest in digests[0])
        assert not list(store.objects.shelf.temporaries())


def test_collections_race_ingests(tmp_path: Path) -> None:
    """Two processes ingest and remove the same few tensors while a third collects all the time."""
    Store.open(tmp_path).close()
    with (
        child("churn", tmp_path, 0, 2.5) as a,
        child("churn", tmp_path, 1, 2.5) as b,
        child("collect", tmp_path, 2.5) as c,
    ):
        for process in (a, b):
            finish(process)
        removed = int(finish(c)[0])
    assert removed > 10, "the collection hardly ever ran: this test showed nothing"
    with Store.open(tmp_path) as store:
        with store.catalog.reading() as reader:
            assert len(reader.names()) == 2
        check_sound(store)
