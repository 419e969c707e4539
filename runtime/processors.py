"""The processors that this process may use, and settings of OpenMP that must be set before torch is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path

#: Iterations that a waiting thread of GNU's OpenMP spins before it sleeps. Its own value is 300,000, so that beside
#: other work a thread spins for the whole time slice of the one that it waits for.
_SPINS = 2000


def count_usable(root: Path = Path("/")) -> int:
    """Return the number of processors that this process may use: by its affinity, and by the quotas of its cgroups.

    A quota of a fraction of a processor counts as a whole one. `root`: the folder with `proc` and `sys`.
    """
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        count = os.cpu_count() or 1
    return max(1, min([count, *(math.ceil(quota) for quota in _quotas(root))]))


def prepare_openmp(environment: MutableMapping[str, str] | None = None, usable: int | None = None) -> None:
    """Set the defaults of OpenMP in an environment, this process's by default. Call it before torch is loaded.

    A value that is set already is kept: the number of threads (OMP_NUM_THREADS) and how long they spin
    (OMP_WAIT_POLICY or GOMP_SPINCOUNT). OpenMP itself respects the affinity, but no quota. Without a value its threads
    sleep at once: one that spun after torch's operations would hold the core that the kernels' next region needs. Where
    the kernels run on OpenMP's threads, too (BLOCKZOO_KERNEL_THREADS), they spin for 50 to 100 us.
    """
    environment = os.environ if environment is None else environment
    usable = count_usable() if usable is None else usable
    if usable < (os.cpu_count() or 1):
        environment.setdefault("OMP_NUM_THREADS", str(usable))
    if "OMP_WAIT_POLICY" not in environment:
        shared = environment.get("BLOCKZOO_KERNEL_THREADS") == "openmp"
        environment.setdefault("GOMP_SPINCOUNT", str(_SPINS if shared else 0))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the limits, in processors, of this process's cgroup and those above it, versions 1 and 2."""
    with suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "cpu" not in controllers.split(","):
                continue
            mounts = (root / "sys/fs/cgroup/cpu", root / "sys/fs/cgroup/cpu,cpuacct") if controllers else ()
            for mount in mounts or (root / "sys/fs/cgroup",):
                own = Path(path.lstrip("/"))
                for folder in (own, *own.parents):  # ends with the mount itself
                    yield from _quota_of(mount / folder)


def _quota_of(folder: Path) -> Iterator[float]:
    """Yield the limit of one cgroup, if it has one."""
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()  # version 2; "max" for none
        if quota != "max":
            yield float(quota) / float(period)
    with suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        if int(quota) > 0:
            yield int(quota) / int(period)
