"""What a relay has its driver do beside steps: send, load and drop stages, read and write pages, send and check hidden states that were
kept. On the engine's thread.

Contract: `do` carries out one command and returns what the relay is to be told of it. A stage that cannot be loaded and bytes that do not
verify are told, not raised; only an EngineLost, and a defect, comes through.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from runtime.chains import Array, StageEngine
from runtime.cluster.errors import public
from runtime.control.commands import (
    CheckInputs,
    DropStage,
    InputsChecked,
    LoadStage,
    PagesWritten,
    ReadPages,
    RelayCommand,
    RelayEvent,
    Send,
    SendInputs,
    StageFailed,
    StageLoaded,
    WritePages,
)
from runtime.messages import Message
from runtime.transport.link import Link
from runtime.types import EngineLost

_log = logging.getLogger(__name__)


class Seals:
    """Arrays that move from device to device, each with a digest of its bytes: BLAKE3, in the host's memory."""

    def sealed(self, to: str, pieces: Sequence[tuple[Array, int, int]] | Array) -> tuple[Array, str]:
        """What goes to `to`, and its digest: an array, or rows [first, last) of arrays below each other (`joined_rows`)."""
        array = pieces if isinstance(pieces, Array) else joined_rows(pieces)
        return array, digest_of(array)

    def verified(self, array: Array, digest: str) -> bool:
        """Whether it is what was sealed."""
        return digest_of(array) == digest


class Hands:
    """See the top of the file. `seals`: of what goes over this link."""

    def __init__(self, engine: StageEngine, post: Link, seals: Seals | None = None) -> None:
        self._engine, self._post, self._seals = engine, post, seals or Seals()

    def do(self, command: RelayCommand) -> RelayEvent | None:
        match command:
            case Send():
                self._post.send(command.to, command.message, command.arrays)
            case LoadStage():
                return self._load(command)
            case DropStage():
                self._engine.unload(command.stage)
            case ReadPages():
                self._read_pages(command)
            case WritePages():
                return PagesWritten(command.move, command.lo, command.hi, self._write_pages(command))
            case SendInputs():
                self._send_sealed(command.to, command.message, command.pieces)
            case CheckInputs():
                verified = self._seals.verified(command.data, command.digest)
                error = "" if verified else "the hidden states do not verify: their digest is another"
                return InputsChecked(command.move, command.lo, command.hi, error)
        return None

    def _load(self, command: LoadStage) -> RelayEvent:
        try:
            spec = self._engine.load(command.stage)
        except EngineLost:
            raise
        except Exception as error:
            _log.warning("%s could not be loaded", command.stage.id, exc_info=True)
            return StageFailed(command.stage, public(error))
        return StageLoaded(command.stage, spec, self._engine.memory().weights)

    def _read_pages(self, command: ReadPages) -> None:
        self._send_sealed(command.to, command.message, self._engine.read_pages(command.pages))

    def _send_sealed(self, to: str, message: Message, what: Sequence[tuple[Array, int, int]] | Array) -> None:
        array, digest = self._seals.sealed(to, what)
        self._post.send(to, msgspec.structs.replace(message, digest=digest), (array,))

    def _write_pages(self, command: WritePages) -> str:
        """Why pages could not be written; empty if they were."""
        if not self._seals.verified(command.data, command.digest):
            return "the pages do not verify: their digest is another"
        try:
            self._engine.write_pages(command.pages, command.data)
        except ValueError as error:
            return f"the pages do not fit: {public(error)}"
        return ""


def joined_rows(pieces: Sequence[tuple[Array, int, int]]) -> Array:
    """Rows [first, last) of arrays [tokens, width] below each other; there is at least one. All are of one dtype and width."""
    parts = []
    for array, first, last in pieces:
        whole = memoryview(array.data).cast("B")
        row = whole.nbytes // array.shape[0]
        parts.append(whole[first * row : last * row])
    like = pieces[0][0]
    return Array(like.dtype, (sum(last - first for _, first, last in pieces), *like.shape[1:]), b"".join(parts))


def digest_of(array: Array) -> str:
    """BLAKE3 of an array's bytes, in hexadecimal."""
    return blake3(array.data).hexdigest()
