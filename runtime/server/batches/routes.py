"""The routes of files and batches, in OpenAI's shapes. They answer only on a server with `--queue`.

The docstrings of the handlers are part of `docs/http.md`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from urllib.parse import quote

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from runtime.frontend.errors import RequestError
from runtime.server.auth import principal
from runtime.server.batches.batch_service import BatchService, read_order
from runtime.server.batches.documents import batch_document, file_document
from runtime.server.batches.uploads import receive_file
from runtime.server.context import Service
from runtime.server.openai.paging import page_document, page_query
from runtime.server.openai.responses import reply
from runtime.server.request_body import read_body

_MOST_ORDER = 64 << 10
_MOST_KEY = 255
_READ_SECONDS = 60.0
#: Items of a page.
_MOST_FILES, _USUAL_BATCHES, _MOST_BATCHES = 10_000, 20, 100


class BatchRoutes:
    """The handlers that `app.routes_of` registers."""

    def __init__(self, service: Service) -> None:
        self._service = service
        #: None without a queue.
        self.batches: BatchService | None = None

    @property
    def _batches(self) -> BatchService:
        batches = self.batches
        if batches is None:
            message = "This server keeps no files and batches; start it with --queue DIR."
            raise RequestError(message, status=501, code="queue_off")
        return batches

    # -- files ---------------------------------------------------------------------------------------------------------

    async def upload(self, request: Request) -> Response:
        """Store a file: a form with `file`, `purpose` (`batch`), and maybe `expires_after[seconds]`."""
        batches = self._batches
        with self._service.gate.place():
            try:
                return reply(file_document(await receive_file(request, batches.files, principal(request))))
            except ClientDisconnect:
                return Response(status_code=499)

    async def list_files(self, request: Request) -> Response:
        """List files, the latest first; `?purpose=`, `?limit=` and `?after=` an id."""
        limit, after = page_query(request, _MOST_FILES, _MOST_FILES)
        found, more = await self._batches.files.page(
            principal(request), limit, after, request.query_params.get("purpose")
        )
        return reply(page_document([file_document(file) for file in found], more))

    async def show_file(self, request: Request) -> Response:
        """Show a file."""
        return reply(file_document(await self._batches.files.get(principal(request), request.path_params["id"])))

    async def file_content(self, request: Request) -> Response:
        """The bytes of a file."""
        batches = self._batches
        file = await batches.files.get(principal(request), request.path_params["id"])
        headers = {
            "Content-Length": str(file.nbytes),
            "Content-Disposition": f"attachment; filename*=utf-8''{quote(file.name, safe='')}",
        }
        body: AsyncIterator[bytes] = batches.files.content(file.id)
        return StreamingResponse(body, media_type="application/octet-stream", headers=headers)

    async def delete_file(self, request: Request) -> Response:
        """Remove a file; 409 while a batch reads it."""
        name = request.path_params["id"]
        await self._batches.files.delete(principal(request), name)
        return reply({"id": name, "object": "file", "deleted": True})

    # -- batches -------------------------------------------------------------------------------------------------------

    async def create_batch(self, request: Request) -> Response:
        """Run every line of a file: `input_file_id`, `endpoint`, `completion_window` such as `24h` or `30m`, and maybe
        `metadata`. With an `Idempotency-Key`, the same order is the same batch.
        """
        batches, key = self._batches, request.headers.get("idempotency-key")
        if key is not None and not 0 < len(key) <= _MOST_KEY:
            raise RequestError(f"An Idempotency-Key has 1 to {_MOST_KEY} characters.", code="invalid_idempotency_key")
        with self._service.gate.place():
            try:
                async with asyncio.timeout(_READ_SECONDS):
                    order = read_order(await read_body(request, _MOST_ORDER))
            except TimeoutError:
                raise RequestError("The body did not arrive in time.", status=408) from None
            except ClientDisconnect:
                return Response(status_code=499)
            self._service.admit(principal(request))
            return reply(batch_document(await batches.create(principal(request), order, key)))

    async def list_batches(self, request: Request) -> Response:
        """List batches, the latest first; `?limit=`, and `?after=` an id."""
        limit, after = page_query(request, _USUAL_BATCHES, _MOST_BATCHES)
        found, more = await self._batches.page(principal(request), limit, after)
        return reply(page_document([batch_document(batch) for batch in found], more))

    async def show_batch(self, request: Request) -> Response:
        """Show a batch: its status, its counts, and its files once it has ended."""
        return reply(batch_document(await self._batches.get(principal(request), request.path_params["id"])))

    async def cancel_batch(self, request: Request) -> Response:
        """Stop a batch; what is answered is in its output file."""
        return reply(batch_document(await self._batches.cancel(principal(request), request.path_params["id"])))
