"""Run the managers of the pool, each on a thread of its own, beside the scheduler (`--lending negotiated`).

    agents --PoolBeat--> SchedulerLoop --add_beat--> all managers
    scheduler --PoolQuery--> one manager after another --PoolAnswer--> scheduler     --PoolDenial--> all managers

A manager that is muted receives and answers nothing; the streams go on, and loans wait. One that is restarted knows
nothing before the next heartbeats.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from runtime.control.pool_io import PoolAnswer, PoolCommand, PoolQuery
from runtime.lending_config import LendingConfig
from runtime.messages import PoolBeat
from runtime.pool.manager import PoolEvent, PoolManager, PoolPicture

_log = logging.getLogger(__name__)


class PoolThreads:
    """The managers of one cluster. All methods may be called from any thread.

    Args:
        clock: Returns the time in ns.
        answer: Gets each answer, on a manager's thread.
    """

    def __init__(self, config: LendingConfig, clock: Callable[[], int], answer: Callable[[PoolAnswer], object]) -> None:
        self._managers = [_ManagerThread(config, number, clock, answer) for number in range(config.managers)]
        self._turn = 0

    def start(self) -> None:
        for each in self._managers:
            each.thread.start()

    def stop(self) -> None:
        """End after what is queued."""
        for each in self._managers:
            each.put(None)

    def add_beat(self, beat: PoolBeat) -> None:
        """Pass a heartbeat to all managers."""
        for each in self._managers:
            each.put(beat)

    def send_command(self, command: PoolCommand) -> None:
        """Pass a query to the next manager in turn, a denial to all."""
        if isinstance(command, PoolQuery):
            self._managers[self._turn].put(command)
            self._turn = (self._turn + 1) % len(self._managers)
        else:
            for each in self._managers:
                each.put(command)

    def mute(self, muted: bool = True) -> None:
        """Let all managers receive and answer nothing, or go on. For tests."""
        for each in self._managers:
            each.muted = muted

    def restart(self) -> None:
        """Put managers that know nothing in the place of these. For tests."""
        for each in self._managers:
            each.renew()

    def pictures(self) -> tuple[PoolPicture, ...]:
        """Return what each manager knows now."""
        return tuple(each.picture() for each in self._managers)


class _ManagerThread:
    """One manager and its thread."""

    def __init__(
        self, config: LendingConfig, number: int, clock: Callable[[], int], answer: Callable[[PoolAnswer], object]
    ) -> None:
        self._config, self._number, self._clock, self._answer = config, number, clock, answer
        self._lock = threading.Lock()
        self._manager = PoolManager(config, number)
        self._events: queue.SimpleQueue[PoolEvent | None] = queue.SimpleQueue()
        self.muted = False
        self.thread = threading.Thread(target=self._run, name=f"zoo-pool-{number}", daemon=True)

    def put(self, event: PoolEvent | None) -> None:
        self._events.put(event)

    def renew(self) -> None:
        with self._lock:
            self._manager = PoolManager(self._config, self._number)

    def picture(self) -> PoolPicture:
        with self._lock:
            return self._manager.picture(self._clock())

    def _run(self) -> None:
        while (event := self._events.get()) is not None:
            if self.muted:
                continue
            try:
                with self._lock:
                    answer = self._manager.handle(event, self._clock())
            except Exception:
                _log.exception("a manager of the pool has failed, and starts anew")
                self.renew()
                continue
            if answer is not None:
                self._answer(answer)
