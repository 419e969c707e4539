"""Remove the state of interrupted runs under a store's `work/` after a grace period; until then a rerun can resume.

    root/work/<name>        the state of one run: a file, or a folder with a `lock` that the run holds

A run reads its file once and only writes from then on, so a file is removed by age alone.
"""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from zoo.errors import StoreBusy
from zoo.objects import locks

#: Seconds without a write after which a run counts as abandoned.
GRACE_SECONDS = 7 * 24 * 3600.0


def sweep(work: Path, dry_run: bool = False) -> int:
    """Remove the state of abandoned runs. Best effort: what cannot be removed now is left to the next sweep.

    Returns:
        Bytes of the files that were removed, or would be.
    """
    before = time.time() - GRACE_SECONDS
    return sum(_removed(entry, before, dry_run) for entry in _listing(work))


def _removed(entry: Path, before: float, dry_run: bool) -> int:
    with suppress(OSError, StoreBusy), ExitStack() as held:
        if _is_folder(entry) and (entry / "lock").exists():
            held.enter_context(locks.exclusive(entry / "lock", 0.0))
        found = [path.lstat() for path in (entry, *_below(entry))]
        if max(status.st_mtime for status in found) >= before:
            return 0
        if not dry_run:
            shutil.rmtree(entry) if _is_folder(entry) else entry.unlink()
        return sum(status.st_size for status in found if not stat.S_ISDIR(status.st_mode))
    return 0


def _below(entry: Path) -> Iterator[Path]:
    return entry.rglob("*") if _is_folder(entry) else iter(())


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
