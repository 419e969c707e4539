"""How the families of models write calls: the mark before them, the key of the arguments, what stands between calls.

The family is told from the model's own chat template, which renders the tools and earlier calls. Formats as vLLM's
parsers of the same names read them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.grammars.sources import from_lark, quoted


class SpecialTokens(Protocol):
    """What is needed of a tokenizer (`runtime.frontend.tokenizer.Tokenizer`)."""

    @property
    def chat_source(self) -> str: ...

    def special_id(self, text: str) -> int | None: ...


@dataclass(frozen=True, slots=True)
class CallFormat:
    """A family's calls: `mark` `open` CALL `between` CALL `close`, with CALL as {"name": …, `key`: {…}}.

    Fields:
        mark: Text before the calls; empty if an answer that begins with { is a call.
        each: Whether the mark, `open` and `close` stand around each call, not around all of them.
    """

    name: str
    mark: str
    key: str
    open: str
    between: str
    close: str
    each: bool = False


HERMES = CallFormat("hermes", "<tool_call>", "arguments", "\n", "\n", "\n</tool_call>", each=True)
MISTRAL = CallFormat("mistral", "[TOOL_CALLS]", "arguments", "[", ", ", "]")
LLAMA = CallFormat("llama3_json", "", "parameters", "", "; ", "")


def format_of(tokenizer: SpecialTokens) -> CallFormat | None:
    """Return the format of a model's calls; None for a template that renders no tools, or in another format."""
    source = tokenizer.chat_source
    if "tools" not in source:
        return None
    if HERMES.mark in source and "<function=" not in source:
        return HERMES
    if MISTRAL.mark in source and "[ARGS]" not in source:
        return MISTRAL
    if "ipython" in source or "<|python_tag|>" in source:
        return LLAMA
    return None


@dataclass(frozen=True, slots=True)
class ToolSignature:
    """A function that may be called, and the JSON schema of its arguments."""

    name: str
    parameters: dict[str, Any] | bool


def calls_grammar(form: CallFormat, functions: Sequence[ToolSignature], parallel: bool, mark: int | None) -> str:
    """Return the grammar of answers that call at least one of these functions, in a family's format.

    `parallel`: whether there may be several calls; `mark`: the token of the mark, if that is special.
    """
    opening = f"<[{mark}]>" if mark is not None else quoted(form.mark) if form.mark else ""
    opening, closing = f"{opening} {quoted(form.open) if form.open else ''}", quoted(form.close) if form.close else ""
    one = f"{opening} call {closing}" if form.each else "call"
    many = f"{one} ({quoted(form.between)} {one})*" if parallel else one
    lines = [f"start: {many}" if form.each else f"start: {opening} {many} {closing}"]
    lines.append("call: " + " | ".join(f"call_{number}" for number in range(len(functions))))
    for number, function in enumerate(functions):
        head = quoted(f'{{"name": {json.dumps(function.name)}, "{form.key}": ')
        lines.append(f'call_{number}: {head} %json {json.dumps(function.parameters)} "}}"')
    return from_lark("\n".join(lines))
