"""Collect the commands of one event, in the order in which they were decided; neighbours of one kind share a message.

Contract: each call records the state at that moment. `flush` keeps, for each device, the order of the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from runtime.chains import Path, RunAhead, Stage
from runtime.control.agent_io import Send
from runtime.control.pool_io import PoolCommand
from runtime.control.scheduler_io import (
    EmitTokens,
    ModelUpdated,
    MoveAnswered,
    ReplaceAgent,
    RolesChanged,
    SchedulerCommand,
    SolvePlan,
)
from runtime.messages import (
    CloseSequences,
    LoadStages,
    Message,
    OpenSequences,
    PromptEntry,
    PromptSave,
    ReadAhead,
    RunRows,
    SaveSequences,
    UnloadStages,
)
from runtime.scheduler.decode.batch_numbers import BatchNumbers
from runtime.scheduler.sequences.sequence import ScheduledSequence
from runtime.scheduler.speculation.in_flight import InFlightRow
from runtime.types import SequenceRequest, TokenEvent


class _Batch(Protocol):
    def message(self) -> Message: ...


#: A row of a RunRows: sequence, epoch, start, its tokens, sample, generated, steps, attempt, speculate.
Row = tuple[str, int, int, tuple[int, ...], bool, int, int, int, bool]


@dataclass(slots=True)
class _Rows:
    device: str
    numbers: BatchNumbers
    rows: list[Row] = field(default_factory=list)

    def message(self) -> RunRows:
        seqs, epochs, starts, spans, sample, generated, steps, attempts, ahead = zip(*self.rows, strict=True)
        counts, tokens = tuple(map(len, spans)), tuple(chain.from_iterable(spans))
        if not any(attempts):
            batch = self.numbers.number(self.device, seqs, epochs, starts, counts, sample, steps)
            return RunRows(seqs, epochs, starts, counts, tokens, sample, generated, steps, batch=batch)
        return RunRows(seqs, epochs, starts, counts, tokens, sample, generated, steps, attempts, ahead)


@dataclass(slots=True)
class _Opens:
    epochs: list[int] = field(default_factory=list)
    requests: list[SequenceRequest] = field(default_factory=list)
    outputs: list[tuple[int, ...]] = field(default_factory=list)
    paths: list[Path] = field(default_factory=list)
    keep: list[bool] = field(default_factory=list)
    computed: list[int] = field(default_factory=list)
    shared: list[tuple[str, int] | None] = field(default_factory=list)
    ahead: list[RunAhead | None] = field(default_factory=list)
    offers: list[tuple[tuple[int, tuple[str, ...]], ...]] = field(default_factory=list)
    entries: list[PromptEntry | None] = field(default_factory=list)
    saves: list[tuple[PromptSave, ...]] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)

    def message(self) -> OpenSequences:
        return OpenSequences(
            tuple(self.epochs),
            tuple(self.requests),
            tuple(self.outputs),
            tuple(self.paths),
            tuple(self.keep),
            tuple(self.computed),
            tuple(self.shared),
            tuple(self.ahead) if any(self.ahead) else (),
            tuple(self.offers) if any(self.offers) else (),
            tuple(self.entries) if any(self.entries) else (),
            tuple(self.saves) if any(self.saves) else (),
            tuple(self.swapped) if any(self.swapped) else (),
        )


@dataclass(slots=True)
class _Closes:
    seqs: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)

    def message(self) -> CloseSequences:
        return CloseSequences(tuple(self.seqs), tuple(self.epochs))


@dataclass(slots=True)
class _Saves:
    seqs: list[str] = field(default_factory=list)
    epochs: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)

    def message(self) -> SaveSequences:
        return SaveSequences(tuple(self.seqs), tuple(self.epochs), tuple(self.tokens))


@dataclass(slots=True)
class _One:
    said: Message

    def message(self) -> Message:
        return self.said


class CommandOutbox:
    """Commands of the scheduler until the end of the current event."""

    def __init__(self) -> None:
        self._numbers = BatchNumbers()
        self.events: list[TokenEvent] = []
        self._devices: dict[str, list[_Batch]] = {}
        self._replaced: list[str] = []
        self._updated: list[ModelUpdated | MoveAnswered | RolesChanged | SolvePlan | PoolCommand] = []

    def load(
        self,
        device: str,
        stages: Sequence[tuple[Stage, tuple[str, ...]]],
        pages: int = -1,
        counts: tuple[tuple[int, ...], ...] = (),
        limits: tuple[tuple[str, int], ...] = (),
    ) -> None:
        """Add a LoadStages for these stages, each with its blocks.

        Args:
            pages: The device's page limit; -1: it stays.
            counts: Components of each block.
            limits: Rows of a step that may pass a block (BL-14).
        """
        blocks = tuple(blocks for _, blocks in stages)
        self.add_message(device, LoadStages(tuple(stage for stage, _ in stages), blocks, limits, pages, counts))

    def read_ahead(
        self, device: str, stages: Sequence[tuple[Stage, tuple[str, ...]]], counts: tuple[tuple[int, ...], ...]
    ) -> None:
        """Add a ReadAhead for these stages, each with its blocks and the components of each of these."""
        named = tuple(stage for stage, _ in stages)
        self.add_message(device, ReadAhead(named, tuple(blocks for _, blocks in stages), counts))

    def unload_stages(
        self, device: str, stages: Sequence[Stage], pages: int = -1, coming: tuple[Stage, ...] = ()
    ) -> None:
        self.add_message(device, UnloadStages(tuple(stages), pages, coming))

    def add_message(self, device: str, message: Message) -> None:
        self._devices.setdefault(device, []).append(_One(message))

    def close(self, device: str, seq: str, epoch: int) -> None:
        last = self._last(device)
        if not isinstance(last, _Closes):
            self._devices[device].append(last := _Closes())
        last.seqs.append(seq)
        last.epochs.append(epoch)

    def save(self, device: str, seq: str, epoch: int, tokens: int) -> None:
        """Close a sequence on a device that keeps K and V of its first tokens in host memory (QL-10)."""
        last = self._last(device)
        if not isinstance(last, _Saves):
            self._devices[device].append(last := _Saves())
        last.seqs.append(seq)
        last.epochs.append(epoch)
        last.tokens.append(tokens)

    def open(
        self, device: str, sequence: ScheduledSequence, *, keep: bool = False, shared: tuple[str, int] | None = None,
        entry: PromptEntry | None = None, saves: tuple[PromptSave, ...] = (), swapped: int = 0,
    ) -> None:  # fmt: skip
        """Open a sequence on a device.

        Args:
            shared: Another sequence, and how many of its first tokens are shared.
            entry: How it starts with the first layers of another chain (UN-15).
            saves: Hidden states to be saved while its prompt runs (UN-15).
            swapped: Epoch of its K and V in host memory, which come back (QL-10).
        """
        self._open(
            device,
            sequence.epoch,
            sequence.device_request,
            tuple(sequence.output),
            sequence.path_on(device),
            keep,
            sequence.computed,
            shared,
            sequence.ahead,
            tuple(sequence.offered.hops.items()),
            entry,
            saves,
            swapped,
        )

    def hold_sequence(self, device: str, request: SequenceRequest, path: Path, shared: tuple[str, int]) -> None:
        """Open a sequence that runs no rows and only holds the pages that it shares (a cached prefix)."""
        self._open(device, 1, request, (), path, False, shared[1], shared)

    def run_row(
        self,
        sequence: ScheduledSequence,
        tokens: tuple[int, ...],
        steps: int,
        sample: bool,
        one: InFlightRow | None = None,
    ) -> None:
        """Add the next row of a sequence, for the device of its first hop.

        `one`: the row's record where the sequence is predicted, or the row is sent again. A row with a guess starts at
        the token after the row in flight.
        """
        seq, start, made = sequence.request.seq, sequence.computed, len(sequence.output)
        rows = self.rows(sequence.path[0].device)
        if one is None:
            rows.append((seq, sequence.epoch, start, tokens, sample, made, steps, 0, False))
        elif one.guess is None:
            rows.append((seq, sequence.epoch, start, tokens, sample, made, steps, one.attempt, one.started))
        else:
            rows.append(
                (seq, sequence.epoch, sequence.tokens, tokens, sample, made + 1, steps, one.attempt, one.started)
            )

    def rows(self, device: str) -> list[Row]:
        """Return the list to append a device's rows to; valid until its next other command, or `flush`."""
        last = self._last(device)
        if not isinstance(last, _Rows):
            self._devices[device].append(last := _Rows(device, self._numbers))
        return last.rows

    def replace(self, device: str) -> None:
        self._replaced.append(device)

    def updated(self, model: str, version: str, error: str = "") -> None:
        self._updated.append(ModelUpdated(model, version, error))

    def moving(self, seq: str, error: str) -> None:
        self._updated.append(MoveAnswered(seq, error))

    def roles_changed(self, error: str) -> None:
        self._updated.append(RolesChanged(error))

    def solve(self, command: SolvePlan) -> None:
        """Have a plan solved beside the scheduler."""
        self._updated.append(command)

    def tell_pool(self, command: PoolCommand) -> None:
        """Send a query or a denial to the managers of the pool."""
        self._updated.append(command)

    def flush(self) -> list[SchedulerCommand]:
        """Return all commands, and leave the outbox empty."""
        out: list[SchedulerCommand] = [
            Send(device, batch.message()) for device, batches in self._devices.items() for batch in batches
        ]
        out.extend(ReplaceAgent(device) for device in self._replaced)
        out.extend(self._updated)
        if self.events:
            out.append(EmitTokens(tuple(self.events)))
            self.events = []
        self._devices.clear()
        self._replaced.clear()
        self._updated.clear()
        return out

    def remove_device(self, device: str) -> None:
        """Drop all messages for a device that is gone."""
        self._devices.pop(device, None)

    def _open(
        self,
        device: str,
        epoch: int,
        request: SequenceRequest,
        output: tuple[int, ...],
        path: Path,
        keep: bool,
        computed: int,
        shared: tuple[str, int] | None,
        ahead: RunAhead | None = None,
        offers: tuple[tuple[int, tuple[str, ...]], ...] = (),
        entry: PromptEntry | None = None,
        saves: tuple[PromptSave, ...] = (),
        swapped: int = 0,
    ) -> None:
        last = self._last(device)
        if not isinstance(last, _Opens):
            self._devices[device].append(last := _Opens())
        last.epochs.append(epoch)
        last.requests.append(request)
        last.outputs.append(output)
        last.paths.append(path)
        last.keep.append(keep)
        last.computed.append(computed)
        last.shared.append(shared)
        last.ahead.append(ahead)
        last.offers.append(offers)
        last.entries.append(entry)
        last.saves.append(saves)
        last.swapped.append(swapped)

    def _last(self, device: str) -> _Batch | None:
        batches = self._devices.setdefault(device, [])
        return batches[-1] if batches else None
