"""The bodies of Anthropic's Messages, and the chat that they stand for: their bounds are those of chat."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.schemas import (
    MAX_STOPS,
    BodyPart,
    ChatShapedBody,
    ContentPart,
    Count,
    StopText,
    UserName,
)
from runtime.frontend.tools.bodies import MAX_TOOLS, FunctionName

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class ContentBlock(BodyPart):
    """A block of a turn: text, a call of a tool, or the result of one."""

    type: str
    text: str | None = None
    id: Annotated[str, Field(max_length=256)] | None = None
    name: FunctionName | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Annotated[str, Field(max_length=256)] | None = None
    content: str | list[ContentPart] | None = None

    def require_supported(self) -> None:
        needed = {"text": ("text",), "tool_use": ("id", "name", "input"), "tool_result": ("tool_use_id",)}
        if self.type not in needed:
            raise _unread(self.type)
        for field in needed[self.type]:
            if getattr(self, field) is None:
                raise RequestError(f"messages: a block of type {self.type} needs {field}", param="messages")
        for part in self.content if isinstance(self.content, list) else ():
            if part.type != "text" or part.text is None:
                raise _unread(part.type)


class Turn(BodyPart):
    """One turn of a conversation."""

    role: Literal["user", "assistant"]
    content: str | list[ContentBlock]

    def require_supported(self) -> None:
        for block in self.blocks:
            block.require_supported()
            if block.type != "text" and (block.type == "tool_use") != (self.role == "assistant"):
                raise RequestError(f"messages: the {self.role} has no blocks of type {block.type}", param="messages")

    @property
    def blocks(self) -> Sequence[ContentBlock]:
        return (ContentBlock(type="text", text=self.content),) if isinstance(self.content, str) else self.content


class MessageTool(BodyPart):
    """A tool that the client runs. `input_schema`: JSON schema of its input."""

    type: str | None = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class MessageToolChoice(BodyPart):
    """What the answer may or must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool | None = None


class MessageMetadata(BodyPart):
    """Facts about a request."""

    user_id: UserName | None = None


class OutputForm(BodyPart):
    """The form of an answer."""

    type: str
    schema_: Any = Field(default=None, alias="schema")


class OutputConfig(BodyPart):
    """Options of an answer."""

    format: OutputForm | None = None
    effort: str | None = None


class MessagePromptBody(ChatShapedBody):
    """POST /v1/messages/count_tokens: a conversation."""

    expected: ClassVar[Mapping[str, str]] = {
        **BodyPart.expected,
        "content": "a string or a list of blocks",
        "system": "a string or a list of blocks of text",
    }
    chat_fields: ClassVar[Mapping[str, str]] = {"response_format": "output_config", "stop": "stop_sequences"}

    messages: Annotated[list[Turn], Field(min_length=1)]
    system: str | list[ContentPart] | None = None
    tools: Annotated[list[MessageTool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: MessageToolChoice | None = None
    thinking: Any = None
    output_config: OutputConfig | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None

    def require_supported(self) -> None:
        super().require_supported()
        for field, reason in self._refused():
            raise unsupported(field, reason)
        for turn in self.messages:
            turn.require_supported()
        if self.messages[-1].role == "assistant":
            raise unsupported("messages", "the last turn is the user's: answers here begin a turn")
        for part in self.system if isinstance(self.system, list) else ():
            if part.type != "text" or part.text is None:
                raise RequestError("system: only blocks of text can be read", param="system")
        if self.tool_choice is not None and (self.tool_choice.type == "tool") != (self.tool_choice.name is not None):
            raise RequestError("tool_choice: the type tool goes with a name", param="tool_choice")

    def chat_values(self) -> dict[str, Any]:
        choice = self.tool_choice
        return {
            "messages": list(self._messages()),
            "tools": [_chat_tool(tool) for tool in self.tools or ()] or None,
            "tool_choice": None if choice is None else _chat_choice(choice),
            "parallel_tool_calls": None if choice is None else not choice.disable_parallel_tool_use,
            "response_format": self._format(),
        }

    def _refused(self) -> Iterator[tuple[str, str]]:
        """Yield the fields that are known and cannot be honoured, with the reasons."""
        for field, instead in (("stop", "stop_sequences"), ("response_format", "output_config")):
            if getattr(self, field) is not None:
                yield field, f"give {instead}"
        if self.n not in (None, 1):
            yield "n", "a message is one answer"
        if self.thinking and (not isinstance(self.thinking, dict) or self.thinking.get("type") != "disabled"):
            yield "thinking", "models here have no such setting"
        for field in ("container", "mcp_servers", "context_management"):
            if getattr(self, field):
                yield field, "the client runs tools and keeps the conversation"
        if self.output_config is not None and self.output_config.effort is not None:
            yield "output_config.effort", "models here have no such setting"
        for tool in self.tools or ():
            if tool.type not in (None, "custom"):
                yield "tools", f"the client runs them: none of type {tool.type[:40]!r} is there"

    def _format(self) -> dict[str, Any] | None:
        form = None if self.output_config is None else self.output_config.format
        if form is None:
            return None
        return {"type": form.type, "json_schema": {"schema": form.schema_}}

    def _messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            text = self.system if isinstance(self.system, str) else _text(self.system)
            yield {"role": "system", "content": text}
        for turn in self.messages:
            yield from _of_assistant(turn) if turn.role == "assistant" else _of_user(turn)


class MessageBody(MessagePromptBody):
    """POST /v1/messages."""

    max_tokens: Count
    stop_sequences: Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    metadata: MessageMetadata | None = None

    @property
    def end_user(self) -> str | None:
        return (None if self.metadata is None else self.metadata.user_id) or super().end_user

    def chat_values(self) -> dict[str, Any]:
        return super().chat_values() | {"stop": self.stop_sequences}


def _of_user(turn: Turn) -> Iterator[dict[str, Any]]:
    """Yield the messages of a turn: each result of a tool is one, and so is the text between them."""
    held: list[ContentBlock] = []
    for block in turn.blocks:
        if block.type == "text":
            held.append(block)
            continue
        if held:
            yield {"role": "user", "content": _text(held)}
            held = []
        content = block.content if isinstance(block.content, str) else _text(block.content or ())
        yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    if held:
        yield {"role": "user", "content": _text(held)}


def _of_assistant(turn: Turn) -> Iterator[dict[str, Any]]:
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
        }
        for block in turn.blocks
        if block.type == "tool_use"
    ]
    text = _text([block for block in turn.blocks if block.type == "text"])
    yield {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _text(parts: Sequence[ContentPart] | Sequence[ContentBlock]) -> str | list[dict[str, Any]]:
    """Return texts as a chat's message has them."""
    if len(parts) == 1:
        return parts[0].text or ""
    return [{"type": "text", "text": part.text} for part in parts]


def _chat_tool(tool: MessageTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _chat_choice(choice: MessageToolChoice) -> object:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name}}
    return _CHOICES[choice.type]


def _unread(kind: str) -> RequestError:
    return unsupported("messages", f"blocks of type {kind[:40]!r} cannot be read, only text, tool_use, tool_result")
