"""From a body's fields to the grammar of its answers: OpenAI's `response_format`, vLLM's fields for the same.

Everything that can be wrong with a grammar is found here, before anything runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from runtime.frontend.errors import RequestError, overloaded, unsupported
from runtime.frontend.schemas import ChatBody, CompletionBody
from runtime.frontend.served_models import ServedModel
from runtime.grammars.checking import GrammarChecker, GrammarsBusy
from runtime.grammars.limits import GrammarRefused
from runtime.grammars.sources import from_choices, from_grammar, from_regex, from_schema

Make = Callable[[], str]
#: How long a client waits before it tries again, in seconds.
_RETRY = 1
#: Parts of `structured_outputs` that are recognized and not served.
_UNSERVED = ("structural_tag", "whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def answer_grammar(body: CompletionBody | ChatBody, model: ServedModel, checker: GrammarChecker | None) -> str:
    """Return the grammar of a request's answers, empty for none. Raises RequestError 400, 429."""
    found = list(_requested(body))
    if not found:
        return ""
    if len(found) > 1:
        raise RequestError(f"an answer has one form, not two: {found[0][0]} and {found[1][0]}", param=found[1][0])
    param, make = found[0]
    return checked(param, make, body, model, checker)


def checked(
    param: str, make: Make, body: CompletionBody | ChatBody, model: ServedModel, checker: GrammarChecker | None
) -> str:
    """Return a grammar that was made and checked for this request. Raises RequestError 400, 429."""
    require_constrainable(param, body, model)
    if checker is None:
        raise unsupported(param, "answers are not constrained here")
    try:
        grammar = make()
        checker.check(grammar)
    except GrammarRefused as error:
        raise RequestError(f"{param}: {error}", param=param, code="unsupported_grammar") from None
    except GrammarsBusy as error:
        raise overloaded(str(error), _RETRY) from None
    return grammar


def require_constrainable(param: str, body: CompletionBody | ChatBody, model: ServedModel) -> None:
    """Raise RequestError 400 if the model's answers, or those of this request, cannot be constrained."""
    if all(model.tokenizer.silent(token) for token in range(min(model.spec.vocab_size, 512))):
        raise unsupported(param, "the model has no tokenizer")
    if not model.spec.eos_token_ids:
        raise unsupported(param, "the model has no token that ends an answer")
    if body.ignore_eos or body.min_tokens:
        field = "ignore_eos" if body.ignore_eos else "min_tokens"
        raise RequestError(f"{field} does not go with {param}: an answer ends where its grammar does", param=field)


def _requested(body: CompletionBody | ChatBody) -> Iterator[tuple[str, Make]]:
    """Yield the forms that a body asks for, by the field."""
    form = body.response_format
    if form is not None and form.type != "text":
        yield "response_format", _response_format(body)
    for kind, value in (
        ("json", body.guided_json),
        ("regex", body.guided_regex),
        ("choice", body.guided_choice),
        ("grammar", body.guided_grammar),
    ):
        if value is not None:
            yield f"guided_{kind}", _maker(kind, value)
    given = body.structured_outputs
    if given is not None:
        for field in _UNSERVED:
            if getattr(given, field):
                raise unsupported(f"structured_outputs.{field}", "give json, regex, choice, grammar or json_object")
        for kind, value in (
            ("json", given.json_),
            ("regex", given.regex),
            ("choice", given.choice),
            ("grammar", given.grammar),
            ("json_object", given.json_object or None),
        ):
            if value is not None:
                yield "structured_outputs", _maker(kind, value)


def _response_format(body: CompletionBody | ChatBody) -> Make:
    form = body.response_format
    if form is None or form.type == "json_object":
        return _maker("json_object", True)
    if form.type != "json_schema":
        raise unsupported("response_format", f"the type must be text, json_object or json_schema, not {form.type[:40]}")
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise RequestError("response_format: json_schema needs a schema", param="response_format")
    return _maker("json", form.json_schema.schema_)


def _maker(kind: str, value: Any) -> Make:
    makers: dict[str, Callable[[Any], str]] = {
        "json": from_schema,
        "regex": from_regex,
        "choice": from_choices,
        "grammar": from_grammar,
        "json_object": lambda _: from_schema({"type": "object"}),
    }
    make = makers[kind]
    return lambda: make(value)
