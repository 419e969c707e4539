"""Processes of the module `child` that start in milliseconds: one process imports it once, and forks for each of them.

It has one thread and opens nothing, so its forks are clean. The parent passes the arguments and the end of a pipe that
becomes the fork's standard output, over a Unix socket, and gets its process id; later it asks for the exit code. Until
then an ended fork is a zombie, so its process id is not used again.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

_MOST = 1 << 16


@dataclass
class ForkedProcess:
    """A fork, as far as tests use `subprocess.Popen`. `stdout`: what it prints."""

    pid: int
    stdout: Any
    _forks: Forks
    returncode: int | None = None
    _handle: int = field(init=False)

    def __post_init__(self) -> None:
        self._handle = os.pidfd_open(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._handle], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            os.close(self._handle)
            self.returncode = self._forks.exit_code(self.pid)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Forks:
    """The parent's end."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def start(self, arguments: Sequence[str]) -> ForkedProcess:
        """Start a fork with the arguments of `child`."""
        reads, writes = os.pipe()
        try:
            socket.send_fds(self._end, [json.dumps(list(arguments)).encode()], [writes])
        finally:
            os.close(writes)
        return ForkedProcess(self._answer(), os.fdopen(reads), self)

    def exit_code(self, pid: int) -> int:
        """Return the exit code of a fork that has ended; the negative number of a signal that killed it."""
        self._end.sendall(json.dumps(pid).encode())
        return self._answer()

    def _answer(self) -> int:
        return int(json.loads(self._end.recv(_MOST)))


@contextmanager
def forking() -> Iterator[Forks]:
    """Run the process that forks while the context lasts."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, "-m", "tests.runtime.server.durable.forks", str(theirs.fileno())]
    with ours, subprocess.Popen(command, pass_fds=[theirs.fileno()]) as process:
        theirs.close()
        try:
            yield Forks(ours)
        finally:
            ours.close()
            process.wait(60)


def _run(arguments: list[str], out: int) -> None:
    """Be a fork: run a server, and end."""
    from tests.runtime.server.durable import child

    code = 1
    try:
        os.dup2(out, 1)
        os.close(out)
        child.main(arguments)
        code = 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def main() -> None:
    """Fork as the parent asks for it, until it closes its end."""
    from tests.runtime.server.durable import child

    assert child.POINTS, "it is imported before the first fork"
    end = socket.socket(fileno=int(sys.argv[1]))
    while True:
        data, given, _, _ = socket.recv_fds(end, _MOST, 1)
        if not data:
            return
        asked = json.loads(data)
        if isinstance(asked, int):
            answer = os.waitstatus_to_exitcode(os.waitpid(asked, 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                end.close()
                _run(asked, given[0])
            os.close(given[0])
        end.sendall(json.dumps(answer).encode())


if __name__ == "__main__":
    main()
