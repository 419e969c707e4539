"""Errors of a request, with the fields of OpenAI's error object.

A RequestError is an InputError: the command line prints it as one line, the server sends it with its status. Nothing
here depends on sockets; `status` is only a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zoo.errors import InputError

BAD_REQUEST = "invalid_request_error"


class RequestError(InputError):
    """`{"error": {"message", "type", "param", "code"}}` with an HTTP status.

    `retry_after` is in seconds, given where a retry may succeed.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = BAD_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """Return OpenAI's error document."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @classmethod
    def read(cls, status: int, body: Mapping[str, Mapping[str, Any]]) -> RequestError:
        """Return the error of a document of `body`."""
        told = body["error"]
        return cls(told["message"], status=status, kind=told["type"], param=told["param"], code=told["code"])


def in_other_fields(error: RequestError, names: Mapping[str, str]) -> RequestError:
    """Return an error that names a field by the name that the client gave it."""
    given = error.param
    if given is None or given not in names:
        return error
    message = str(error)
    if message.startswith(given):
        message = names[given] + message[len(given) :]
    return RequestError(
        message,
        status=error.status,
        kind=error.kind,
        param=names[given],
        code=error.code,
        retry_after=error.retry_after,
    )


def unsupported(field: str, reason: str) -> RequestError:
    """Return the error for a field that is recognized and refused."""
    return RequestError(f"{field} is not supported: {reason}", param=field, code="unsupported_parameter")


def too_long(prompt: int, answer: int, limit: int, param: str) -> RequestError:
    """Return the error for a prompt and answer that together exceed the model's context (all in tokens)."""
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + answer} tokens "
        f"({prompt} in the prompt, {answer} in the answer). Please reduce the length of the prompt or of the answer.",
        param=param,
        code="context_length_exceeded",
    )


def unknown_model(message: str) -> RequestError:
    """Return the error for a name that no served model has."""
    return RequestError(message, status=404, param="model", code="model_not_found")


def overloaded(message: str, retry_after: int = 1) -> RequestError:
    """Return the error for a server with too many sequences."""
    return RequestError(message, status=429, kind="rate_limit_exceeded", code="overloaded", retry_after=retry_after)


def unavailable(message: str, retry_after: int = 5) -> RequestError:
    """Return the error for a server that drains or an engine that died."""
    return RequestError(message, status=503, kind="service_unavailable", code="unavailable", retry_after=retry_after)
