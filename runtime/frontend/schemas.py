"""Pydantic models of the bodies of OpenAI's two generating endpoints: shapes, types and bounds.

The bodies of other endpoints (`runtime.frontend.apis`) are built on these, so that every bound is stated once.

- Unknown fields are ignored: clients send new ones before servers support them.
- Known fields that cannot be honoured exactly are refused with the reason.
- Types are never coerced (`"5"` is not a number). NaN and infinity are refused.

Parsing is one pass over the bytes with a bounded depth. Checks that depend on a model are in `assemble`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.tools.bodies import MAX_TOOLS, CalledTool, NamedTool, Tool

MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGPROBS = 20
MAX_BIASES = 1024
_INT64 = 2**63

Count = Annotated[int, Field(ge=0, lt=_INT64)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
_Penalty = Annotated[float, Field(ge=-2.0, le=2.0)]
UserName = Annotated[str, Field(max_length=512)]
StopText = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]


Prompts = (
    str | TokenIds | Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]
)


class BodyPart(BaseModel):
    """A body, or an object in one."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True, protected_namespaces=())

    #: Error texts for fields with several allowed types, where pydantic would report one error per alternative.
    expected: ClassVar[Mapping[str, str]] = {
        "prompt": "a string, a list of strings, a list of token ids, or a list of such lists",
        "stop": f"a string or a list of at most {MAX_STOPS} strings",
        "content": "a string or a list of parts",
        "tool_choice": '"none", "auto", "required" or {"type": "function", "function": {"name"}}',
    }

    def require_supported(self) -> None:
        """Raise RequestError 400 for a field that is known and cannot be honoured."""


class StreamOptions(BodyPart):
    """Options of a stream."""

    include_usage: bool | None = None


class JsonSchemaFormat(BodyPart):
    """A schema that answers follow. They follow it exactly, whether `strict` or not."""

    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BodyPart):
    """The requested format: text, json_object, json_schema."""

    type: str
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(BodyPart):
    """vLLM's form of the same: one of the first five."""

    json_: Any = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None


class ServedBody(BodyPart):
    """Fields of all endpoints that run a model. None means not given (clients also send null for that)."""

    model: str
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    slo_ms: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    ttft_slo_ms: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    adaptive: bool | None = None
    early_exit: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    user: UserName | None = None
    safety_identifier: UserName | None = None

    @property
    def end_user(self) -> str | None:
        """The client's own name of its user: an alias of several models keeps to one for each."""
        return self.safety_identifier or self.user


class GeneratingBody(ServedBody):
    """Fields of all generating endpoints."""

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, lt=_INT64)] | None = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100.0, le=100.0)]] | None = Field(
        default=None, max_length=MAX_BIASES
    )
    response_format: ResponseFormat | None = None
    # Beyond OpenAI, with vLLM's names.
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0.0, le=1.0)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0.0, le=100.0)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[TokenIds, Field(max_length=MAX_STOPS)] | None = None
    return_token_ids: bool | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        return tuple(stop for stop in given if stop)

    @property
    def usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def require_supported(self) -> None:
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options needs stream to be true", param="stream_options")


class CompletionBody(GeneratingBody):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: Count | None = None
    suffix: str | None = None

    def require_supported(self) -> None:
        super().require_supported()
        if self.suffix is not None:
            raise unsupported("suffix", "models here write forward only")
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise unsupported("best_of", "leave it out, or give it the value of n")


class ContentPart(BodyPart):
    """A part of a message; only text is supported."""

    type: str
    text: str | None = None


class ChatMessage(BodyPart):
    """One turn of a conversation. `tool_call_id`: the call that a message of a tool answers."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: Annotated[list[CalledTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    name: Annotated[str, Field(max_length=256)] | None = None
    function_call: Any = None
    audio: Any = None

    def require_supported(self) -> None:
        if self.role == "function" or self.function_call:
            raise unsupported("messages", "give tool_calls, and messages of the role tool")
        if self.tool_calls and self.role != "assistant":
            raise RequestError("messages: only the assistant calls tools", param="messages")
        for part in self.content if isinstance(self.content, list) else ():
            if part.type not in ("text", "input_text") or self.audio:
                raise unsupported("messages", f"content parts of type {part.type[:40]!r} cannot be read, only text")
            if part.text is None:
                raise RequestError("messages: a text part needs a text", param="messages")


class ChatBody(GeneratingBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    functions: Any = None
    audio: Any = None
    modalities: list[str] | None = None

    def require_supported(self) -> None:
        super().require_supported()
        if self.functions:
            raise unsupported("functions", "give tools")
        if self.audio or any(kind != "text" for kind in self.modalities or ()):
            raise unsupported("audio" if self.audio else "modalities", "models here write text only")
        for message in self.messages:
            message.require_supported()


class ChatShapedBody(GeneratingBody):
    """A body in another API's shape, that stands for a chat."""

    #: The field of this body by the field of a chat.
    chat_fields: ClassVar[Mapping[str, str]] = {}

    def chat(self) -> ChatBody:
        """Return the chat, which has every bound checked. Raises RequestError 400."""
        shared = {name: getattr(self, name) for name in GeneratingBody.model_fields}
        return rebuilt(ChatBody, shared | self.chat_values())

    def chat_values(self) -> dict[str, Any]:
        """Return the fields of the chat that are not this body's of the same names."""
        raise NotImplementedError


B = TypeVar("B", bound=BodyPart)


def parse(kind: type[B], raw: bytes) -> B:
    """Return the parsed body. Raises RequestError 400 that names the first wrong field."""
    return _checked(kind, lambda: kind.model_validate_json(raw))


def rebuilt(kind: type[B], values: Mapping[str, Any]) -> B:
    """Return a body of parsed values, checked as `parse` does. Raises RequestError 400."""
    return _checked(kind, lambda: kind.model_validate(values))


def _checked(kind: type[B], make: Callable[[], B]) -> B:
    try:
        body = make()
    except ValidationError as error:
        raise _refusal(kind, error) from None
    body.require_supported()
    return body


def _refusal(kind: type[BodyPart], error: ValidationError) -> RequestError:
    """Return a one-line error about the first problem. It never repeats the input, which may be large or secret."""
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = [str(part) for part in first["loc"]]
    if not where:
        return RequestError(f"the body is no JSON object: {first['msg']}", code="invalid_json")
    field = next((part for part in reversed(where) if part in kind.expected), None)
    if field is not None:
        return RequestError(f"{field} must be {kind.expected[field]}", param=where[0])
    path = ".".join(where)
    message = f"{path} is required" if first["type"] == "missing" else f"{path}: {first['msg']}"
    return RequestError(message, param=where[0])
