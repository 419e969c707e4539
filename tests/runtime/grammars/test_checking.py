"""Grammars of clients: what they accept, and what is refused before anything runs."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from runtime.grammars.checking import GrammarChecker, GrammarsBusy
from runtime.grammars.limits import MAX_SCHEMA_DEPTH, GrammarRefused
from runtime.grammars.sources import from_choices, from_grammar, from_regex, from_schema


@pytest.fixture(scope="module")
def checker() -> Iterator[GrammarChecker]:
    made = GrammarChecker()
    yield made
    made.close()


def refused(checker: GrammarChecker, make: Callable[[], str]) -> str:
    with pytest.raises(GrammarRefused) as caught:
        checker.check(make())
    return str(caught.value)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("make", "good", "bad"),
    [
        (lambda: from_schema(PERSON), ['{"name": "é", "age": 3}', '{"name":""}'], ["{}", '{"name": 1}', '{"age": 3}']),
        (lambda: from_schema('{"enum": [1, "a"]}'), ["1", '"a"'], ["2", "a"]),
        (lambda: from_regex("^ab?c$"), ["abc", "ac"], ["xabc", "abcd", ""]),
        (lambda: from_regex("a|bc"), ["a", "bc"], ["ab", "ac"]),
        (lambda: from_choices(["yes", 'n"o\n', "\\d"]), ["yes", 'n"o\n', "\\d"], ["no", "1", "yesyes"]),
        (lambda: from_grammar('root ::= "a" tail\ntail ::= [0-9]+'), ["a1", "a123"], ["a", "1"]),
        (lambda: from_grammar('start: "a" B\nB: /[0-9]+/'), ["a1"], ["a"]),
    ],
)
def test_a_grammar_accepts_its_texts_and_no_others(
    checker: GrammarChecker, make: Callable[[], str], good: list[str], bad: list[str]
) -> None:
    grammar = make()
    checker.check(grammar)
    assert [text for text in good if not checker.accepts(grammar, text)] == []
    assert [text for text in bad if checker.accepts(grammar, text)] == []


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"if": {}, "then": {"type": "string"}}, "then"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"type": "string", "format": "made-up"}, "made-up"),
        ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
        ({"type": "integer", "exclusiveMinimum": True}, "exclusiveMinimum"),
        ({"properties": {"a": {"x-guidance": {"lenient": True}, "not": {}}}}, "x-guidance"),
        ({"extends": {"type": "string"}}, "extends"),
        ({"$ref": "http://elsewhere/schema"}, "elsewhere"),
        ({"$ref": "#/$defs/none"}, "none"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        (False, "false"),
        ([1], "object"),
        ("{", "JSON"),
    ],
)
def test_what_is_not_supported_is_named(checker: GrammarChecker, schema: Any, named: str) -> None:
    message = refused(checker, lambda: from_schema(schema))
    assert named in message and "llguidance" not in message and "\n" not in message and len(message) < 400


def test_names_of_properties_and_values_are_no_keywords(checker: GrammarChecker) -> None:
    schema = {"properties": {"extends": {"enum": [{"x-guidance": 1}]}, "x-guidance": {"type": "null"}}}
    checker.check(from_schema(schema))


def deep(levels: int) -> Any:
    return {"type": "integer"} if not levels else {"type": "array", "items": deep(levels - 1)}


def product(parts: int, ways: int) -> Any:
    """Return a schema of a few hundred characters that unfolds into `ways ** parts` objects."""
    either = [[{"properties": {f"p{i}{j}": {"type": "integer"}}} for j in range(ways)] for i in range(parts)]
    return {"allOf": [{"anyOf": [{"type": "object", **one} for one in some]} for some in either]}


@pytest.mark.parametrize(
    "make",
    [
        lambda: from_schema(deep(MAX_SCHEMA_DEPTH + 1)),
        lambda: from_schema({"enum": list(range(20_000))}),
        lambda: from_schema({"enum": ["x" * 200_000]}),
        lambda: from_schema("[" * 100_000),
        lambda: from_schema(product(6, 4)),
        lambda: from_schema({"allOf": [{"type": "string", "pattern": f"a.{{{j}}}b.*"} for j in range(500)]}),
        lambda: from_schema({"$ref": "#"}),
        lambda: from_regex("(" * 3000 + "a" + ")" * 3000),
        lambda: from_regex("a" * 10_000),
        lambda: from_regex("(?=a)b"),
        lambda: from_regex("["),
        lambda: from_grammar("root ::= " + "(" * 5000 + '"a"' + ")" * 5000),
        lambda: from_grammar("%llguidance {}\nstart: /a/"),
        lambda: from_grammar("start: missing"),
        lambda: from_choices([]),
        lambda: from_choices(["a", ""]),
        lambda: from_choices(["a"] * 2000),
    ],
)
def test_hostile_and_malformed_grammars_are_refused(checker: GrammarChecker, make: Callable[[], str]) -> None:
    refused(checker, make)


def test_processor_time_is_bounded_also_where_memory_is_not_short(checker: GrammarChecker) -> None:
    """Without the limit this one is refused too, after twice the time, for the number of its symbols."""
    assert "too much" in refused(checker, lambda: from_schema(product(7, 3)))


def test_one_that_takes_too_much_ends_its_process_only() -> None:
    checker = GrammarChecker()
    try:
        for _ in range(2):
            assert "too much" in refused(checker, lambda: from_schema(product(6, 4)))
        checker.check(from_schema(PERSON))
        assert (checker.passed, checker.refused, checker.given_up) == (1, 1, 1), "the second verdict was kept"
        assert "too much" in refused(checker, lambda: from_schema({"title": "another", **product(6, 4)}))
        assert checker.given_up == 2
    finally:
        checker.close()


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="processes cannot be stopped here")
def test_a_grammar_is_not_refused_because_the_machine_is_busy() -> None:
    """The verdict of one that had no answer in time is not kept: it may be asked for again."""
    checker, grammar = GrammarChecker(), from_regex("a+b")
    try:
        checker.check(from_regex("a"))
        assert checker._guard is not None
        checker._guard._process.send_signal(signal.SIGSTOP)
        with pytest.raises(GrammarsBusy):
            checker.check(grammar)
        checker.check(grammar)
        assert checker.given_up == 0
    finally:
        checker.close()
