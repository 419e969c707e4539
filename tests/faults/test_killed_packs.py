"""`kill -9` at random points of packing and unpacking: every model reads and exports as before; a rerun completes."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest

from tests.checkpoints import make
from tests.faults.helpers import Nursery, exported, missing, nursery, same_folders, unowned
from tests.surgery.helpers import edit_weights
from zoo import Zoo

KILLS = 8
#: Largest number of attempts, for machines on which processes end before they are killed.
MOST = 4 * KILLS
SEED = 11
#: Largest number of reading rounds until another process has changed something.
ROUNDS = 300


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base and two fine-tunes with small changes in every matrix; large enough for packing to save space."""
    root = tmp_path_factory.mktemp("checkpoints")
    make("llama", root / "base", hidden_size=64, intermediate_size=96, dtype="bfloat16")
    for number in (1, 2):
        shutil.copytree(root / "base", root / f"tuned-{number}")
        edit_weights(root / f"tuned-{number}", lambda key, tensor, number=number: tensor * (1 + number / 128))
    return {folder.name: folder for folder in sorted(root.iterdir())}


@pytest.fixture
def prepared(folders: dict[str, Path], tmp_path: Path) -> Path:
    with Zoo(tmp_path / "prepared") as zoo:
        for name, folder in folders.items():
            zoo.ingest(folder, name, base=None if name == "base" else "base")
    return tmp_path / "prepared"


def run(running: Nursery, store: Path, delay: float | None) -> tuple[int, float]:
    """Pack and unpack in a child, killed after a delay; return its exit code and duration."""
    begin = time.monotonic()
    pid = running.start("pack", store, "pack", "unpack", "pack")
    if delay is not None:
        time.sleep(delay)
        os.kill(pid, signal.SIGKILL)
    return running.wait(), time.monotonic() - begin


def test_kill_at_any_point_of_packing(prepared: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    draw = random.Random(SEED)
    killed = halfway = 0
    with nursery() as running:
        shutil.copytree(prepared, tmp_path / "natural")
        code, natural = run(running, tmp_path / "natural", None)
        assert code == 0
        for number in range(MOST):
            if number >= KILLS and killed >= KILLS // 2 and halfway:
                break
            store, scratch = tmp_path / f"store-{number}", tmp_path / f"exports-{number}"
            shutil.copytree(prepared, store)
            code, took = run(running, store, draw.uniform(0.0, natural))
            killed += code == -signal.SIGKILL
            if code == 0:  # the machine has become faster
                natural = min(natural, took)
            with Zoo(store) as zoo:
                left = len(list(zoo.store.objects.packed.shelf.digests()))
                assert not missing(zoo)
                assert not zoo.verify().damaged
                for name, folder in folders.items():
                    assert same_folders(exported(zoo, name, scratch / name), folder)
                zoo.pack()
                zoo.gc()
                done = set(zoo.store.objects.packed.shelf.digests())
                halfway += 0 < left < len(done)
                assert len(done) > 10
                assert not done & set(zoo.store.objects.shelf.digests())
                assert not unowned(zoo)
                assert not zoo.verify().damaged
            shutil.rmtree(store)
            shutil.rmtree(scratch)
    assert killed >= KILLS // 2, f"only {killed} of {MOST} kills came in time"
    assert halfway, "no kill came in the middle of packing: this test showed nothing"


def test_readers_while_it_is_packed_and_unpacked(prepared: Path, folders: dict[str, Path], tmp_path: Path) -> None:
    """This process loads, exports and collects while another one repeatedly packs and unpacks every object."""
    from surgery.tensors.pool import stored_tensor

    with nursery() as running, Zoo(prepared) as zoo:
        expected = {one.digest: None for name in folders for one in zoo.model(name).manifest.tensors}
        with Zoo(shutil.copytree(prepared, tmp_path / "still", ignore=shutil.ignore_patterns("tmp"))) as still:
            still.unpack()
            sums = {digest: stored_tensor(still.store, digest).double().sum().item() for digest in expected}
        forms: set[int] = set()
        number = 0
        running.start("pack", prepared, *(["pack", "unpack"] * 12))
        while number < 6 or (len(forms) < 2 and number < ROUNDS):  # the other process may start slowly
            number += 1
            forms |= {len(list(zoo.store.objects.packed.shelf.digests()))}
            assert {digest: stored_tensor(zoo.store, digest).double().sum().item() for digest in expected} == sums
            for name, folder in folders.items():
                assert same_folders(exported(zoo, name, tmp_path / f"{name}-{number}"), folder)
                forms |= {len(list(zoo.store.objects.packed.shelf.digests()))}
            zoo.gc()
        assert running.wait() == 0
        assert len(forms) > 1, "nothing was packed meanwhile: this test showed nothing"
        assert not zoo.verify().damaged
