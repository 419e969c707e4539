"""Chat templates render as in transformers; forbidden or unbounded operations are refused quickly, with a reason."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.frontend import chat_template, template_sandbox
from runtime.frontend.chat_template import MAX_SOURCE, ChatTemplate, TemplateRefused, chosen_template

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}

TEMPLATES = {
    "chatml": """{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nYou are helpful.<|im_end|>\\n' }}
    {% endif %}
{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}{% endif %}
""",
    "llama-2": """{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{%- set system_message = messages[0]['content'] %}
{%- else %}{% set loop_messages = messages %}{% set system_message = false %}{% endif %}{% for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{%- if loop.index0 == 0 and system_message != false %}
{%- set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
{%- else %}{% set content = message['content'] %}{% endif %}
{%- if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}""",
    "llama-3": """{{- bos_token }}
{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}{%- endif %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday: " ~ date_string ~ "\\n\\n" ~ system_message ~ "<|eot_id|>" }}
{%- if tools is not none %}{{- tools | tojson(indent=4) }}{%- endif %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
""",
    "zephyr": """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>
' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>
'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "mistral, system merged": """{%- if messages[0]["role"] == "system" %}{%- set system_message = messages[0]["content"] %}
{%- set rest = messages[1:] %}
{%- else %}{%- set rest = messages %}{%- endif %}
{%- set user_messages = rest | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{{- bos_token }}
{%- for message in rest %}
    {%- if message.role == "user" %}
        {%- set ns.index = ns.index + 1 %}
        {%- if ns.index == user_messages | length and system_message is defined %}
            {{- "[INST] " + system_message + "\\n\\n" + message["content"] + "[/INST]" }}
        {%- else %}{{- "[INST] " + message["content"] + "[/INST]" }}{%- endif %}
    {%- else %}{% generation %}{{- " " + message["content"]|trim + eos_token }}{% endgeneration %}{%- endif %}
{%- endfor %}""",
    "much of the language": """{% macro row(name, value='none') -%}{{ name|upper }}={{ value }};{%- endmacro %}
{% set found = [] %}{% set table = {'a': [1, 2], 'b': ("x", 3.5)} %}
{% for key, value in table|dictsort %}{{ row(key, value|join('-')) }}{% endfor %}{{ table|tojson }}{{ table.items()|list|length }}
{% for m in messages if m.role != 'system' %}{% if loop.index > 3 %}{% break %}{% endif %}{{ loop.cycle('odd', 'even') }} {{ loop.length }}
{{ m.content.split('a')|map('trim')|reject('equalto', '')|join('|') }}{{ m.content[:5]|replace('e', 'E') }}{{ m.content|length * 2 ** 3 }}
{% else %}empty{% endfor %}{% set block %}{{ '%s-%03d' % ('n', 7) }}{{ '{:>4}|{}'.format(1, 'b') }}{% endset %}{{ block|indent(2, true) }}
{{ 'many' if messages|selectattr('role', 'equalto', 'nobody') else 'few' }}{{ missing }}{{ ('ab' * 3)[1:4] }}{{ [3, 1, 2]|sort|sum + 1 }}
{{ range(5)|batch(2)|list }}{{ (messages|first).get('role', 'x') }}{{ messages|map(attribute='role')|unique|list }}{{ 7 // 2 ~ 7 % 4 }}
{{ '12345 %d 20240101 {}' % 12345678 }}{{ '12345 {} 99999%'.format(1234567) }}
{{ 'a<b>"é'|tojson }}{{ '' is none }}{{ messages is iterable }}{% filter upper %}abc{% endfilter %}{{ "%.2f"|format(2.5) }}""",
}

CONVERSATIONS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "system", "content": " Be short.\n"}, {"role": "user", "content": "hi"}],
    [
        {"role": "system", "content": "Be <b>kind</b>"}, {"role": "user", "content": "héllo 你好 {{ 1 }}"},
        {"role": "assistant", "content": " banana and a cat "}, {"role": "user", "content": "again"},
    ],
    [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
]  # fmt: skip


def theirs(source: str, messages: list[dict[str, str]], **more: Any) -> str | None:
    """Return what transformers renders, or None where the template raises an error."""
    from jinja2.exceptions import TemplateError
    from transformers.utils.chat_template_utils import render_jinja_template

    try:
        rendered, _ = render_jinja_template(
            [messages], chat_template=source, add_generation_prompt=True, **SPECIAL, **more
        )
    except TemplateError:
        return None
    return str(rendered[0])


def ours(source: str, messages: list[dict[str, str]], **more: Any) -> str | None:
    try:
        return ChatTemplate(source, SPECIAL).render(messages, **more)
    except TemplateRefused:
        return None


@pytest.mark.parametrize("messages", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_conversations_are_written_as_transformers_writes_them(name: str, messages: list[dict[str, str]]) -> None:
    assert ours(TEMPLATES[name], messages) == theirs(TEMPLATES[name], messages)


def test_each_template_writes_something() -> None:
    assert all(ours(source, CONVERSATIONS[0]) for source in TEMPLATES.values())
    assert ours(TEMPLATES["llama-2"], CONVERSATIONS[3]) is None


def test_tools_are_written_as_transformers_writes_them() -> None:
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object", "é": None}}}]
    assert ours(TEMPLATES["llama-3"], CONVERSATIONS[0], tools=tools) == theirs(
        TEMPLATES["llama-3"], CONVERSATIONS[0], tools=tools
    )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(TEMPLATES)), st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_any_content_is_written_as_transformers_writes_it(name: str, contents: list[str]) -> None:
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": content} for at, content in enumerate(contents)]
    assert ours(TEMPLATES[name], messages) == theirs(TEMPLATES[name], messages)


def test_messages_of_the_caller_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": "x"}]
    assert ours("{% set _ = messages[0].update({'content': 'y'}) %}{{ messages[0].content }}", messages) is None
    assert messages == [{"role": "user", "content": "x"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''['__class__'] }}{{ ''|attr('__class__')|attr('__mro__') }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ strftime_now.__globals__['json'] }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__ }}{{ self._TemplateReference__context }}",
    ],
)
def test_no_way_into_python(source: str) -> None:
    """Jinja2 gives an undefined value, or refuses."""
    with pytest.raises(TemplateRefused, match=r"unsafe|undefined|no attribute"):
        rendered = ChatTemplate(source, SPECIAL).render(CONVERSATIONS[0])
        raise TemplateRefused("undefined") if rendered in ("", "None") else AssertionError(rendered)


@pytest.mark.parametrize(
    "source", ["{% include '/etc/passwd' %}", "{% import 'os' as os %}", "{% extends '/etc/passwd' %}"]
)
def test_no_files(source: str) -> None:
    with pytest.raises(TemplateRefused, match="no loader"):
        ChatTemplate(source).render(CONVERSATIONS[0])


GROWING = "{%% set ns = namespace(v=%s) %%}{%% for i in range(60) %%}{%% set ns.v = %s %%}{%% endfor %%}{{ ns.v }}"


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10000000000 }}",
        "{{ [0] * 10000000000 }}",
        "{{ 10 ** 100000000 }}",
        "{{ '%10000000000d' % 1 }}",
        "{{ '%*d' % (1000000000, 1) }}",
        "{{ '{:>10000000000}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w=10000000000) }}",
        "{{ '%10000000000d'|format(1) }}",
        "{{ '%(a)010000000000d' % {'a': 1} }}",
        "{{ '{0:>{1}10000000}'.format(1, 1) }}",
        "{{ 'a'.center(10000000000) }}",
        "{{ 'a'|center(10000000000) }}",
        "{{ 'a'|indent(10000000000, true) }}",
        "{{ messages|tojson(indent=1000000000) }}",
        "{{ strftime_now('%1000000000d') }}",
        "{{ (5).to_bytes(1000000000) }}",
        GROWING % ("'a'", "ns.v ~ ns.v"),
        GROWING % ("'a'", "ns.v + ns.v"),
        GROWING % ("'a'", "ns.v|replace('a', 'aa')"),
        GROWING % ("'a'", "'%s%s' % (ns.v, ns.v)"),
        GROWING % ("'a'", "[ns.v, ns.v]|join"),
        GROWING % ("[1]", "[ns.v, ns.v]"),
        GROWING % ("[1]", "(ns.v, ns.v)"),
        GROWING % ("[1]", "{'a': ns.v, 'b': ns.v}"),
        GROWING % ("[1]", "dict(a=ns.v, b=ns.v)"),
        "{% set s = 'a' * 100000 %}{{ s.replace('', s) }}",
        "{% set s = 'a' * 100000 %}{{ s.join(s) }}",
        "{% set s = 'a' * 1000000 %}{{ range(99999)|join(s) }}",
        "{% set s = 'a' * 1000000 %}{{ range(99999)|map('replace', '1', s)|join }}",
        "{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}",
        "{% set x %}{% for i in range(99999) %}{{ 'a' * 1000000 }}{% endfor %}{% endset %}",
    ],
)
def test_no_value_and_no_output_takes_the_memory(source: str) -> None:
    with pytest.raises(TemplateRefused, match=r"more than|too many|too large|too far|bytes"):
        ChatTemplate(source).render(CONVERSATIONS[0])


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) %}{% for i in r %}{% for j in r if false %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(99999) %}{{ range(99999)|select('odd')|list|length }}{% endfor %}",
    ],
)
def test_no_template_runs_for_ever(monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.2)
    begun = time.thread_time()
    with pytest.raises(TemplateRefused, match="does not end"):
        ChatTemplate(source).render(CONVERSATIONS[0])
    assert time.thread_time() - begun < 2.0


def test_the_clock_is_each_rendering_s_own() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert [template.render(CONVERSATIONS[0]) for _ in range(3)] == [CONVERSATIONS[0][0]["content"]] * 3


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ f() }}", "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * (MAX_SOURCE + 1)]
)
def test_broken_templates_are_refused_in_one_line(source: str) -> None:
    with pytest.raises(TemplateRefused) as refused:
        ChatTemplate(source).render(CONVERSATIONS[0])
    assert str(refused.value) and "\n" not in str(refused.value)


def test_a_long_conversation_is_no_attack() -> None:
    messages = [{"role": ("user", "assistant")[at % 2], "content": "word " * 400} for at in range(500)]
    for source in TEMPLATES.values():
        assert ours(source, messages) is not None


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ("x", "x"),
        (None, None),
        ("", None),
        ([{"name": "a", "template": "y"}, {"name": "default", "template": "x"}], "x"),
        ({"default": "x"}, "x"),
        ([{"name": "a", "template": "y"}], None),
        (3, None),
    ],
)
def test_which_of_several(given: Any, chosen: str | None) -> None:
    assert chosen_template(given) == chosen


def test_threads_that_render_first_at_the_same_time_share_one_environment(monkeypatch) -> None:
    """Two environments would make each refuse the other's templates."""
    both, made = threading.Barrier(2), []

    class Counted(template_sandbox.BoundedEnvironment):
        def __init__(self) -> None:
            with suppress(threading.BrokenBarrierError):
                both.wait(0.2)
            made.append(self)
            super().__init__()

    monkeypatch.setattr(template_sandbox, "BoundedEnvironment", Counted)
    chat_template._made_environment.cache_clear()
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}")
    try:
        with ThreadPoolExecutor(2) as pool:
            texts = list(pool.map(lambda _: template.render([{"role": "user", "content": "hello"}]), range(2)))
    finally:
        chat_template._made_environment.cache_clear()
    assert texts == ["hello", "hello"] and len(made) == 1
