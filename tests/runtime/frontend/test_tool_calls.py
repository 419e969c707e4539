"""Calls of tools are read from answers in each family's form, however their text is cut into pieces."""

from __future__ import annotations

import random
from typing import Any

import pytest

from runtime.frontend.tools.calls import CallReader
from runtime.frontend.tools.formats import HERMES, LLAMA, MISTRAL, CallFormat, ToolSignature, calls_grammar
from runtime.grammars.checking import GrammarChecker

MARK = 7
Calls = list[tuple[str, str, str]]


def read(form: CallFormat, text: str, seed: int, mark: int | None = None, several: bool = True) -> tuple[str, Calls]:
    """Return content and calls (id, name, arguments) of a text in pieces; the mark's token comes with the first."""
    draw, reader = random.Random(seed), CallReader(form, mark, lambda number: f"id{number}", several)
    pieces = []
    while text:
        cut = draw.choice([1, 1, 2, 3, 9, 60])
        pieces.append(text[:cut])
        text = text[cut:]
    found = [reader.push(piece, [MARK] if mark and not at else []) for at, piece in enumerate(pieces)]
    calls: list[list[str]] = []
    found.append(reader.finish())
    for part in (part for one in found for part in one.parts):
        if part.name is not None:
            assert part.index == len(calls)
            calls.append([part.id or "", part.name, ""])
        calls[part.index][2] += part.arguments
    return "".join(one.content for one in found), [(a, b, c) for a, b, c in calls]


F, G = ("id0", "f", '{"a": "}\\"{", "b": [1, {"c": 2}]}'), ("id1", "g", "{}")


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (HERMES, f'Sure.\n<tool_call>\n{{"name": "f", "arguments": {F[2]}}}\n</tool_call>', "Sure.", [F]),
        (
            HERMES,
            f'<tool_call>\n{{"name": "f", "arguments": {F[2]}}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>\n',
            "",
            [F, G],
        ),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("id0", "f", '{"a": 1}')]),
        (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("id0", "f", '{"a": 1')]),
        (HERMES, "one <tool two\n", "one <tool two\n", []),
        (HERMES, "<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
        (LLAMA, f'{{"name": "f", "parameters": {F[2]}}}; {{"name": "g", "parameters": {{}}}}', "", [F, G]),
        (LLAMA, '{"color": "red"} it is', '{"color": "red"} it is', []),
        (LLAMA, 'Call {"name": "f", "parameters": {}}', 'Call {"name": "f", "parameters": {}}', []),
        (MISTRAL, '[TOOL_CALLS][{"name": "f", "arguments": {}}]', "", [("id0", "f", "{}")]),
    ],
)
def test_calls_and_content(form: CallFormat, text: str, content: str, calls: Calls) -> None:
    for seed in range(40):
        assert read(form, text, seed) == (content, calls)


def test_a_special_mark_is_no_part_of_the_text() -> None:
    text = f'[{{"name": "f", "arguments": {F[2]}}}, {{"name": "g", "arguments": {{}}}}]'
    for seed in range(20):
        assert read(MISTRAL, text, seed, mark=MARK) == ("", [F, G])
        assert read(MISTRAL, text, seed, mark=MARK, several=False) == ("", [F])
    reader = CallReader(MISTRAL, MARK, str)
    assert reader.push(text, []).content == text, "without its token a list is content"


POINT: Any = {
    "$defs": {"n": {"type": "integer"}},
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/n"}},
    "required": ["x"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("form", [HERMES, LLAMA, MISTRAL])
def test_answers_that_must_call_are_calls_that_can_be_read(form: CallFormat) -> None:
    functions = [
        ToolSignature("f", POINT),
        ToolSignature('g"h', {"type": "object", "properties": {}, "maxProperties": 0}),
    ]
    checker = GrammarChecker()
    grammar, single = (calls_grammar(form, functions, several, None) for several in (True, False))
    one = f'{{"name": "f", "{form.key}": {{"x": 12}}}}'
    both = [one, f'{{"name": "g\\"h", "{form.key}": {{}}}}']
    around = form.mark + form.open, form.close
    if form.each:
        texts = [form.between.join(f"{around[0]}{call}{around[1]}" for call in calls) for calls in ([one], both)]
    else:
        texts = [f"{around[0]}{form.between.join(calls)}{around[1]}" for calls in ([one], both)]
    assert all(checker.accepts(grammar, text) for text in texts)
    assert [checker.accepts(single, text) for text in texts] == [True, False]
    assert not checker.accepts(grammar, texts[0].replace("12", '"12"'))
    assert not checker.accepts(grammar, "no call")
    assert read(form, texts[1], 3) == ("", [("id0", "f", '{"x": 12}'), ("id1", 'g"h', "{}")])
