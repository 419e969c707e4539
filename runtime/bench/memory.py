"""Read a local process's peak memory, and find the process that listens on a port.

Both read /proc and return None where it does not exist.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

_LISTENING = "0A"
_PROC = Path("/proc")


def peak_bytes(pid: int) -> int | None:
    """Return the peak resident bytes of a process plus those of its child processes.

    It is a sum of peaks, so pages that processes share can only make it too high.
    """
    own = _status(pid, "VmHWM:")
    if own is None:
        return None
    return own * 1024 + sum(peak_bytes(child) or 0 for child in _children(pid))


def listener(port: int) -> int | None:
    """Return the least id of the processes that listen on a port, as far as this user may see them."""
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _inodes(_PROC / "net" / table, port)}
    if not inodes:
        return None
    return min(
        (int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit() and _holds(entry, inodes)), default=None
    )


def _inodes(table: Path, port: int) -> list[str]:
    try:
        rows = [line.split() for line in table.read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTENING and int(row[1].rpartition(":")[2], 16) == port]


def _holds(process: Path, inodes: set[str]) -> bool:
    with contextlib.suppress(OSError):
        for link in (process / "fd").iterdir():
            with contextlib.suppress(OSError):
                if str(link.readlink()) in inodes:
                    return True
    return False


def _status(pid: int, key: str) -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (_PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1])
    return None


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in (_PROC / str(pid) / "task").iterdir():
            with contextlib.suppress(OSError):
                found += [int(child) for child in (task / "children").read_text().split()]
    return found
