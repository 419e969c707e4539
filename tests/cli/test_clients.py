"""Clients of other projects on `zoo serve`, unchanged: openai, LiteLLM, LangChain, instructor, llm, lm-eval.

The model's weights are random, so that answers have a form where one is asked for, and no sense. Plain answers that
must have text are greedy: a drawn one may end, or be special tokens alone, at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.checkpoints import make
from tests.cli.test_serve import Served, serving
from tests.cli.test_tools import FORMS, PARAMETERS, TEMPLATE
from zoo.api import Zoo

WHY = "A CLIENT IS NOT TESTED: the extra `clients` is not installed"
#: Tokens of an answer, and seeds that are tried until one ends.
MOST, SEEDS = 240, 10
TURNS: Any = [{"role": "user", "content": "go"}]
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
    for name in ("first", "second")
]


class Pet(BaseModel):
    """What answers are asked to be."""

    kind: Literal["cat", "dog"]
    legs: Literal[2, 4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("clients")
    make("llama", root / "base", max_position_embeddings=1024)
    config = root / "base" / "tokenizer_config.json"
    template = TEMPLATE.replace("FORM", FORMS["hermes"])
    config.write_text(json.dumps({**json.loads(config.read_text()), "chat_template": template}))
    return root / "base"


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with Zoo(folder.parent / "store") as zoo:
        zoo.ingest(folder, "base")
    with serving(folder.parent / "store", folder.parent / "log", "--queue", str(folder.parent / "queue")) as made:
        yield made


@pytest.fixture
def v1(served: Served) -> str:
    return f"{served.address}/v1"


def test_openais_client_parses_answers_into_types(served: Served) -> None:
    tool: Any = openai.pydantic_function_tool(Pet)
    more: Any = {"model": "base", "messages": TURNS, "max_tokens": MOST}
    one: Any = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    with served.client() as client:
        chat = whole(lambda seed: client.chat.completions.parse(**more, response_format=Pet, seed=seed))
        check(chat.choices[0].message.parsed)
        done = whole(lambda seed: client.responses.parse(
            model="base", input="go", text_format=Pet, max_output_tokens=MOST, extra_body={"seed": seed}
        ))  # fmt: skip
        check(done.output_parsed)
        called = whole(lambda seed: client.chat.completions.parse(**more, **one, seed=seed))
        check(called.choices[0].message.tool_calls[0].function.parsed_arguments)

        def streamed(seed: int) -> Any:
            with client.chat.completions.stream(**more, response_format=Pet, seed=seed) as stream:
                kinds = {event.type for event in stream}
                return kinds, stream.get_final_completion().choices[0].message.parsed

        kinds, found = whole(streamed)
        check(found)
        assert {"chunk", "content.delta", "content.done"} <= kinds


def test_litellm(v1: str, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # its prices of models are on another host
    litellm = pytest.importorskip("litellm", reason=WHY)
    server: Any = {"api_base": v1, "api_key": "k3y"}
    own: Any = {**server, "model": "openai/base", "messages": TURNS, "max_tokens": 8, "temperature": 0}
    done = litellm.completion(**own)
    assert done.choices[0].message.content and done.usage.completion_tokens > 0
    parts = list(litellm.completion(**own, stream=True, stream_options={"include_usage": True}))
    assert any(part.choices[0].delta.content for part in parts if part.choices)
    assert parts[-1].usage.completion_tokens <= 8
    later = asyncio.run(litellm.acompletion(**own))
    assert later.choices[0].finish_reason in ("length", "stop")
    long: Any = {**own, "max_tokens": MOST, "temperature": 1}

    def formed(seed: int) -> Pet:
        content = litellm.completion(**long, response_format=Pet, seed=seed).choices[0].message.content
        return Pet.model_validate_json(content)

    def called(seed: int) -> Any:
        answer = litellm.completion(**long, tools=TOOLS, tool_choice="required", seed=seed)
        return json.loads(answer.choices[0].message.tool_calls[0].function.arguments)

    check(whole(formed))
    assert whole(called)["x"] in (1, 2, "three")
    text = litellm.text_completion(
        **server, model="text-completion-openai/base", prompt="a", max_tokens=4, temperature=0
    )
    assert text.choices[0].text
    vectors = litellm.embedding(**server, model="openai/base", input=["a", "b"])
    assert len(vectors.data) == 2 and len(vectors.data[0]["embedding"]) == 64
    kept = litellm.responses(**server, model="openai/base", input="go", max_output_tokens=8)
    assert kept.status in ("completed", "incomplete") and kept.output[0].type == "message"
    message = litellm.completion(**{**own, "model": "anthropic/base", "api_base": served.address})
    assert message.choices[0].message.content
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**own, "model": "openai/nothing"})
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**{**own, "messages": [{"role": "user", "content": "a b" * 2000}]})


def test_langchain(v1: str) -> None:
    pytest.importorskip("langchain_openai", reason=WHY)
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

    @tool
    def weigh(kind: Literal["cat", "dog"]) -> int:
        """Weigh a pet."""
        return 3

    server: Any = {"base_url": v1, "api_key": "k3y", "model": "base"}
    chat = ChatOpenAI(**server, max_tokens=8, temperature=0)
    assert chat.invoke("go").usage_metadata["output_tokens"] > 0
    assert "".join(str(part.content) for part in chat.stream("go"))
    method: Literal["json_schema", "function_calling"]
    for method in ("json_schema", "function_calling"):

        def formed(seed: int, method: Any = method) -> Any:
            found = ChatOpenAI(**server, max_tokens=MOST, seed=seed).with_structured_output(Pet, method=method)
            return check(found.invoke("go"))

        whole(formed)

    def called(seed: int) -> Any:
        answer = (
            ChatOpenAI(**server, max_tokens=MOST, seed=seed).bind_tools([weigh], tool_choice="required").invoke("go")
        )
        assert answer.tool_calls and not answer.invalid_tool_calls
        return answer

    answer = whole(called)
    results = [ToolMessage(str(weigh.invoke(call["args"])), tool_call_id=call["id"]) for call in answer.tool_calls]
    assert results[0].content == "3"
    after = chat.bind_tools([weigh]).invoke([HumanMessage("go"), answer, *results])
    assert after.usage_metadata["input_tokens"] > answer.usage_metadata["input_tokens"]
    assert ChatOpenAI(**server, max_tokens=20, temperature=0, use_responses_api=True).invoke("go").content
    assert OpenAI(**server, max_tokens=4, temperature=0).invoke("go")
    # It counts tokens with a table that is on another host unless it is told not to.
    vectors = OpenAIEmbeddings(**server, check_embedding_ctx_length=False)
    assert len(vectors.embed_query("a")) == 64


def test_instructor(served: Served) -> None:
    instructor = pytest.importorskip("instructor", reason=WHY)
    for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
        with served.client() as plain:
            create = instructor.from_openai(plain, mode=mode).chat.completions.create
            more: Any = {"model": "base", "messages": TURNS, "response_model": Pet, "max_tokens": MOST}
            check(whole(lambda seed, create=create, more=more: create(**more, max_retries=0, seed=seed)))


def test_llm(v1: str, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason=WHY)
    lines = [f"- model_id: zoo\n  model_name: base\n  api_base: {v1}\n  api_key_name: zoo\n  supports_schema: true"]
    (tmp_path / "extra-openai-models.yaml").write_text("\n".join(lines))
    (tmp_path / "keys.json").write_text(json.dumps({"zoo": "k3y"}))
    # Without plugins: the package with the demo's weights is one, and lacks what it would run them by.
    run = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}

    def say(*words: str) -> str:
        command = [sys.executable, "-m", "llm", "-m", "zoo", "go", *words]
        done = subprocess.run(command, env=run, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    short = ("-o", "max_tokens", "8", "-o", "temperature", "0")
    assert say(*short).strip()
    assert say(*short, "--no-stream").strip()
    form = ("-o", "max_tokens", str(MOST), "--schema", json.dumps(Pet.model_json_schema()))
    check(whole(lambda seed: Pet.model_validate_json(say(*form, "-o", "seed", str(seed)))))


def test_lm_evals_client_finds_the_models_own_likelihoods(
    folder: Path, v1: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    pytest.importorskip("tenacity", reason=WHY)  # lm-eval's own extra `api`
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    monkeypatch.setenv("OPENAI_API_KEY", "k3y")
    pairs = [("def main", "():"), ("import", " functools as f"), ("a b c", " d")]
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    remote = LocalCompletionsAPI(
        base_url=f"{v1}/completions", model="base", tokenizer=str(folder), max_length=1024, batch_size=2
    )
    local = HFLM(pretrained=str(folder), device="cpu", dtype="float32")
    found, own = remote.loglikelihood(asked, disable_tqdm=True), local.loglikelihood(asked, disable_tqdm=True)
    for (score, greedy), (own_score, own_greedy) in zip(found, own, strict=True):
        assert score == pytest.approx(own_score, abs=2e-3) and greedy == own_greedy
    settings = {"until": ["\n"], "max_gen_toks": 6, "temperature": 0}
    texts = [Instance("generate_until", {}, ("def main", settings), 0)]
    assert remote.generate_until(texts, disable_tqdm=True) == local.generate_until(texts, disable_tqdm=True)


def whole(ask: Callable[[int], Any]) -> Any:
    """Return the first of a few answers that the client takes.

    Weights are random, so an answer may be cut by `max_tokens` in the middle of white space; clients refuse it then,
    each in its own way.
    """
    for seed in range(SEEDS):
        try:
            return ask(seed)
        except openai.APIStatusError:
            raise
        except Exception:
            if seed == SEEDS - 1:
                raise
    return None


def check(found: Any) -> Any:
    assert isinstance(found, Pet) and found.kind in ("cat", "dog") and found.legs in (2, 4)
    return found
