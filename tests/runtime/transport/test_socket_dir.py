"""A cluster's socket folder is accessible to its user only, and is removed.

The cluster removes it, or the next cluster does if the first one was killed.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.transport.socket_dir import SocketFolder
from zoo.errors import InputError

#: A program that has a folder until it is killed.
HOLD = """
import pathlib, sys
from runtime.transport.socket_dir import SocketFolder
folder = SocketFolder(pathlib.Path(sys.argv[1]))
print(folder.path, flush=True)
input()
"""


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="z", dir="/tmp") as name:
        yield Path(name)


def test_what_a_killed_process_has_left_is_removed_by_the_next_and_nothing_else(short: Path) -> None:
    living, strange = SocketFolder(short), short / "zoo-agents-strange"
    strange.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(short)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        left = Path(other.stdout.readline().strip())
        (left / "scheduler").touch()
        SocketFolder(short).remove()
        assert left.is_dir()
        other.send_signal(signal.SIGKILL)
    again = SocketFolder(short)
    assert not left.exists() and living.path.is_dir() and strange.is_dir()
    for each in (again, living):
        each.remove()
        each.remove()
        assert not each.path.exists()


def test_only_its_user_can_enter(short: Path) -> None:
    folder = SocketFolder(short)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()


def test_where_none_can_be_is_an_error_that_says_what_to_do(short: Path) -> None:
    with pytest.raises(InputError, match="set TMPDIR to a shorter one"):
        SocketFolder(short / ("deep" * 20))
    with pytest.raises(InputError, match="no folder for sockets"):
        SocketFolder(short / "nowhere")
