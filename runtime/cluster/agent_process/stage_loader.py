"""Read and prepare the weights of stages on a thread of its own, while the loop's thread runs steps.

    submit(stage) -> the thread: engine.prepare(stage) -> drain_ready() on the loop's thread -> engine.load(stage)

The engine's `load` adopts what was prepared, which takes little time. A stage whose preparation failed is ready, too:
`load` meets the same error, and reports it.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from runtime.chains import Preparing, Stage

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
        self._todo: queue.SimpleQueue[Stage | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[Stage] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, stage: Stage) -> None:
        """Prepare a stage, after those submitted before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="zoo-loader", daemon=True)
            self._thread.start()
        self._todo.put(stage)

    def drain_ready(self) -> list[Stage]:
        """Return the stages that are ready to be loaded, in order."""
        stages: list[Stage] = []
        while not self._ready.empty():
            stages.append(self._ready.get())
        return stages

    def close(self) -> None:
        """End the thread after the stage that it prepares now."""
        if self._thread is not None:
            self._todo.put(None)
            self._thread.join(_PATIENCE)
            self._thread = None

    def _run(self) -> None:
        while (stage := self._todo.get()) is not None:
            try:
                self._engine.prepare(stage)
            except Exception:
                _log.info("%s could not be prepared", stage.id, exc_info=True)
            self._ready.put(stage)
            self._wake()
