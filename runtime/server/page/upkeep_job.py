"""One long piece of work on the store at a time, on a thread of its own: an audit or a collection."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from zoo.errors import InUse, ZooError
from zoo.store import Store
from zoo.upkeep.audit import Audit, audit
from zoo.upkeep.collect import Collected, collect

#: Seconds that a collection waits for ingests and readers; a browser waits for its end.
_COLLECT_SECONDS = 5.0
Work = Literal["verify", "gc", "count"]


@dataclass(frozen=True, slots=True)
class UpkeepState:
    """What runs or ran last.

    Fields:
        work: None before the first.
        done, total: Files checked, of how many; 0 where that is not known.
    """

    work: Work | None = None
    running: bool = False
    done: int = 0
    total: int = 0
    audit: Audit | None = None
    collected: Collected | None = None
    error: str | None = None


class _Stopped(Exception):
    """The application ends."""


class UpkeepJob:
    """Runs the work of one store. `state` may be read on any thread."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self.state = UpkeepState()

    def start(self, work: Work) -> None:
        """Begin. Raises InUse if something runs already."""
        with self._starting:
            if self.state.running:
                raise InUse("the store is being verified or collected already")
            self.state = UpkeepState(work, running=True)
        run: Callable[[], UpkeepState] = self._verified if work == "verify" else lambda: self._collected(work)
        threading.Thread(target=self._run, args=(run,), name="zoo-page-upkeep", daemon=True).start()

    def stop(self) -> None:
        """Let an audit end at its next file."""
        self._stopping.set()

    def _run(self, work: Callable[[], UpkeepState]) -> None:
        try:
            state = work()
        except ZooError as error:
            state = replace(self.state, error=str(error))
        except _Stopped:
            state = replace(self.state, error="it was stopped")
        except Exception:
            state = replace(self.state, error="it failed; `zoo verify` on the command line says more")
        self.state = replace(state, running=False)

    def _verified(self) -> UpkeepState:
        found = audit(self._store, self._progress)
        return replace(self.state, audit=found)

    def _collected(self, work: Work) -> UpkeepState:
        return replace(self.state, collected=collect(self._store, work == "count", _COLLECT_SECONDS))

    def _progress(self, done: int, total: int) -> None:
        if self._stopping.is_set():
            raise _Stopped
        self.state = replace(self.state, done=done, total=total)
