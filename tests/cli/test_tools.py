"""Tools through the real OpenAI client: the template shows them, answers call them, streams report them in parts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.checkpoints import make
from tests.cli.test_serve import Served, serving
from zoo.api import Zoo

#: What each family's template has in common with the models' own.
FORMS = {
    "hermes": '<tool_call>{"name", "arguments"}</tool_call>',
    "llama": '{"name", "parameters"} ipython',
    "mistral": '[TOOL_CALLS][{"name", "arguments"}]',
}
TEMPLATE = """{% for t in tools or [] %}{{ t.function.name }}{{ t.function.parameters.required | tojson }}{# FORM #}
{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}
{% for c in m.tool_calls or [] %}{{ c.function.name }}:{{ c.function.arguments.x }}{% endfor %}
{% endfor %}<assistant>"""
PARAMETERS: Any = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2, "three"]}},
    "required": ["x"],
    "additionalProperties": False,
}
GUIDE = (Path(__file__).parents[2] / "docs" / "tools.md").read_text(encoding="utf-8")
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("first", "second")
]
MESSAGES: Any = [{"role": "user", "content": "go"}]
CALL = {"hermes": '<tool_call>\n{"name": "first", "arguments": {"x": 2}}\n</tool_call>',
        "llama": '{"name": "first", "parameters": {"x": 2}}',
        "mistral": '[TOOL_CALLS][{"name": "first", "arguments": {"x": 2}}]'}  # fmt: skip


NOT_SERVED: Any = {"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}


def called(role: str, arguments: str) -> Any:
    return {"role": role, "content": "", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("tools")
    with Zoo(root / "store") as zoo:
        for name, form in (*FORMS.items(), ("base", FORMS["hermes"]), ("plain", "")):
            make("llama", root / name)
            config = root / name / "tokenizer_config.json"
            template = TEMPLATE.replace("FORM", form) if form else "{{ messages[0].content }}"
            config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
            zoo.ingest(root / name, name)
    with serving(root / "store", root / "log") as made:
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


def check(message: Any, names: tuple[str, ...] = ("first", "second")) -> None:
    assert message.content is None and message.tool_calls
    for call in message.tool_calls:
        assert call.type == "function" and re.fullmatch("call_[0-9a-f]{24}", call.id)
        assert call.function.name in names and json.loads(call.function.arguments)["x"] in (1, 2, "three")
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_that_must_call_a_tool_calls_one(client: openai.OpenAI, form: str) -> None:
    asked: Any = {"model": form, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150}
    done = client.chat.completions.create(
        **asked, tool_choice="required", parallel_tool_calls=False, n=3, seed=5, temperature=1
    )
    ended = [choice for choice in done.choices if choice.finish_reason == "tool_calls"]
    assert ended, [choice.finish_reason for choice in done.choices]
    for choice in ended:
        check(choice.message)
        assert len(choice.message.tool_calls or []) == 1
    named: Any = {"type": "function", "function": {"name": "second"}}
    one = client.chat.completions.create(**asked, tool_choice=named, n=3, seed=5).choices
    assert any(choice.finish_reason == "tool_calls" for choice in one)
    for choice in one:
        if choice.finish_reason == "tool_calls":
            check(choice.message, ("second",))


@pytest.mark.parametrize("form", FORMS)
def test_calls_of_an_answer_that_may_call_are_read_whole_and_in_parts(client: openai.OpenAI, form: str) -> None:
    asked: Any = {
        "model": form, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150, "seed": 3,
        "extra_body": {"guided_choice": [CALL[form]]},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason == "tool_calls" and whole.message.tool_calls is not None
    call = whole.message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("first", {"x": 2})
    with client.chat.completions.stream(**asked) as stream:
        events = list(stream)
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls" and not final.message.content
    assert final.message.tool_calls[0].function.arguments == call.function.arguments
    parts = [event for event in events if event.type == "tool_calls.function.arguments.delta"]
    assert len(parts) > 1, "the arguments came at once"


def test_text_is_content_where_a_call_is_not_needed(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        done = client.chat.completions.create(
            model="hermes", messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=20,
            extra_body={"guided_choice": ["no <tool> at all"]},
        ).choices[0]  # fmt: skip
        assert (done.message.content, done.message.tool_calls) == ("no <tool> at all", None)
        assert done.finish_reason == "stop"


def test_the_template_shows_tools_earlier_calls_and_their_results(client: openai.OpenAI) -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "first", "arguments": '{"x": 2}'}}
    turns: Any = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "result"},
    ]

    def asked(messages: Any, **more: Any) -> int:
        done = client.chat.completions.create(model="hermes", messages=messages, max_tokens=1, **more)
        return done.usage.prompt_tokens if done.usage else 0

    assert asked(MESSAGES, tools=TOOLS) > asked(MESSAGES, tools=TOOLS, tool_choice="none") == asked(MESSAGES)
    assert asked(turns) > asked(MESSAGES)


def test_the_example_of_the_guide_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)[0]
    assert code.count('"http://127.0.0.1:8000/v1", api_key="-"') == 1
    code = code.replace('"http://127.0.0.1:8000/v1", api_key="-"', f'"{served.address}/v1", api_key="k3y"')
    exec(compile(code, "tools.md", "exec", dont_inherit=True), {})  # noqa: S102
    assert capsys.readouterr().out.startswith("forecast {")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"model": "plain"}, "tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "third"}}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required", "tools": [NOT_SERVED]}, "tools"),
        ({"messages": [called("assistant", "[")]}, "messages"),
        ({"messages": [called("user", "{}")]}, "messages"),
    ],
)
def test_what_cannot_be_called_is_refused(client: openai.OpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            **{"model": "hermes", "messages": MESSAGES, "tools": TOOLS, "max_tokens": 5, **fields}
        )
    assert caught.value.param == param
