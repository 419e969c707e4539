"""`kill -9` before every single disk step of packing and unpacking.

Nothing is lost, a rerun completes, and a collection removes leftovers.
"""

from __future__ import annotations

import os
import shutil
import signal
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.zoo.packed.family import contents, matrix, packed, plain, put, put_family
from zoo.errors import StoreBusy
from zoo.packed.pack import PackReport, pack, unpack
from zoo.store import Store
from zoo.upkeep.audit import audit
from zoo.upkeep.collect import collect

#: Calls that change a disk, or make a change durable.
STEPS = ("write", "fsync", "replace", "unlink", "fchmod")


def child(root: Path, job: Callable[[Store], None]) -> int:
    """Start a job in another process and return its PID."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with Store.open(root) as store:
                job(store)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def killed(root: Path, change: Callable[[Store], PackReport], step: int) -> bool:
    """Run `change` in a child that kills itself before step number `step`; return whether it got that far."""

    def doomed(store: Store) -> None:
        _count_down(step)
        change(store)

    pid = child(root, doomed)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert status in (0, -signal.SIGKILL)
    return status != 0


def _count_down(step: int) -> None:
    """Make this process kill itself before its call number `step` of any function in STEPS."""
    left = step

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **named)

        return call

    for name in STEPS:
        setattr(os, name, counted(getattr(os, name)))


@pytest.mark.parametrize(("change", "back"), [(pack, unpack), (unpack, pack)])
def test_kill_before_every_step(
    tmp_path: Path, change: Callable[[Store], PackReport], back: Callable[[Store], PackReport]
) -> None:
    with Store.open(tmp_path / "prepared") as store:
        put_family(store, layers=2)
        pack(store)
        back(store)
        before, form = contents(store), (packed(store), plain(store))
    step = 0
    forms = set()
    going = True
    while going:
        step += 1
        root = tmp_path / str(step)
        shutil.copytree(tmp_path / "prepared", root)
        going = killed(root, change, step)
        with Store.open(root) as store:
            forms.add((len(packed(store)), len(plain(store))))
            assert contents(store) == before
            assert audit(store).damaged == ()
            change(store)
            collect(store)
            assert contents(store) == before
            assert (packed(store), plain(store)) != form
            assert not packed(store) & plain(store)
            assert not [*store.objects.shelf.temporaries(), *store.objects.packed.shelf.temporaries()]
        shutil.rmtree(root)
    assert step > 8
    assert len(forms) == 3, "before, both, after: not every phase was seen"


def test_two_packers_an_ingest_a_collection_and_a_reader_at_once(tmp_path: Path) -> None:
    """Other processes pack, unpack, put and remove fine-tunes and collect while this one reads; every read is right."""
    with Store.open(tmp_path) as store:
        put_family(store)
        before = contents(store)
    children = [child(tmp_path, job) for job in (_packs, _packs, _puts, _collects)]
    with Store.open(tmp_path) as store:
        rounds = 0
        while children:
            rounds += 1
            for digest, data in before.items():
                assert b"".join(store.objects.read(digest)) == data
            for pid in list(children):
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    assert os.waitstatus_to_exitcode(status) == 0
                    children.remove(pid)
        assert rounds > 3
        pack(store)
        collect(store)
        assert contents(store) == before
        assert packed(store)
        assert audit(store).damaged == ()


def _packs(store: Store) -> None:
    done = 0
    while done < 12:
        with suppress(StoreBusy):  # another process is packing
            (pack, unpack)[done % 2](store)
            done += 1


def _puts(store: Store) -> None:
    for number in range(12):
        manifest = put(store, "passing", [matrix(0, 1), matrix(1, 2 + number % 3), matrix(2)], "full", "base")
        for tensor in manifest.tensors:
            store.open_tensor(tensor.digest)
        with store.catalog.writing() as writer:
            writer.remove_model("passing")


def _collects(store: Store) -> None:
    for _ in range(12):
        with suppress(StoreBusy):
            collect(store, timeout=2)
