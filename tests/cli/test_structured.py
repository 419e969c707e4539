"""Structured answers as clients get them: the examples of the guide, several processes, hostile requests."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.cli.test_serve import Served, serving

GUIDE = (Path(__file__).parents[2] / "docs" / "structured.md").read_text(encoding="utf-8")
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "legs"],
    "additionalProperties": False,
}
MESSAGES: Any = [{"role": "user", "content": "an animal"}]


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "form", "schema": schema}}


@pytest.fixture(scope="module")
def served(store: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(store, tmp_path_factory.mktemp("served") / "log") as made:
        yield made


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_examples_in_python_run(served: Served, number: int, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("python")[number]
    assert code.count('"http://127.0.0.1:8000/v1", api_key="-"') == 1
    code = code.replace('"http://127.0.0.1:8000/v1", api_key="-"', f'"{served.address}/v1", api_key="k3y"')
    exec(compile(code, "structured.md", "exec", dont_inherit=True), {})  # noqa: S102
    assert re.fullmatch(r"\{.*\}|cat|dog|[0-9]{3}-[0-9]{4}", capsys.readouterr().out.strip(), re.DOTALL)


def test_examples_with_curl_run(served: Served) -> None:
    for code in blocks("sh"):
        environment = {**os.environ, "ADDRESS": served.address, "KEY": "k3y", "no_proxy": "*"}
        out = subprocess.run(["sh", "-c", code], capture_output=True, text=True, env=environment, check=True).stdout
        assert json.loads(out)["choices"][0]["message"]["content"] in ("yes", "no")


@pytest.mark.parametrize(
    "arguments",
    [(), ("--agents", "2"), ("--queue", "queue", "--durable", "all")],
    ids=["one process", "agents", "durable"],
)
def test_all_kinds_on_both_routes(store: Path, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    given = [str(tmp_path / each) if each == "queue" else each for each in arguments]
    with serving(store, tmp_path / "log", *given) as served, served.client() as client:
        for model in ("base", "lora"):
            done = client.chat.completions.create(
                model=model, messages=MESSAGES, response_format=form(SCHEMA), max_tokens=200, n=3, seed=1
            )
            ended = [choice for choice in done.choices if choice.finish_reason == "stop"]
            assert ended, "no answer ended"
            for choice in ended:
                jsonschema.validate(json.loads(choice.message.content or ""), SCHEMA)
        text = {"model": "base", "prompt": "x", "max_tokens": 20}
        for extra, pattern in (
            ({"structured_outputs": {"regex": "[a-c]{4}"}}, "[a-c]{4}"),
            ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
            ({"structured_outputs": {"grammar": 'root ::= "<" [0-9] ">"'}}, "<[0-9]>"),
            ({"guided_choice": ["one", "two"]}, "one|two"),
            ({"guided_json": {"enum": ["one", 2]}}, '"one"|2'),
            ({"guided_grammar": 'start: "<" /[0-9]/ ">"'}, "<[0-9]>"),
        ):
            done = client.completions.create(**text, extra_body=extra, logprobs=2)
            assert re.fullmatch(pattern, done.choices[0].text) and done.choices[0].finish_reason == "stop", extra
            pieces = list(client.completions.create(**text, extra_body=extra, stream=True))
            assert re.fullmatch(pattern, "".join(piece.choices[0].text for piece in pieces)), extra


def test_a_stop_string_may_cut_an_answer(served: Served) -> None:
    with served.client() as client:
        done = client.completions.create(
            model="base", prompt="x", stop="b", max_tokens=20, extra_body={"guided_choice": ["abc"]}
        )
        assert (done.choices[0].text, done.choices[0].finish_reason) == ("a", "stop")


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"response_format": form({"not": {}})}, "response_format", "not"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "schema"),
        ({"response_format": {"type": "xml"}}, "response_format", "xml"),
        ({"guided_regex": "(?=a)b"}, "guided_regex", "look-around"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", "one form"),
        ({"guided_regex": "a", "min_tokens": 4}, "min_tokens", "guided_regex"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "guided_regex"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag", "supported"),
        ({"guided_choice": []}, "guided_choice", "choices"),
        ({"guided_json": {"$ref": "#"}}, "guided_json", "no text"),
    ],
)
def test_what_cannot_be_followed_is_refused(served: Served, fields: dict[str, Any], param: str, named: str) -> None:
    with httpx.Client(base_url=served.address, headers={"Authorization": "Bearer k3y"}, trust_env=False) as http:
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": MESSAGES})):
            response = http.post(f"/v1/{path}", json={"model": "base", "max_tokens": 9, **body, **fields})
            error = response.json()["error"]
            assert response.status_code == 400 and error["param"] == param and named in error["message"]


def test_a_model_that_takes_token_ids_only_has_no_text_to_constrain(served: Served) -> None:
    with served.client() as client, pytest.raises(openai.BadRequestError, match="tokenizer"):
        client.completions.create(model="bare", prompt=[5], max_tokens=3, extra_body={"guided_choice": ["a"]})


def test_hostile_grammars_are_refused_while_others_are_served(served: Served) -> None:
    """Half a kilobyte that unfolds into thousands of objects."""
    either = [[{"type": "object", "properties": {f"p{i}{j}": {}}} for j in range(4)] for i in range(6)]
    hostile = {"allOf": [{"anyOf": some} for some in either]}
    with served.client() as client:
        with pytest.raises(openai.BadRequestError, match="too much"):
            client.chat.completions.create(model="base", messages=MESSAGES, response_format=form(hostile))
        done = client.completions.create(
            model="base", prompt="x", max_tokens=20, extra_body={"guided_choice": ["one", "two"]}
        )
        assert done.choices[0].text in ("one", "two")
        headers = {"Authorization": "Bearer k3y"}
        metrics = httpx.get(f"{served.address}/metrics", headers=headers, trust_env=False).text
        assert 'blockzoo:grammars_checked_total{result="given_up"} 1.0' in metrics
