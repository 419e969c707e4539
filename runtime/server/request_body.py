"""Read a request's body within a size limit, and cancel work when the client disconnects.

Both work on ASGI messages alone and do not depend on the kind of request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from runtime.frontend.errors import RequestError

#: Seconds to receive a whole body; a slower client is answered with 408.
READ_SECONDS = 60.0


async def read_body(request: Request, limit: int) -> bytes:
    """Return the body, of at most `limit` bytes, received within `READ_SECONDS`.

    The limit is checked against Content-Length first and again while reading, since the header may be missing or wrong.
    Raises RequestError 408 or 413, starlette's ClientDisconnect.
    """
    try:
        async with asyncio.timeout(READ_SECONDS):
            return await _read(request, limit)
    except TimeoutError:
        raise RequestError("The body did not arrive in time.", status=408) from None


async def _read(request: Request, limit: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared[:20]) > limit:
        raise _too_large(limit)
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> RequestError:
    return RequestError(f"The body is larger than {limit} bytes.", status=413, code="body_too_large")


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[None]:
    """Run a block; when the client disconnects, cancel it and raise ClientDisconnect.

    Use it only after the body has been read: from then on the only message from `receive` is `http.disconnect`. One
    watcher task serves the whole request, which is cheaper than a task per step.
    """
    task = asyncio.current_task()
    if task is None:
        raise RuntimeError("there is no task to cancel")
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        # The task may have been cancelled for another reason at the same time (the server's shutdown): keep that one.
        if gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
