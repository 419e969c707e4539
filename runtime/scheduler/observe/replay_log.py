"""Record every event that a scheduler gets and a digest of its commands, so that a run can be replayed.

    line 1    {"log": 2, "chains": …, "blocks": …, "config": …, "surrogates": …}
    then      [time in ns, kind, event, digest of the commands]

Contract: a `ReplayRecorder` takes a scheduler's place and changes nothing. `replay` gives the events to a new scheduler
and raises Diverged at the first event with different commands. A scheduler is a function of its events, so any
difference is a defect (a clock, an unordered set).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol, get_args

import msgspec

from runtime.chains import Block, Chain, Surrogate
from runtime.config import ClusterConfig
from runtime.control.scheduler_io import SchedulerCommand, SchedulerEvent
from runtime.messages import PROTOCOL, Message, ToScheduler
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.scheduler.scheduler import Scheduler
from zoo.errors import InputError

_FORMAT = 2
#: Types of a scheduler's events and messages, by their name in the log.
_KINDS: dict[str, Any] = {kind.__name__: kind for kind in (*get_args(SchedulerEvent), *get_args(ToScheduler))}
#: Limit of a line in bytes; far above any request with its prompt, or the rows of a step.
_MOST_LINE = 1 << 26


class Diverged(Exception):
    """A replayed scheduler returned other commands than the recorded one."""


class Handler(Protocol):
    def handle(self, event: Message | SchedulerEvent, now: int) -> list[SchedulerCommand]: ...


class LogHeader(msgspec.Struct, frozen=True):
    """The arguments of the recorded scheduler.

    Fields:
        log: Format of the log.
        protocol: Version of the messages in the log.
    """

    log: int
    chains: tuple[Chain, ...]
    blocks: tuple[Block, ...]
    config: ClusterConfig
    surrogates: dict[str, tuple[Surrogate, ...]]
    adaptation: VariantChoice | None = None
    protocol: int = 0

    def scheduler(self) -> Scheduler:
        """Return a new scheduler with these arguments."""
        return Scheduler(self.chains, self.blocks, self.config, surrogates=self.surrogates, adaptation=self.adaptation)


class ReplayRecorder:
    """Record a scheduler's events and digests; used in its place.

    Args:
        scheduler: The scheduler that decides.
        head: Its arguments.
        write: Receives lines; it must keep their order.
    """

    def __init__(self, scheduler: Handler, head: LogHeader, write: Callable[[bytes], object]) -> None:
        self._scheduler = scheduler
        self._write = write
        write(msgspec.json.encode(head) + b"\n")

    def handle(self, event: Message | SchedulerEvent, now: int) -> list[SchedulerCommand]:
        """Pass an event to the scheduler, and record it."""
        commands = self._scheduler.handle(event, now)
        self._write(msgspec.json.encode([now, type(event).__name__, event, digest_of(commands)]) + b"\n")
        return commands


def head_of(
    chains: Iterable[Chain],
    blocks: Iterable[Block],
    config: ClusterConfig,
    surrogates: Mapping[str, Sequence[Surrogate]] = MappingProxyType({}),
    adaptation: VariantChoice | None = None,
) -> LogHeader:
    """Return the header of a log for a scheduler with these arguments."""
    known = {model: tuple(each) for model, each in surrogates.items()}
    return LogHeader(_FORMAT, tuple(chains), tuple(blocks), config, known, adaptation, PROTOCOL)


def digest_of(commands: Iterable[SchedulerCommand]) -> str:
    """Return the digest of commands, receivers included, in their order."""
    state = hashlib.blake2b(digest_size=16)
    for command in commands:
        state.update(type(command).__name__.encode())
        state.update(msgspec.json.encode(command))
    return state.hexdigest()


def replay(
    path: Path,
    told: Callable[[Sequence[SchedulerCommand]], object] = lambda commands: None,
    made: Callable[[Scheduler], object] = lambda scheduler: None,
) -> int:
    """Replay a log; return the number of events.

    `told`: called with the commands of each event. `made`: called with the new scheduler, before the first one.

    Raises Diverged; InputError for a file that is not a log.
    """
    try:
        with path.open("rb") as file:
            lines = _lines(file, path)
            scheduler = _head(next(lines, b""), path).scheduler()
            made(scheduler)
            count = 0
            for count, line in enumerate(lines, 1):
                now, event, expected = _entry(line, path, count + 1)
                commands = scheduler.handle(event, now)
                if digest_of(commands) != expected:
                    raise Diverged(f"{path}, line {count + 1}: another answer to {type(event).__name__} at {now} ns")
                told(commands)
            return count
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None


def _lines(file: BinaryIO, path: Path) -> Iterator[bytes]:
    while line := file.readline(_MOST_LINE + 1):
        if len(line) > _MOST_LINE:
            raise InputError(f"{path} has a line of more than {_MOST_LINE:,} bytes")
        yield line


def _head(line: bytes, path: Path) -> LogHeader:
    try:
        head = msgspec.json.decode(line, type=LogHeader)
    except (msgspec.MsgspecError, ValueError) as error:
        raise InputError(f"{path} is no log of a scheduler: {error}") from None
    if head.log != _FORMAT:
        raise InputError(f"{path} is a log of format {head.log}, not {_FORMAT}")
    if head.protocol != PROTOCOL:
        raise InputError(
            f"{path} is a log of another version, whose agents spoke protocol {head.protocol or 'unknown'}, not "
            f"{PROTOCOL}"
        )
    return head


def _entry(line: bytes, path: Path, number: int) -> tuple[int, Any, str]:
    try:
        now, kind, event, digest = msgspec.json.decode(line, type=tuple[int, str, msgspec.Raw, str])
        return now, msgspec.json.decode(event, type=_KINDS[kind]), digest
    except (msgspec.MsgspecError, KeyError, ValueError) as error:
        raise InputError(f"{path}, line {number}: not an event ({error})") from None
