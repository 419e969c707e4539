"""Read and prepare the weights of stages on a thread of its own, while the loop's thread runs steps.

    submit(stage) -> the thread: engine.prepare(stage) -> drain_ready() on the loop's thread -> engine.load(stage)
    read_ahead(stages) -> the thread, while nothing is submitted: engine.read_ahead -> drain_read()

The engine's `load` adopts what was prepared, which takes little time. A stage whose preparation failed is ready, too:
`load` meets the same error, and reports it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from runtime.chains import Preparing, ReadsAhead, Stage

_log = logging.getLogger(__name__)

#: Longest time that `close` waits for a stage that is being prepared, in seconds.
_PATIENCE = 30.0


class StageLoader:
    """Prepares stages one after another, in the order of their requests.

    Args:
        wake: Ends the loop's wait for messages; called from the loader's thread.
    """

    def __init__(self, engine: Preparing, wake: Callable[[], None]) -> None:
        self._engine, self._wake = engine, wake
        #: A stage to prepare, the stages to read ahead from now on, or None to end.
        self._todo: queue.SimpleQueue[Stage | tuple[Stage, ...] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[Stage, tuple[str, ...]]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, stage: Stage) -> None:
        """Prepare a stage, after those submitted before."""
        self._put(stage)

    def read_ahead(self, stages: tuple[Stage, ...]) -> None:
        """Read these stages into host memory while none is to be prepared, instead of those of the last call."""
        self._put(stages)

    def drain_ready(self) -> list[Stage]:
        """Return the stages that are ready to be loaded, in order."""
        stages: list[Stage] = []
        while not self._ready.empty():
            stages.append(self._ready.get())
        return stages

    def drain_read(self) -> list[tuple[Stage, tuple[str, ...]]]:
        """Return the stages that were read ahead since the last call, with the digests of their weights."""
        found: list[tuple[Stage, tuple[str, ...]]] = []
        while not self._read.empty():
            found.append(self._read.get())
        return found

    def close(self) -> None:
        """End the thread after the stage that it prepares now."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(_PATIENCE)
            self._thread = None

    def _put(self, what: Stage | tuple[Stage, ...]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zoo-loader", daemon=True)
            self._thread.start()
        self._todo.put(what)

    def _run(self) -> None:
        ahead: tuple[Stage, ...] = ()
        while (what := self._todo.get()) is not None:
            if isinstance(what, tuple):
                ahead = what
            else:
                self._prepare(what)
            if ahead and self._todo.empty() and self._read_all(ahead):
                ahead = ()

    def _prepare(self, stage: Stage) -> None:
        try:
            self._engine.prepare(stage)
        except Exception:
            _log.info("%s could not be prepared", stage.id, exc_info=True)
        self._ready.put(stage)
        self._wake()

    def _read_all(self, stages: tuple[Stage, ...]) -> bool:
        """Read stages ahead; return False if there is something else to do meanwhile, after which the rest is read."""
        engine: object = self._engine
        try:
            if isinstance(engine, ReadsAhead):
                for found in engine.read_ahead(stages, lambda: not self._todo.empty()):
                    self._read.put(found)
                    self._wake()
        except Exception:
            _log.info("%s could not be read ahead", [each.id for each in stages], exc_info=True)
            return True
        return self._todo.empty()
