"""JSON responses, and errors in OpenAI's format or that of the route's API.

`_STATUS` is the single table from errors of `zoo.errors` to HTTP statuses. An unexpected exception becomes a 500 that
reveals no internals.
"""

from __future__ import annotations

import json
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from runtime.frontend.errors import RequestError
from runtime.server.answers.message_errors import has_message_errors, message_refusal
from zoo.errors import AmbiguousName, InputError, InUse, NameTaken, NotFound, StoreError, Unavailable, ZooError

#: First match wins: subclasses before their bases.
_STATUS: tuple[tuple[type[ZooError], int, str], ...] = (
    (NotFound, 404, "model_not_found"),
    (AmbiguousName, 404, "model_not_found"),
    (InUse, 409, "in_use"),
    (NameTaken, 409, "name_taken"),
    (Unavailable, 503, "unavailable"),
    (StoreError, 500, "store_error"),
    (InputError, 400, "invalid_input"),
)
_PHRASES = {404: "There is no such route.", 405: "This route does not take this method."}


def dump(document: Any) -> bytes:
    """Return compact JSON in UTF-8. Raises ValueError for NaN and infinity, which JSON does not have."""
    return json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def reply(document: Any, status: int = 200) -> Response:
    return Response(dump(document), status, media_type="application/json")


def error_reply(error: RequestError, path: str) -> Response:
    """Return the answer to a request of a path."""
    response = reply(message_refusal(error) if has_message_errors(path) else error.body(), error.status)
    if error.retry_after is not None:
        response.headers["Retry-After"] = str(error.retry_after)
    if error.status in (408, 413):  # the rest of the body is not going to be read
        response.headers["Connection"] = "close"
    if error.status == 401:
        response.headers["WWW-Authenticate"] = "Bearer"
    return response


def as_request_error(error: Exception) -> RequestError:
    """Return any exception as an error that can be sent."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, HTTPException):
        message = _PHRASES.get(error.status_code, str(error.detail))
        return RequestError(message, status=error.status_code, code="not_found" if error.status_code == 404 else None)
    for kind, status, code in _STATUS:
        if isinstance(error, kind):
            retry = 5 if status == 503 else None
            return RequestError(str(error), status=status, kind=_kind(status), code=code, retry_after=retry)
    return RequestError("The server failed on this request.", status=500, kind=_kind(500))


def _kind(status: int) -> str:
    return "invalid_request_error" if status < 500 else "service_unavailable" if status == 503 else "server_error"


async def handle(request: Request, error: Exception) -> Response:
    """FastAPI's handler for all exceptions."""
    response = error_reply(as_request_error(error), request.scope["path"])
    if isinstance(error, HTTPException) and error.headers:
        response.headers.update(error.headers)
    return response
