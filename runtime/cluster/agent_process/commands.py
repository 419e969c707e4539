"""Carry out an agent's commands other than steps and plain messages, on the engine's thread.

Those are: load and drop stages, give back, read and write pages, send and verify kept hidden states, copy pages to host
memory and back.
`CommandExecutor.do` carries out one command and returns the resulting event for the agent. A stage that cannot be
loaded and bytes that do not verify are reported in the event; only EngineLost and defects are raised.

Stages that are prepared beside steps are loaded, and stages dropped, in the order of the commands: a stage that came
first may use weights of one that leaves after it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence

import msgspec

from runtime.chains import Array, HostMemory, Preparing, Stage, StageEngine, Tiered
from runtime.cluster.agent_process.stage_loader import StageLoader
from runtime.cluster.errors import public
from runtime.control.agent_io import (
    ActivationsVerified,
    AgentCommand,
    AgentEvent,
    CopiedIn,
    CopiedOut,
    CopyIn,
    CopyOut,
    DropLoan,
    DropStage,
    HoldLoan,
    HostChanged,
    LoadStage,
    PagesWritten,
    ReadPages,
    ReadStagesAhead,
    ReturnPages,
    SendActivations,
    ShareHostMemory,
    StageFailed,
    StageLoaded,
    StageRead,
    VerifyActivations,
    WritePages,
)
from runtime.loans import LoanEngine
from runtime.messages import Message
from runtime.transport.checksums import ArrayChecksums
from runtime.transport.link import Link
from runtime.types import EngineLost

_log = logging.getLogger(__name__)


class CommandExecutor:
    """Carries out the commands of one agent. `checksums`: of arrays that go over this link."""

    def __init__(self, engine: StageEngine, messenger: Link, checksums: ArrayChecksums | None = None) -> None:
        self._engine, self._messenger, self._checksums = engine, messenger, checksums or ArrayChecksums()
        prepares = isinstance(engine, Preparing) and engine.prepares
        #: Stages that are being prepared.
        self.preparing = 0
        #: Whether stages may be read ahead, so that `load_prepared` may have news.
        self.reads = False
        self._loads = self._host_kv = 0
        self._drops: deque[tuple[int, DropStage]] = deque()  # each behind so many loads
        self.loader = StageLoader(engine, messenger.wake) if prepares and isinstance(engine, Preparing) else None

    def do(self, command: AgentCommand) -> AgentEvent | None:
        match command:
            case LoadStage():
                if self.loader is None:
                    return self._load(command.stage)
                self.loader.submit(command.stage)
                self.preparing += 1
                self._loads += 1
            case ReadStagesAhead():
                if self.loader is not None and isinstance(self._engine, Tiered):
                    self.loader.read_ahead(command.stages)
                    self.reads = True
            case DropStage():
                self._drops.append((self._loads, command))
                return self._drop_due()
            case ReturnPages():
                self._engine.return_pages(command.pages)
            case ReadPages():
                self._read_pages(command)
            case WritePages():
                return PagesWritten(command.move, command.lo, command.hi, command.layers, self._write_pages(command))
            case SendActivations():
                self._send_sealed(command.to, command.message, command.pieces)
            case VerifyActivations():
                verified = self._checksums.verified(command.data, command.digest)
                error = "" if verified else "the hidden states do not verify: their digest is another"
                return ActivationsVerified(command.move, command.lo, command.hi, error)
            case HoldLoan() if isinstance(self._engine, LoanEngine):
                self._engine.hold_loan(
                    command.loan, command.groups, command.tokens, command.debtor, command.first_layer
                )
            case DropLoan() if isinstance(self._engine, LoanEngine):
                self._engine.drop_loan(command.loan)
            case CopyOut():
                return self._copy_out(command)
            case CopyIn():
                return self._copy_in(command)
            case ShareHostMemory():
                self._host_kv += command.change
                if isinstance(self._engine, HostMemory):
                    self._engine.share_host_memory(self._host_kv)
        return None

    def load_prepared(self) -> list[AgentEvent]:
        """Load the stages that are prepared by now, and return the events of these and of those read ahead."""
        events: list[AgentEvent] = []
        engine: object = self._engine
        if self.reads and self.loader is not None and isinstance(engine, Tiered):
            for read, units in self.loader.drain_read():
                events.append(StageRead(read.id, units, engine.host_changes()))
        for stage in () if self.loader is None else self.loader.drain_ready():
            events.append(self._load(stage))
            self.preparing -= 1
            if (changed := self._drop_due()) is not None:
                events.append(changed)
        return events

    def _drop_due(self) -> HostChanged | None:
        """Drop the stages that no earlier load keeps waiting; return the event, if the engine tells of one."""
        dropped: list[str] = []
        while self._drops and self._drops[0][0] <= self._loads - self.preparing:
            drop = self._drops.popleft()[1]
            self._expect(drop.coming)
            self._engine.unload(drop.stage)
            dropped.append(drop.stage.id)
        if dropped and isinstance(self._engine, Tiered):
            return HostChanged(tuple(dropped), self._engine.host_changes())
        return None

    def _expect(self, coming: Sequence[Stage]) -> None:
        """Let what leaves not push what comes out of host memory."""
        engine: object = self._engine
        if not isinstance(engine, Tiered):
            return
        for stage in coming:
            try:
                engine.expect(stage)
            except EngineLost:
                raise
            except Exception:
                _log.info("%s could not be looked up", stage.id, exc_info=True)  # its load reports why

    def _load(self, stage: Stage) -> AgentEvent:
        try:
            spec = self._engine.load(stage)
        except EngineLost:
            raise
        except Exception as error:
            _log.warning("%s could not be loaded", stage.id, exc_info=True)
            return StageFailed(stage, public(error))
        engine = self._engine
        if not isinstance(engine, Tiered):
            return StageLoaded(stage, spec, engine.memory().weights)
        return StageLoaded(stage, spec, engine.memory().weights, engine.loaded_units(stage), engine.host_changes())

    def _read_pages(self, command: ReadPages) -> None:
        self._send_sealed(command.to, command.message, self._engine.read_pages(command.pages))

    def _send_sealed(self, to: str, message: Message, what: Sequence[tuple[Array, int, int]] | Array) -> None:
        array, digest = self._checksums.sealed(to, what)
        self._messenger.send(to, msgspec.structs.replace(message, digest=digest), (array,))

    def _write_pages(self, command: WritePages) -> str:
        """Write pages; return why that failed, or an empty string."""
        if not self._checksums.verified(command.data, command.digest):
            return "the pages do not verify: their digest is another"
        return self._write(command.pages, command.data)

    def _write(self, pages: Sequence[int], data: Array) -> str:
        try:
            self._engine.write_pages(pages, data)
        except ValueError as error:
            return f"the pages do not fit: {public(error)}"
        return ""

    def _copy_out(self, command: CopyOut) -> CopiedOut:
        """Copy pages to host memory; without memory for that they are lost, and the sequence runs again."""
        began, engine = time.perf_counter_ns(), self._engine
        try:
            if isinstance(engine, HostMemory):
                data = engine.copy_out(command.key, command.tokens, command.pages)
            else:
                data = engine.read_pages(command.pages)
        except (MemoryError, RuntimeError, ValueError) as error:  # torch raises RuntimeError for a lack of memory
            _log.warning("K and V of %s are not kept", command.key, exc_info=True)
            return CopiedOut(command.key, None, time.perf_counter_ns() - began, public(error))
        return CopiedOut(command.key, data, time.perf_counter_ns() - began)

    def _copy_in(self, command: CopyIn) -> CopiedIn:
        """Write K and V from host memory; where that fails the sequence runs again."""
        began, engine, error = time.perf_counter_ns(), self._engine, ""
        if not isinstance(engine, HostMemory):
            error = self._write(command.pages, command.data)
        else:
            try:
                engine.copy_in(command.opened, command.tokens, command.pages, command.data)
            except ValueError as reason:
                error = f"K and V do not fit: {public(reason)}"
        return CopiedIn(command.key, time.perf_counter_ns() - began, error)
