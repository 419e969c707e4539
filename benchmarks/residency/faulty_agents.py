"""The agents of `benchmarks.residency.faults`: those of `cli.serving.agent_engines`, but reads of the store may fail.

The folder in the environment variable `FAULTS` is the order book. While it has a file `fail`, the next tensor that is
opened cannot be read, twice in a row (once while its stage is prepared, once when the stage is loaded). A file `kill`
ends the process while it loads a stage: at the next tensor that is opened behind as many as the file says. The file is
renamed to `failed-<number>-<process>` or `killed-<number>-<process>` by the process that obeys it.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cli.serving.agent_engines import ENGINES
from runtime.chains import StageEngine
from runtime.cluster.agent_process.main import MakeEngine, main

FAULTS = "ZOO_BENCHMARK_FAULTS"
#: Reads of a tensor that fail.
_TIMES = 2


def break_reads(folder: Path) -> None:
    """Let reads of tensors fail in this process, or end it, by the orders in a folder."""
    from zoo.store import Store

    open_tensor, lock, broken = Store.open_tensor, threading.Lock(), Counter[str]()
    numbers = iter(range(1 << 30))
    left: list[int] = []

    def faulty(store: Store, digest: str) -> Any:
        with lock:
            if left:
                left[0] -= 1
                if left[0] < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            elif (order := folder / "kill").exists():
                taken = order.rename(folder / f"killed-{next(numbers)}-{os.getpid()}")
                left.append(int(taken.read_text()))
            order = folder / "fail"
            if not broken.total() and order.exists():
                order.rename(folder / f"failed-{next(numbers)}-{os.getpid()}")
                broken[digest] = _TIMES
            if broken[digest]:
                broken[digest] -= 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return open_tensor(store, digest)

    Store.open_tensor = faulty  # type: ignore[method-assign]


def _faulty(settings: Mapping[str, Any]) -> MakeEngine:
    make = ENGINES["staged"](settings)

    def made(device: str) -> StageEngine:
        break_reads(Path(os.environ[FAULTS]))
        return make(device)

    return made


if __name__ == "__main__":
    sys.exit(main({"staged": _faulty}))
