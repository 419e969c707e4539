"""OpenAI's Responses and Anthropic's Messages on `zoo serve` with a queue: tools, formats of the text, the guide."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.checkpoints import make
from tests.cli.test_serve import Served, serving
from tests.cli.test_tools import CALL, FORMS, PARAMETERS, TEMPLATE
from zoo.api import Zoo

GUIDE = (Path(__file__).parents[2] / "docs" / "apis.md").read_text(encoding="utf-8")
TOOLS: Any = [
    {"type": "function", "name": name, "description": "d", "parameters": PARAMETERS} for name in ("first", "second")
]
CHAT_TOOLS: Any = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}},
          "required": ["n"], "additionalProperties": False}  # fmt: skip


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("responses")
    with Zoo(root / "store") as zoo:
        make("llama", root / "base")
        config = root / "base" / "tokenizer_config.json"
        template = TEMPLATE.replace("FORM", FORMS["hermes"])
        config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
        zoo.ingest(root / "base", "base")
    with serving(root / "store", root / "log", "--queue", str(root / "queue")) as made:
        yield made


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with served.client() as made:
        yield made


def test_an_answer_that_must_call_a_tool_calls_one(client: openai.OpenAI) -> None:
    chosen: Any = {"type": "function", "name": "second"}
    calls: list[Any] = []
    for seed in range(6):
        done = client.responses.create(
            model="base", input="go", tools=TOOLS, tool_choice=chosen, max_output_tokens=150, extra_body={"seed": seed}
        )
        assert done.tool_choice.name == "second" and len(done.tools) == 2
        calls += done.output if done.status == "completed" else []
    assert calls, "no answer ended"
    for call in calls:
        assert (call.type, call.name, call.status) == ("function_call", "second", "completed")
        assert re.fullmatch("call_[0-9a-f]{24}", call.call_id) and call.id.startswith("fc_")
        assert json.loads(call.arguments)["x"] in (1, 2, "three")


def test_text_and_calls_are_items_in_their_order_whole_and_in_parts(client: openai.OpenAI) -> None:
    text = "so " + CALL["hermes"] + "\n" + CALL["hermes"].replace("first", "second")
    asked: Any = {"model": "base", "input": "go", "tools": TOOLS, "max_output_tokens": 200,
                  "extra_body": {"guided_choice": [text], "seed": 1}}  # fmt: skip
    whole = client.responses.create(**asked)
    assert [item.type for item in whole.output] == ["message", "function_call", "function_call"]
    assert whole.status == "completed" and whole.output_text == "so"
    assert [(call.name, json.loads(call.arguments)) for call in whole.output[1:]] == [
        ("first", {"x": 2}), ("second", {"x": 2})
    ]  # fmt: skip
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    final = events[-1].response
    strip = lambda item: {**item.model_dump(), "id": None, "call_id": None}  # noqa: E731
    assert [strip(item) for item in final.output] == [strip(item) for item in whole.output]
    for index, call in enumerate(final.output[1:], 1):
        own = [event for event in events if getattr(event, "output_index", None) == index]
        kinds = [event.type.removeprefix("response.") for event in own]
        assert kinds[0] == "output_item.added" and kinds[-2:] == ["function_call_arguments.done", "output_item.done"]
        parts = [event.delta for event in own if event.type == "response.function_call_arguments.delta"]
        assert "".join(parts) == own[-2].arguments == call.arguments and len(parts) > 1
        assert own[0].item.call_id == own[-1].item.call_id == call.call_id and own[0].item.arguments == ""
    with client.responses.stream(**asked) as stream:  # the client's own reading of the events
        assert [item.type for item in stream.get_final_response().output] == [
            "message",
            "function_call",
            "function_call",
        ]


def test_calls_and_their_results_are_turns_of_the_chat(client: openai.OpenAI) -> None:
    call: Any = {"id": "c", "type": "function", "function": {"name": "first", "arguments": '{"x": 2}'}}
    turns: Any = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "so", "tool_calls": [call]},
                  {"role": "tool", "tool_call_id": "c", "content": "result"}]  # fmt: skip
    chat = client.chat.completions.create(model="base", messages=turns, tools=CHAT_TOOLS, max_tokens=5, temperature=0)
    items: Any = [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "function_call", "call_id": "c", "name": "first", "arguments": '{"x": 2}'},
        {"type": "function_call_output", "call_id": "c", "output": "result"},
    ]
    done = client.responses.create(model="base", input=items, tools=TOOLS, max_output_tokens=5, temperature=0)
    assert done.output_text == chat.choices[0].message.content
    assert done.usage and chat.usage and done.usage.input_tokens == chat.usage.prompt_tokens


def test_the_text_has_the_form_that_is_asked_for(client: openai.OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "a", "schema": SCHEMA, "strict": True}}
    for seed in range(3):
        done = client.responses.create(
            model="base", input="go", text=form, max_output_tokens=60, extra_body={"seed": seed}
        )
        if done.status == "completed":
            assert 0 <= json.loads(done.output_text)["n"] <= 9
        assert done.output_text.lstrip().startswith("{") and done.text.format.type == "json_schema"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model="base", input="go", text=form, tools=TOOLS, tool_choice="required")
    assert caught.value.param == "text.format"


def test_messages_call_tools_by_blocks_whole_and_in_parts(served: Served) -> None:
    tools = [{"name": tool["name"], "input_schema": PARAMETERS} for tool in TOOLS]
    text = "so " + CALL["hermes"] + "\n" + CALL["hermes"].replace("first", "second")
    asked: Any = {"model": "base", "max_tokens": 200, "messages": [{"role": "user", "content": "go"}],
                  "tools": tools, "guided_choice": [text], "seed": 1}  # fmt: skip
    with httpx.Client(base_url=served.address, headers={"x-api-key": "k3y"}, timeout=60, trust_env=False) as http:
        whole = http.post("/v1/messages", json=asked).raise_for_status().json()
        stream = http.post("/v1/messages", json={**asked, "stream": True}).raise_for_status().text
        assert whole["stop_reason"] == "tool_use" and whole["content"][0] == {"type": "text", "text": "so"}
        calls = whole["content"][1:]
        assert [(call["type"], call["name"], call["input"]) for call in calls] == [
            ("tool_use", "first", {"x": 2}), ("tool_use", "second", {"x": 2})
        ]  # fmt: skip
        events = [json.loads(line[6:]) for line in stream.split("\n") if line.startswith("data: ")]
        begun = [event for event in events if event["type"] == "content_block_start"]
        assert [event["index"] for event in begun] == [0, 1, 2]
        assert begun[1]["content_block"]["name"] == "first" and begun[1]["content_block"]["input"] == {}
        for index in (1, 2):
            own = [event["delta"] for event in events if event.get("index") == index and "delta" in event]
            assert {part["type"] for part in own} == {"input_json_delta"} and len(own) > 1
            assert json.loads("".join(part["partial_json"] for part in own)) == {"x": 2}
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        called = {"role": "assistant", "content": [{"type": "text", "text": "so"}, {**calls[0], "id": "c"}]}
        result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "result"}]}
        turns = [*asked["messages"], called, result]
        count = http.post("/v1/messages/count_tokens", json={"model": "base", "messages": turns, "tools": tools})
        function = {"name": "first", "arguments": '{"x": 2}'}
        chat: Any = [
            {"role": "user", "content": "go"},
            {
                "role": "assistant",
                "content": "so",
                "tool_calls": [{"id": "c", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c", "content": "result"},
        ]
        bare = [{"type": "function", "function": {"name": tool["name"], "parameters": PARAMETERS}} for tool in TOOLS]
        same = http.post("/tokenize", json={"model": "base", "messages": chat, "tools": bare})
        assert count.raise_for_status().json()["input_tokens"] == same.raise_for_status().json()["count"] > 20
        must = {**asked, "tool_choice": {"type": "tool", "name": "second"}, "guided_choice": None}
        for seed in range(3):
            found = http.post("/v1/messages", json={**must, "seed": seed}).raise_for_status().json()
            assert [block["name"] for block in found["content"] if block["type"] == "tool_use"] == ["second"]
        form = {"format": {"type": "json_schema", "schema": SCHEMA}}
        formed = http.post("/v1/messages", json={**asked, "tools": [], "guided_choice": None, "output_config": form})
        assert formed.raise_for_status().json()["content"][0]["text"].lstrip().startswith("{")


def test_anthropics_own_client_reads_answers_streams_and_errors(
    served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    anthropic = pytest.importorskip("anthropic", reason="the extra `clients` is not installed")
    (code,) = [code for code in re.findall(r"^```python\n(.*?)^```", GUIDE, re.M | re.S) if "from anthropic" in code]
    address = '"http://127.0.0.1:8000", api_key="-"'
    assert code.count(address) == 1
    code = code.replace(address, f'"{served.address}", api_key="k3y"')
    exec(compile(code, "apis.md", "exec", dont_inherit=True), {})  # noqa: S102
    assert "msg_" in capsys.readouterr().out
    client = anthropic.Anthropic(base_url=served.address, api_key="k3y", max_retries=0)
    turns: Any = [{"role": "user", "content": "go"}]
    assert client.messages.count_tokens(model="base", messages=turns).input_tokens > 3
    with pytest.raises(anthropic.NotFoundError) as missing:
        client.messages.create(model="nothing", max_tokens=3, messages=turns)
    assert missing.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=served.address, api_key="x", max_retries=0).messages.count_tokens(
            model="base", messages=turns
        )
    tools: Any = [{"name": tool["name"], "input_schema": PARAMETERS} for tool in TOOLS]
    with client.messages.stream(
        model="base", max_tokens=200, messages=turns, tools=tools, extra_body={"guided_choice": [CALL["hermes"]]}
    ) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use" and final.content[0].input == {"x": 2}


def test_the_guide_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    found = re.findall(r"^```python\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
    for code, shown in zip([code for code in found if "from openai" in code], ("resp_", "omplete", "0."), strict=True):
        address = '"http://127.0.0.1:8000/v1", api_key="-"'
        assert code.count(address) == 1
        code = code.replace(address, f'"{served.address}/v1", api_key="k3y"')
        exec(compile(code, "apis.md", "exec", dont_inherit=True), {})  # noqa: S102
        assert shown in capsys.readouterr().out
