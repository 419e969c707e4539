"""Reading a request's body within bounds, and noticing when its client leaves.

Both work on ASGI's messages alone. Knows nothing of what is asked or answered.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from runtime.frontend.errors import RequestError


async def read_body(request: Request, limit: int) -> bytes:
    """The body, of at most `limit` bytes: checked against Content-Length first, then while reading, for it may be
    missing or wrong.

    Raises RequestError 413, starlette's ClientDisconnect.
    """
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
    """Run a block until the client leaves: then the block is cancelled where it waits, and ClientDisconnect is raised.

    For after the body has been read: `receive` then says nothing until the client leaves. Cheaper than a task per step:
    one watcher per request.
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
        # Another may have cancelled the task at the same time (the server's shutdown): that one's wish is kept.
        if gone and task.uncancel() == 0:
            raise ClientDisconnect from None
        raise
    finally:
        watcher.cancel()
