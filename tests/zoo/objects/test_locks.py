"""The store's lock: shared holders together, an exclusive one alone, released when its holder dies."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from zoo.errors import StoreBusy
from zoo.objects import locks

HOLD = """
import sys, time
from pathlib import Path
from zoo.objects import locks
with getattr(locks, sys.argv[1])(Path(sys.argv[2]), 5):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def test_shared_together_exclusive_alone(lock: Path) -> None:
    with (
        locks.shared(lock, 0),
        locks.shared(lock, 0),
        pytest.raises(StoreBusy, match="held by another"),
        locks.exclusive(lock, 0.05),
    ):
        pass
    with locks.exclusive(lock, 0):
        for kind in (locks.shared, locks.exclusive):
            with pytest.raises(StoreBusy), kind(lock, 0.05):
                pass
    with locks.exclusive(lock, 0):
        pass


def test_a_waiter_gets_it_when_it_is_free(lock: Path) -> None:
    got = threading.Event()

    def wait() -> None:
        with locks.exclusive(lock, 20):
            got.set()

    thread = threading.Thread(target=wait)
    with locks.shared(lock, 0):
        thread.start()
        assert not got.wait(0.1)
    thread.join(20)
    assert got.is_set()


@pytest.mark.parametrize("kind", ["shared", "exclusive"])
def test_a_killed_holder_leaves_no_lock(lock: Path, kind: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLD, kind, str(lock)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "held\n"
        with pytest.raises(StoreBusy), locks.exclusive(lock, 0):
            pass
        child.send_signal(signal.SIGKILL)
        child.wait()
        with locks.exclusive(lock, 5):
            pass


def test_whoever_waited_for_a_lock_that_is_removed_gets_the_one_that_has_the_name(lock: Path) -> None:
    got = threading.Event()
    leave = threading.Event()

    def wait() -> None:
        with locks.exclusive(lock, 20):
            got.set()
            leave.wait(20)

    thread = threading.Thread(target=wait)
    with locks.exclusive(lock, 0):
        thread.start()
        assert not got.wait(0.1)
        lock.unlink()
    assert got.wait(20)
    with pytest.raises(StoreBusy), locks.exclusive(lock, 0.05):
        pass
    leave.set()
    thread.join(20)
