"""Errors in Anthropic's shape, for its routes."""

from __future__ import annotations

from typing import Any

from runtime.frontend.errors import RequestError

MESSAGES = "/v1/messages"
_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def has_message_errors(path: str) -> bool:
    """Return whether errors of a route have Anthropic's shape."""
    return path == MESSAGES or path.startswith(f"{MESSAGES}/")


def message_error(status: int, text: str) -> dict[str, Any]:
    """Return the document of an error with an HTTP status."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": text}}


def message_refusal(error: RequestError) -> dict[str, Any]:
    """Return the document of an error."""
    return message_error(error.status, str(error))
