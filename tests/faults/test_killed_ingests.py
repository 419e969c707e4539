"""`kill -9` at random points of 50 ingests: no damaged model, a rerun completes, a collection leaves nothing behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import make
from tests.faults.helpers import Nursery, exported, fine_tune, missing, nursery, same_folders, torn_chains, unowned
from zoo import Zoo

KILLS = 50
#: Largest number of attempts, for machines on which processes end before they are killed.
MOST = 2 * KILLS
SEED = 7
LAYERS = 6


@pytest.fixture(scope="module")
def foundation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of six layers, so that writing tensors takes a large part of the time."""
    return make("llama", tmp_path_factory.mktemp("checkpoints") / "foundation", num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def tuned(foundation: Path) -> Path:
    return fine_tune(foundation, foundation.parent / "tuned", layers=range(2, LAYERS), shift=1)


def natural_duration(running: Nursery, store: Path, folder: Path) -> float:
    """Return the seconds that an undisturbed ingest takes, from its process's start to its end."""
    begin = time.monotonic()
    running.start("ingest", store, folder, "victim")
    assert running.wait() == 0
    return time.monotonic() - begin


def killed_ingest(running: Nursery, store: Path, folder: Path, delay: float) -> bool:
    """Start an ingest and kill it after a delay; return whether the kill came before its end."""
    pid = running.start("ingest", store, folder, "victim")
    time.sleep(delay)
    os.kill(pid, signal.SIGKILL)
    return running.wait() == -signal.SIGKILL


def check_after_kill(store: Path, folder: Path, kept: dict[str, Path], scratch: Path) -> None:
    """Check the store that a killed process left, before and after the ingest is run again."""
    with Zoo(store) as zoo:
        names = {model.name for model in zoo.models()}
        assert names - {"victim"} == set(kept)
        assert not missing(zoo)
        assert not torn_chains(zoo)
        assert not zoo.verify().damaged
        zoo.ingest(folder, name="victim")
        for name, original in {**kept, "victim": folder}.items():
            assert same_folders(exported(zoo, name, scratch / name), original)
        zoo.gc()
        assert not unowned(zoo)
        assert not missing(zoo)
        assert not torn_chains(zoo)


@dataclass(frozen=True)
class Case:
    """What is ingested, and into which store; without `prepared` the ingest creates the store."""

    folder: Path
    prepared: Path | None
    kept: dict[str, Path]

    def fresh(self, store: Path) -> Path:
        if self.prepared is not None:
            shutil.copytree(self.prepared, store)
        return store


def cases(tmp_path: Path, foundation: Path, tuned: Path) -> list[Case]:
    """Return the cases: create a store and fill it; fill an empty one; add to a store where a chain is rewritten."""
    Zoo(tmp_path / "empty").close()
    with Zoo(tmp_path / "filled") as zoo:
        zoo.ingest(foundation, name="foundation")
    return [
        Case(foundation, None, {}),
        *[Case(foundation, tmp_path / "empty", {})] * 2,
        *[Case(tuned, tmp_path / "filled", {"foundation": foundation})] * 2,
    ]


def test_kill_at_any_point_leaves_a_sound_store(tmp_path: Path, foundation: Path, tuned: Path) -> None:
    draw = random.Random(SEED)
    killed = 0
    with nursery() as running:
        cycle = cases(tmp_path, foundation, tuned)
        seconds = [
            natural_duration(running, case.fresh(tmp_path / f"natural-{n}"), case.folder)
            for n, case in enumerate(cycle)
        ]
        for number in range(MOST):
            if number >= KILLS and killed >= KILLS // 2:
                break
            at, store, scratch = number % len(cycle), tmp_path / f"store-{number}", tmp_path / f"exports-{number}"
            case = cycle[at]
            if killed_ingest(running, case.fresh(store), case.folder, draw.uniform(0.0, seconds[at])):
                killed += 1
            else:  # the machine has become faster
                seconds[at] *= 0.7
            check_after_kill(store, case.folder, case.kept, scratch)
            shutil.rmtree(store)
            shutil.rmtree(scratch)
    assert killed >= KILLS // 2, f"only {killed} of {MOST} kills came in time"
