"""The body of OpenAI's Responses API, and the chat that it stands for: its bounds are those of chat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.schemas import MAX_LOGPROBS, BodyPart, ChatShapedBody, ContentPart, Count
from runtime.frontend.tools.bodies import MAX_TOOLS, FunctionName

MAX_METADATA = 16
#: What `include` may name: log-probabilities, and what answers here have nothing of.
_LOGPROBS = "message.output_text.logprobs"
_INCLUDED = frozenset({"reasoning.encrypted_content", _LOGPROBS})
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_CALL, _RESULT = "function_call", "function_call_output"


class InputItem(BodyPart):
    """One item of an input: a message, a call that was answered before, or the result of one."""

    type: str | None = None
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[ContentPart] | None = None
    call_id: Annotated[str, Field(max_length=256)] | None = None
    name: FunctionName | None = None
    arguments: str | None = None
    output: str | list[ContentPart] | None = None

    @property
    def kind(self) -> str:
        return self.type or "message"

    def require_supported(self) -> None:
        if self.kind not in ("message", _CALL, _RESULT):
            raise unsupported("input", f"items of type {self.kind[:40]!r} cannot be read")
        needed = {
            "message": ("role", "content"),
            _CALL: ("call_id", "name", "arguments"),
            _RESULT: ("call_id", "output"),
        }
        for field in needed[self.kind]:
            if getattr(self, field) is None:
                raise RequestError(f"input: an item of type {self.kind} needs {field}", param="input")
        for part in (*_parts(self.content), *_parts(self.output)):
            if part.type not in _TEXT_PARTS:
                raise unsupported("input", f"content parts of type {part.type[:40]!r} cannot be read, only text")
            if part.text is None:
                raise RequestError("input: a text part needs a text", param="input")


class ResponseTool(BodyPart):
    """A tool; only functions are served. Its fields are those of a chat's function."""

    type: str
    name: FunctionName | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolChosen(BodyPart):
    """The choice of one function."""

    type: Literal["function"]
    name: FunctionName


class TextForm(BodyPart):
    """The requested form of the text, as a chat's `response_format`."""

    type: str
    name: str | None = None
    description: str | None = None
    schema_: Any = Field(default=None, alias="schema")
    strict: bool | None = None


class TextOptions(BodyPart):
    """Options of the text of an answer."""

    format: TextForm | None = None
    verbosity: str | None = None


class ResponseBody(ChatShapedBody):
    """POST /v1/responses."""

    expected: ClassVar[Mapping[str, str]] = {
        **BodyPart.expected,
        "input": "a string or a list of items",
        "output": "a string or a list of parts",
        "tool_choice": '"none", "auto", "required" or {"type": "function", "name"}',
    }
    chat_fields: ClassVar[Mapping[str, str]] = {
        "messages": "input",
        "max_tokens": "max_output_tokens",
        "max_completion_tokens": "max_output_tokens",
        "response_format": "text.format",
    }

    input: str | Annotated[list[InputItem], Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: Count | None = None
    text: TextOptions | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChosen | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Annotated[str, Field(max_length=128)] | None = None
    store: bool | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    include: list[str] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None
    reasoning: Any = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tool_calls: Count | None = None

    def require_supported(self) -> None:
        super().require_supported()
        for field, reason in self._refused():
            raise unsupported(field, reason)
        for item in self.items:
            item.require_supported()

    @property
    def items(self) -> Sequence[InputItem]:
        """The input as items."""
        return [InputItem(role="user", content=self.input)] if isinstance(self.input, str) else self.input

    def chat_values(self) -> dict[str, Any]:
        return {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            "tools": None if self.tools is None else [_chat_tool(tool) for tool in self.tools],
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._format(),
            **({"logprobs": True, "top_logprobs": self.top_logprobs} if self._wants_logprobs else {}),
        }

    @property
    def _wants_logprobs(self) -> bool:
        return _LOGPROBS in (self.include or ())

    def _refused(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that are known and cannot be honoured, with the reasons."""
        if self.max_tokens is not None:
            yield "max_tokens", "give max_output_tokens"
        if self.response_format is not None:
            yield "response_format", "give text.format"
        if self.n not in (None, 1):
            yield "n", "a response is one answer"
        if set(self.include or ()) - _INCLUDED:
            yield "include", "answers here have none of that"
        if self.top_logprobs and not self._wants_logprobs:
            yield "top_logprobs", f"give include: [{_LOGPROBS!r}], too"
        if self.truncation not in (None, "disabled"):
            yield "truncation", "an input is taken whole, or refused"
        if self.text is not None and self.text.verbosity not in (None, "medium"):
            yield "text.verbosity", "models here have no such setting"
        if self.background and self.store is False:
            yield "background", "a response runs there only if it is stored, too"
        for field, reason in (
            ("conversation", "give previous_response_id"),
            ("prompt", "prompts are not kept here: give instructions and input"),
            ("reasoning", "models here have no such setting"),
            ("max_tool_calls", "give parallel_tool_calls"),
        ):
            if getattr(self, field):
                yield field, reason
        for tool in self.tools or ():
            if tool.type != "function":
                yield "tools", f"only functions are served, no {tool.type[:40]!r}"
            elif tool.name is None:
                raise RequestError("tools: a function needs a name", param="tools")

    def _format(self) -> dict[str, Any] | None:
        if self.text is None or self.text.format is None:
            return None
        form = self.text.format
        schema = form.model_dump(include={"name", "description", "schema_", "strict"}, by_alias=True)
        return {"type": form.type} | ({"json_schema": schema} if form.type == "json_schema" else {})

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages: calls belong to the message of the assistant before them."""
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        held: dict[str, Any] | None = None
        for item in self.items:
            if item.kind == _CALL:
                held = held or {"role": "assistant", "content": None}
                function = {"name": item.name, "arguments": item.arguments}
                held.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})
                continue
            if held is not None:
                yield held
                held = None
            if item.kind == _RESULT:
                yield {"role": "tool", "tool_call_id": item.call_id, "content": _text(item.output)}
            elif item.role == "assistant":
                held = {"role": "assistant", "content": _text(item.content)}
            else:
                yield {"role": item.role, "content": _text(item.content)}
        if held is not None:
            yield held


def _parts(content: str | Sequence[ContentPart] | None) -> Sequence[ContentPart]:
    return () if content is None or isinstance(content, str) else content


def _text(content: str | Sequence[ContentPart] | None) -> str | list[dict[str, Any]]:
    """Return content as a chat's message has it."""
    if content is None or isinstance(content, str):
        return content or ""
    return [{"type": "text", "text": part.text} for part in content]


def _chat_tool(tool: ResponseTool) -> dict[str, Any]:
    return {"type": "function", "function": tool.model_dump(include={"name", "description", "parameters", "strict"})}


def _chat_choice(choice: str | ToolChosen | None) -> object:
    return {"type": "function", "function": {"name": choice.name}} if isinstance(choice, ToolChosen) else choice
