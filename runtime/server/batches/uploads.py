"""Receive a file of a form, and store it while it arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request

from runtime.frontend.errors import RequestError
from runtime.queueing.files import StoredFile
from runtime.server.batches.file_store import FileStore, FileUpload
from runtime.server.batches.multipart import FormPart, MultipartParser, boundary_of

#: Seconds between two pieces of a body.
_READ_SECONDS = 60.0
_MOST_FIELD = 4096
_MOST_NAME = 255
_LEAST_KEEP, _MOST_KEEP = 3600, 30 * 86400
_PURPOSE = "batch"


async def receive_file(request: Request, store: FileStore, principal: str) -> StoredFile:
    """Store the file of a form and return it. Raises RequestError, ClientDisconnect, StoreError; then nothing stays."""
    parser = MultipartParser(boundary_of(request.headers.get("content-type", "")))
    _check_length(request, store)
    fields: dict[str, bytearray] = {}
    name: str | None = None
    part: FormPart | None = None
    async with store.writing(principal, _PURPOSE) as upload:
        async for data in _pieces(request):
            for found in parser.feed(data):
                if isinstance(found, FormPart):
                    part = found
                    if part.name == "file":
                        if name is not None:
                            raise RequestError("The form has more than one file.", param="file")
                        name = (part.filename or "file")[:_MOST_NAME]
                    elif part.name not in fields:
                        fields[part.name] = bytearray()
                elif part is not None:
                    await _take(part, found, upload, fields)
        if not parser.ended:
            raise RequestError("The form is not complete.", code="invalid_form")
        if name is None:
            raise RequestError("The form needs a file.", param="file")
        purpose = fields.get("purpose", b"").decode("utf-8", "replace")
        if purpose != _PURPOSE:
            raise RequestError(f"purpose must be {_PURPOSE}", param="purpose", code="invalid_purpose")
        return await upload.complete(name, _keep_seconds(fields))


async def _take(part: FormPart, data: bytes, upload: FileUpload, fields: dict[str, bytearray]) -> None:
    if part.name == "file":
        await upload.write(data)
        return
    field = fields[part.name]
    field += data
    if len(field) > _MOST_FIELD:
        raise RequestError(f"{part.name[:60]} is too long", param=part.name[:60])


async def _pieces(request: Request) -> AsyncIterator[bytes]:
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(_READ_SECONDS):
                data = await anext(stream, None)
        except TimeoutError:
            raise RequestError("The body did not arrive in time.", status=408) from None
        if data is None:
            return
        yield data


def _check_length(request: Request, store: FileStore) -> None:
    """Refuse a body that is too large before it is read, if it says so."""
    declared, most = request.headers.get("content-length", ""), store.limits.file_bytes
    if declared.isdigit() and int(declared[:20]) > most + (1 << 20):
        raise RequestError(f"The file is larger than {most} bytes.", status=413, code="file_too_large")


def _keep_seconds(fields: dict[str, bytearray]) -> int | None:
    given = fields.get("expires_after[seconds]")
    if given is None:
        return None
    if not given.isdigit() or not _LEAST_KEEP <= int(given[:12]) <= _MOST_KEEP:
        raise RequestError(
            f"expires_after[seconds] is a number from {_LEAST_KEEP} to {_MOST_KEEP}", param="expires_after"
        )
    return int(given)
