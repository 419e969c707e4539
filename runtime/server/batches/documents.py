"""Files, batches and lines of results as OpenAI's JSON. Pure functions."""

from __future__ import annotations

import json
from typing import Any

import msgspec
from blake3 import blake3

from runtime.queueing.batches import Status, StoredBatch
from runtime.queueing.files import StoredFile

Document = dict[str, Any]

#: Nanoseconds of a second.
SECOND = 1_000_000_000
#: Statuses with a time of their own in a batch's document.
_TIMED: tuple[Status, ...] = (
    "in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled",
)  # fmt: skip
#: Errors of lines that did not run.
EXPIRED = {"code": "batch_expired", "message": "The batch's time was over before this request was answered."}
CANCELLED = {"code": "batch_cancelled", "message": "The batch was cancelled before this request was answered."}


def derived(kind: str, *parts: str | int) -> str:
    """Return an id that depends on its parts only: a batch that is run again names everything as before."""
    return f"{kind}{blake3(json.dumps(parts).encode()).hexdigest(length=16)}"


def file_document(file: StoredFile) -> Document:
    """Return OpenAI's file object."""
    document: Document = {
        "id": file.id,
        "object": "file",
        "bytes": file.nbytes,
        "created_at": file.created // SECOND,
        "filename": file.name,
        "purpose": file.purpose,
        "status": "processed",
        "status_details": None,
    }
    return document if file.expires is None else document | {"expires_at": file.expires // SECOND}


def batch_document(batch: StoredBatch) -> Document:
    """Return OpenAI's batch object."""
    times = {f"{status}_at": batch.times[status] // SECOND if status in batch.times else None for status in _TIMED}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "errors": {"object": "list", "data": batch.errors} if batch.errors else None,
        "input_file_id": batch.input_file,
        "completion_window": batch.window,
        "status": batch.status,
        "output_file_id": batch.output_file,
        "error_file_id": batch.error_file,
        "created_at": batch.created // SECOND,
        "expires_at": batch.deadline // SECOND,
        **times,
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "metadata": batch.metadata,
    }


def answered_line(batch: str, line: int, custom_id: str, request: str, status: int, body: bytes) -> bytes:
    """Return a line of an output or error file: a request that was answered, with its status and body (JSON)."""
    response = {"status_code": status, "request_id": request, "body": msgspec.Raw(body)}
    return _line(batch, line, custom_id, response, None)


def unanswered_line(batch: str, line: int, custom_id: str, error: Document) -> bytes:
    """Return a line of an error file: a request that was not answered."""
    return _line(batch, line, custom_id, None, error)


def _line(batch: str, line: int, custom_id: str, response: Document | None, error: Document | None) -> bytes:
    name = derived("batch_req_", batch, line)
    return msgspec.json.encode({"id": name, "custom_id": custom_id, "response": response, "error": error}) + b"\n"
