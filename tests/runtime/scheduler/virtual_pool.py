"""Managers of the pool in a `virtual_cluster`: heartbeats, queries and answers take time, and may be kept back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from runtime.control.pool_io import PoolAnswer, PoolDenial, PoolQuery
from runtime.control.scheduler_io import Tick
from runtime.pool.manager import PoolManager
from tests.runtime.scheduler.anything import Anything
from tests.runtime.scheduler.virtual_cluster import MS, VirtualCluster


@dataclass
class Pooled(VirtualCluster):
    """A virtual cluster with managers of the pool.

    Agents send heartbeats, and the scheduler is sent ticks, as long as anything goes on.

    Fields:
        beat: Period of heartbeats in ns.
        stale: Returns the time (ns) that a heartbeat takes in addition to `latency`.
        muted: Indexes of managers that receive and answer nothing.
        silent: Agents that send no heartbeats.
        asked, answered, refused: All queries, answers and denials, in order.
        limit: Time (ns) after which a cluster that is still busy is an error.
    """

    beat: int = 100 * MS
    stale: Callable[[], int] = lambda: 0
    muted: set[int] = field(default_factory=set)
    silent: set[str] = field(default_factory=set)
    asked: list[PoolQuery] = field(default_factory=list)
    answered: list[PoolAnswer] = field(default_factory=list)
    refused: list[PoolDenial] = field(default_factory=list)
    limit: int = 30_000 * MS
    _own: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        config = self.scheduler._state.config.lending
        self.managers = [PoolManager(config, number) for number in range(config.managers)]
        self._at(2 * MS, self.beat_all)
        self._repeat(self.beat, self.beat_all)
        self._repeat(50 * MS, lambda: self.tell(Tick()))

    def restart_manager(self, number: int) -> None:
        """Put a manager that knows nothing in a manager's place."""
        self.managers[number] = PoolManager(self.scheduler._state.config.lending, number)

    def carry_out(self, commands: Any) -> None:
        commands = list(commands)
        for command in commands:
            if isinstance(command, PoolQuery):
                self.asked.append(command)
                self._send(command, (len(self.asked) - 1) % len(self.managers))
            elif isinstance(command, PoolDenial):
                self.refused.append(command)
                for number in range(len(self.managers)):
                    self._send(command, number)
        super().carry_out(commands)

    def beat_all(self) -> None:
        """Send each manager a heartbeat of each living agent."""
        for node in self.living():
            if node.name not in self.silent:
                server = self.servers[int(node.name[1:])] if self.servers else ""
                beat = node.agent.beat(server)
                for number in range(len(self.managers)):
                    self._send(beat, number, self.stale())

    def _repeat(self, period: int, act: Callable[[], None]) -> None:
        """Act in each period, as long as anything else is to come."""

        def turn() -> None:
            act()
            assert self.now < self.limit, "still busy"
            if self.scheduler.busy or len(self._heap) > self._own:
                self._at(period, turn)

        self._at(period, turn)

    def _at(self, delay: int, act: Callable[[], None]) -> None:
        """Schedule something that does not keep the cluster going by itself."""

        def turn() -> None:
            self._own -= 1
            act()

        self._own += 1
        self.at(self.now + delay, turn)

    def _send(self, event: Any, number: int, extra: int = 0) -> None:
        self._at(self.latency + extra, lambda: self._arrive(event, number))

    def _arrive(self, event: Any, number: int) -> None:
        if number not in self.muted and (answer := self.managers[number].handle(event, self.now)) is not None:
            self.answered.append(answer)
            self.at(self.now + self.latency, lambda: self.tell(answer))


@dataclass
class PooledAnything(Pooled, Anything):
    """Random schedules with managers of the pool."""
