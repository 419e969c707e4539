"""A request that cannot be answered, in the terms of OpenAI's error object.

RequestError              an InputError: the command line prints it as one line, the server sends it with its status
Knows nothing of sockets; `status` is only a number here.
"""

from __future__ import annotations

from zoo.errors import InputError

BAD_REQUEST = "invalid_request_error"


class RequestError(InputError):
    """`{"error": {"message", "type", "param", "code"}}` with an HTTP status; `retry_after` in seconds where waiting
    helps.
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
        """The JSON document of OpenAI's error."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


def unsupported(field: str, reason: str) -> RequestError:
    """A field that this server understands and refuses."""
    return RequestError(f"{field} is not supported: {reason}", param=field, code="unsupported_parameter")


def too_long(prompt: int, answer: int, limit: int, param: str) -> RequestError:
    """Prompt and answer together do not fit the model's context (all in tokens)."""
    return RequestError(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + answer} tokens "
        f"({prompt} in the prompt, {answer} in the answer). Please reduce the length of the prompt or of the answer.",
        param=param,
        code="context_length_exceeded",
    )


def unknown_model(message: str) -> RequestError:
    """No served model of that name."""
    return RequestError(message, status=404, param="model", code="model_not_found")


def overloaded(message: str, retry_after: int = 1) -> RequestError:
    """Too many sequences are in the server at once."""
    return RequestError(message, status=429, kind="rate_limit_exceeded", code="overloaded", retry_after=retry_after)


def unavailable(message: str, retry_after: int = 5) -> RequestError:
    """The server drains, or its engine died."""
    return RequestError(message, status=503, kind="service_unavailable", code="unavailable", retry_after=retry_after)
