"""The records of the durable queue, and the encoding of token events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from runtime.types import FinishReason, Logprob, PromptLogprobs, TokenEvent

Kind = Literal["completion", "chat", "response", "message", "embedding"]

#: `queued`: waits. `running`: a server has claimed it. The rest are ends: answered, refused or failed, aborted by its
#: client, and given up because servers died with it (a dead letter).
State = Literal["queued", "running", "done", "failed", "cancelled", "dead"]

ENDED: tuple[State, ...] = ("done", "failed", "cancelled", "dead")


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes [offset, offset + length) of an uploaded file."""

    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class DurableRequest:
    """A request that outlives the server.

    Fields:
        id: The answer's id.
        principal: Digest of the API key it came with; "" where the server has none.
        key: Digest of its `Idempotency-Key`.
        digest: BLAKE3 of route and body.
        body: The request's body; None: it is the bytes `source` of a file.
        seed: Seeds of its sequences are derived from it where the body has none.
        created, deadline, ended: Nanoseconds of the wall clock, which a restart does not reset.
        model, version: Full name and version of the model it started on; "" before that.
        batch, line: The batch that it is a line of.
        attempts: Times it was begun since it last made progress (`requests.append`).
        owner: Number of the server that has it; None for no server.
        status: HTTP status of its answer, once ended.
    """

    id: str
    kind: Kind
    digest: bytes
    seed: int
    created: int
    principal: str = ""
    key: str | None = None
    body: bytes | None = field(default=None, repr=False)
    source: FileRange | None = None
    deadline: int | None = None
    priority: int = 0
    model: str = ""
    version: str = ""
    batch: str | None = None
    line: int | None = None
    state: State = "queued"
    attempts: int = 0
    owner: int | None = None
    ended: int | None = None
    status: int | None = None


@dataclass(frozen=True, slots=True)
class StoredAnswer:
    """The answer of a request that has ended.

    Fields:
        document: The JSON body.
        stream: All server-sent events, where the request asked for a stream.
    """

    status: int
    document: bytes
    stream: bytes | None = None


class _StoredEvent(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """A token event without the names that its request gives. `choice`: number of its sequence."""

    choice: int
    index: int
    token: int | None
    finish: FinishReason | None = None
    logprob: float | None = None
    top: tuple[Logprob, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    error: str | None = None
    served: str | None = None
    cached: int = 0


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_StoredEvent])


def encode_events(events: Iterable[TokenEvent]) -> bytes:
    """Return events of one request in msgpack. Sequences are named `{request}/{number}`."""
    return _encoder.encode(
        [
            _StoredEvent(
                int(e.seq.rpartition("/")[2]),
                e.index,
                e.token,
                e.finish,
                e.logprob,
                e.top,
                e.prompt_logprobs,
                e.error,
                e.served,
                e.cached,
            )
            for e in events
        ]
    )


def decode_events(request: str, payloads: Sequence[bytes]) -> list[TokenEvent]:
    """Return the events of payloads of `encode_events`, in their order."""
    return [
        TokenEvent(
            seq=f"{request}/{e.choice}",
            request=request,
            index=e.index,
            token=e.token,
            logprob=e.logprob,
            top=e.top,
            prompt_logprobs=e.prompt_logprobs,
            finish=e.finish,
            error=e.error,
            served=e.served,
            cached=e.cached,
        )
        for payload in payloads
        for e in _decoder.decode(payload)
    ]
