"""From a chat body's tools to what the model is shown, what its answer may be, and how calls are read from it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from runtime.frontend.errors import RequestError, unsupported
from runtime.frontend.schemas import ChatBody, ChatMessage
from runtime.frontend.served_models import ServedModel
from runtime.frontend.structured import checked
from runtime.frontend.tools.bodies import NamedTool, Tool
from runtime.frontend.tools.calls import CallReader
from runtime.frontend.tools.formats import CallFormat, ToolSignature, calls_grammar, format_of
from runtime.grammars.checking import GrammarChecker
from runtime.grammars.limits import MAX_SCHEMA_CHARACTERS, GrammarRefused
from runtime.grammars.sources import checked_schema, from_schema


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of one request.

    Fields:
        shown: The tools, as templates take them.
        form, mark: How calls are written, and the token of the mark if it is special.
        several: Whether there may be several calls.
        grammar: Grammar of answers that must call a tool; empty where they need not.
    """

    shown: tuple[Mapping[str, Any], ...]
    form: CallFormat
    mark: int | None
    several: bool
    grammar: str

    def reader(self, name_id: Callable[[int], str]) -> CallReader:
        return CallReader(self.form, self.mark, name_id, self.several)


def tool_use(body: ChatBody, model: ServedModel, checker: GrammarChecker | None) -> ToolUse | None:
    """Return the tools of a request; None if it has none, or may not call them. Raises RequestError 400, 429."""
    tools, choice = body.tools or (), body.tool_choice
    if not tools:
        if choice is not None and choice not in ("none", "auto"):
            raise RequestError("tool_choice asks for a call, and there are no tools", param="tool_choice")
        return None
    if choice == "none":
        return None
    form = format_of(model.tokenizer)
    if form is None:
        raise unsupported("tools", "the model's chat template has no tools, or writes calls in a form that is not read")
    if len(json.dumps([tool.model_dump() for tool in tools])) > MAX_SCHEMA_CHARACTERS:
        raise RequestError(f"tools may have {MAX_SCHEMA_CHARACTERS:,} characters together", param="tools")
    mark = model.tokenizer.special_id(form.mark) if form.mark else None
    several, grammar = body.parallel_tool_calls is not False, ""
    if choice is not None and choice != "auto":
        functions = _callable(tools, choice)
        for function in functions:
            checked("tools", partial(from_schema, function.parameters), body, model, checker)
        grammar = calls_grammar(form, functions, several and choice == "required", mark)
    if grammar and body.response_format is not None and body.response_format.type != "text":
        raise RequestError("an answer is a call of a tool or has a format, not both", param="response_format")
    return ToolUse(tuple(_shown(tool) for tool in tools), form, mark, several, grammar)


def template_message(message: ChatMessage) -> dict[str, Any]:
    """Return a message in the form that templates expect: `developer` as `system`, arguments of calls as objects."""
    content = message.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text or "" for part in content)
    shown: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.tool_calls:
        shown["tool_calls"] = [
            {
                "id": call.id or "",
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
    for name in ("tool_call_id", "name"):
        if (value := getattr(message, name)) is not None:
            shown[name] = value
    return shown


def _arguments(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError("messages: the arguments of a call are a JSON object, as text", param="messages")
    return found


def _callable(tools: Sequence[Tool], choice: object) -> list[ToolSignature]:
    wanted = choice.function.name if isinstance(choice, NamedTool) else None
    found = [tool.function for tool in tools if wanted is None or tool.function.name == wanted]
    if not found:
        raise RequestError(f"tool_choice names {wanted!r}, which is no tool of this request", param="tool_choice")
    try:
        return [ToolSignature(one.name, _schema(one.parameters)) for one in found]
    except GrammarRefused as error:
        raise RequestError(f"tools: {error}", param="tools", code="unsupported_grammar") from None


def _schema(parameters: dict[str, Any] | None) -> dict[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    schema = checked_schema(parameters or {"properties": {}, "additionalProperties": False})
    return {"type": "object", **(schema if isinstance(schema, dict) else {})}


def _shown(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates take it: with a description and parameters, which some require."""
    function = tool.function
    parameters = function.parameters or {"type": "object", "properties": {}}
    described = {"name": function.name, "description": function.description or "", "parameters": parameters}
    return {"type": "function", "function": described}
