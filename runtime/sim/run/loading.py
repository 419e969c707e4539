"""Simulate how weights come to a device: disk -> host memory -> device, one stage after the other, piece by piece.

    submit(stage) -> advance(now): when the next piece is there -> advance(that time) -> ... -> a `FinishedLoad`
    read_ahead(stages) -> read_next(now): the same for what host memory reads while nothing is loaded

- A server's disk reads one piece after the other, whichever device it is for. What was read stays in the server's
  memory; the pieces that were used least recently make room for later ones.
- A piece that is being read for one device is not read again for another one, which waits for it.
- Each device copies over its own link. Only pieces that are not on the device are loaded (UN-04).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.chains import Stage
from runtime.sim.cost.hardware import ServerSpec
from runtime.sim.cost.steps import StepPiece
from runtime.sim.run.engine import SimEngine
from runtime.types import ModelSpec
from zoo.errors import NotFound


@dataclass(slots=True)
class Host:
    """A server's disk, and the memory that keeps what was read from it.

    Fields:
        memory: Bytes that are kept.
        disk_bytes: Bytes read from disk so far.
    """

    server: ServerSpec
    memory: int
    disk_bytes: int = 0
    _disk_free: int = 0
    _kept: OrderedDict[str, tuple[int, int]] = field(default_factory=OrderedDict)
    _held: int = 0
    _kv: dict[str, int] = field(default_factory=dict)

    def share_memory(self, device: str, kv: int) -> None:
        """Leave weights what K and V in host memory do not take; `kv`: bytes of those of a device."""
        self._kv[device] = kv
        self._forget_excess()

    def has(self, piece: StepPiece) -> bool:
        """Return whether a piece is in memory, or on its way there."""
        return piece.name in self._kept

    def read(self, piece: StepPiece, now: int) -> int:
        """Return when a piece that is needed now is in memory, in ns; it is read from disk unless it is there."""
        known = self._kept.get(piece.name)
        if known is not None:
            self._kept.move_to_end(piece.name)
            return max(now, known[0])
        disk = self.server.disk
        self._disk_free = max(now, self._disk_free) + disk.busy_ns(piece.nbytes)
        self.disk_bytes += piece.nbytes
        there = self._disk_free + disk.latency
        self._kept[piece.name] = there, piece.nbytes
        self._held += piece.nbytes
        self._forget_excess()
        return there

    def _forget_excess(self) -> None:
        memory = self.memory - sum(self._kv.values())
        while self._held > memory and self._kept:
            _, (_, nbytes) = self._kept.popitem(last=False)
            self._held -= nbytes

    def copied(self, piece: StepPiece, now: int) -> int:
        """Return when a piece is on a device if its copy from memory starts now."""
        return now + self.server.host.latency + self.server.host.busy_ns(piece.nbytes)


@dataclass(frozen=True, slots=True)
class FinishedLoad:
    """A stage that is loaded, or could not be.

    Fields:
        nbytes: Bytes that came.
        ns: How long they took.
        disk: Bytes among them that were read from disk; `host`: that memory still had.
        error: Why it is not loaded.
    """

    stage: Stage
    spec: ModelSpec | None = None
    nbytes: int = 0
    ns: int = 0
    error: str = ""
    disk: int = 0

    @property
    def host(self) -> int:
        return self.nbytes - self.disk


@dataclass(slots=True)
class Loader:
    """The loads of one device."""

    engine: SimEngine
    host: Host
    _waiting: deque[Stage] = field(default_factory=deque)
    _pieces: deque[StepPiece] = field(default_factory=deque)
    _nbytes: int = 0
    _disk: int = 0
    _began: int = 0
    _started: bool = False
    _ahead: deque[StepPiece] = field(default_factory=deque)
    _reading: int = 0

    def read_ahead(self, stages: Iterable[Stage]) -> None:
        """Let host memory read these stages, instead of those of the last call: `read_next` is due."""
        named = {piece.name: piece for stage in stages for piece in self.engine.missing(stage)}
        self._ahead = deque(named.values())

    def read_next(self, now: int) -> int | None:
        """Return when to call again; None if all is there, a piece is on its way, or a stage is being loaded."""
        while self._ahead and not self.busy and self._reading <= now:
            piece = self._ahead.popleft()
            if not self.host.has(piece):
                self._reading = self.host.read(piece, now)
                return self._reading
        return None

    @property
    def busy(self) -> bool:
        return bool(self._waiting)

    def submit(self, stage: Stage) -> bool:
        """Load a stage after those submitted before; return whether it is the only one, so that `advance` is due."""
        self._waiting.append(stage)
        return len(self._waiting) == 1

    def advance(self, now: int) -> int | FinishedLoad:
        """Return when to call again, or the first stage once all of it is there.

        Raises IndexError if nothing is to be loaded.
        """
        stage = self._waiting[0]
        if not self._started:
            try:
                self._pieces = deque(self.engine.missing(stage))
            except NotFound as error:
                return FinishedLoad(self._waiting.popleft(), error=str(error))
            self._nbytes, self._began, self._started = sum(piece.nbytes for piece in self._pieces), now, True
            self._disk = 0
        if self._pieces:
            piece = self._pieces.popleft()
            self._disk += 0 if self.host.has(piece) else piece.nbytes
            return self.host.copied(piece, self.host.read(piece, now))
        self._waiting.popleft()
        self._started = False
        return FinishedLoad(stage, self.engine.load(stage), self._nbytes, now - self._began, disk=self._disk)
