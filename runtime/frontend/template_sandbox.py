"""A sandbox for chat templates: Jinja2's own, which keeps templates from Python's insides, with bounds on time,
values and output.

A chat template is a program that came with a model. Jinja2's sandbox takes unsafe attributes, changes to values and
all files from it,
but not the machine: two nested loops can run for days, `'a' * 10**10` takes all memory. Here loops and calls watch
a clock of CPU seconds, and whatever can make a large value out of small ones (operators, literals, methods of text,
filters, output) is checked before it does.

What a template within the bounds renders is what transformers renders.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from jinja2 import nodes
from jinja2.defaults import DEFAULT_FILTERS
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer

#: CPU seconds for one rendering, the first one's compilation included. Real templates take milliseconds.
MAX_SECONDS = 2.0
#: Characters of one value and of the output, and elements of a value: above the longest conversation that any context
#: holds.
MAX_SIZE = 8_000_000
#: Characters of all values together: variables and blocks keep what they hold to the end.
_MAX_MADE = 64 * MAX_SIZE
#: Bits of a number that a template computes.
_MAX_BITS = 100_000
#: A number given to a method of text or to a filter: a width, a count.
_MAX_NUMBER = 100_000
_MAX_FIELDS = 1000
#: A width of five digits, written into a format of either kind.
_WIDE = {"%": re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*\d{5}"), "{": re.compile(r"\{[^{}]*[:.!][^{}]*\d{5}")}
_NESTED = re.compile(r":[^{}]*\{")


class TooMuch(Exception):
    """A template went beyond its bounds."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """transformers' environment for chat templates, bounded. Templates may be rendered by several threads at once."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # Nothing is computed while a template is compiled.
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, "jinja2.ext.loopcontrols"],
            optimized=False,
            finalize=self.shown,
        )
        self._running = threading.local()
        filters: dict[str, Callable[..., Any]] = {
            name: self._bounded(name, each) for name, each in DEFAULT_FILTERS.items()
        }
        self.filters = {**filters, "tojson": _to_json}
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within this the calling thread compiles or renders one template."""
        self._running.until = time.thread_time() + MAX_SECONDS
        self._running.made = 0
        try:
            yield
        finally:
            del self._running.until, self._running.made

    def tick(self) -> bool:
        """Raises TooMuch when the time is over."""
        if time.thread_time() > self._running.until:
            raise TooMuch(f"it does not end within {MAX_SECONDS:g} s")
        return True

    def weighed(self, value: Any) -> Any:
        """A value that was made, if it is not too large, nor all that were made together."""
        self._running.made += weight(value)
        if self._running.made > _MAX_MADE:
            raise TooMuch(f"it makes more than {_MAX_MADE:,} characters in all")
        return value

    shown = weighed

    def joined(self, *parts: Any) -> str:
        """The operator `~`."""
        weight(parts)
        return str(self.weighed("".join(map(str, parts))))

    def concat(self, parts: Iterable[str]) -> str:
        """What a block or macro puts out."""
        found, size = [], 0
        for part in parts:
            size += len(part)
            _check(size)
            found.append(part)
        return "".join(found)

    def _generate(self, source: nodes.Template, *arguments: Any, **more: Any) -> str:
        return str(super()._generate(_Watched().visit(source), *arguments, **more))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        {"+": _check_sum, "*": _check_product, "**": _check_power, "%": _check_percent}[operator](left, right)
        return self.weighed(super().call_binop(context, operator, left, right))

    def call(self, __context: Context, __obj: Any, *arguments: Any, **named: Any) -> Any:
        if __obj in (self.tick, self.weighed, self.joined):
            return __obj(*arguments)
        self.tick()
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | int | float):
            _check_numbers((*arguments, *named.values()))
        if isinstance(owner, str):
            if __obj.__name__ == "join" and arguments:
                arguments = (list(arguments[0]),)
            _check_text_call(owner, __obj.__name__, arguments)
        return self.weighed(super().call(__context, __obj, *arguments, **named))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` as Jinja2's sandbox has it, with bounds on widths and fields."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*arguments: Any, **named: Any) -> str:
            _check_format(value.__self__, "{", (arguments, named))
            return str(formatted(*arguments, **named))

        return bounded

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter whose input, numbers and result are within bounds."""
        marked = getattr(function, "jinja_pass_arg", None)

        def bounded(*arguments: Any, **named: Any) -> Any:
            self.tick()
            value, *rest = arguments[1:] if marked is not None else arguments
            _check_filter(name, value, (*rest, *named.values()))
            found = function(*arguments, **named)
            # What is lazy stays so: it is true, even when nothing comes out of it.
            return self._counted(found) if isinstance(found, Iterator) else self.weighed(found)

        if name == "join":
            bounded = _of_list(bounded, 1 if marked is not None else 0)
        if marked is not None:  # it wants the context, or the environment, first
            bounded.jinja_pass_arg = marked  # type: ignore[attr-defined]
        return bounded

    def _counted(self, items: Iterator[Any]) -> Iterator[Any]:
        size = 0
        for item in items:
            self.tick()
            size += weight(item)
            _check(size)
            yield item


class _GenerationTag(Extension):  # type: ignore[misc]
    """`{% generation %}`, with which templates mark what the assistant wrote, for training: here what is inside it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    @pass_eval_context  # type: ignore[untyped-decorator]
    def _inside(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class _Watched(NodeTransformer):  # type: ignore[misc]
    """Puts the clock into loops, and the checks of sizes where a syntax of its own makes values."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_environment("tick", [], node.lineno), lineno=node.lineno))
        if node.test is not None:
            node.test = nodes.And(_environment("tick", [], node.lineno), node.test, lineno=node.lineno)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _environment("joined", node.nodes, node.lineno)

    def visit_List(self, node: nodes.List) -> nodes.Node:
        self.generic_visit(node)
        return _environment("weighed", [node], node.lineno)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        self.generic_visit(node)
        return _environment("weighed", [node], node.lineno)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        self.generic_visit(node)
        return _environment("weighed", [node], node.lineno) if node.ctx == "load" else node


def _environment(name: str, arguments: list[nodes.Expr], line: int) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name, lineno=line), arguments, [], None, None, lineno=line)


def weight(value: Any) -> int:
    """Characters and elements of a value as it would be written out: what is held twice counts twice. Raises
    TooMuch.
    """
    total, rest = 0, [value]
    while rest:
        each = rest.pop()
        total += 16 if isinstance(each, Collection) and not isinstance(each, str) else 1
        if isinstance(each, str):
            total += len(each)
        elif isinstance(each, bytes | bytearray):
            raise TooMuch("it makes bytes")
        elif isinstance(each, int):
            total += each.bit_length() >> 2
        elif isinstance(each, dict):
            rest.extend(each.keys())
            rest.extend(each.values())
        elif isinstance(each, Collection):
            rest.extend(each)
        elif isinstance(each, Namespace):
            rest.extend(getattr(each, "_Namespace__attrs").values())  # noqa: B009 (its own way of keeping them)
        _check(total + len(rest))
    return total


def _check(size: int) -> None:
    if size > MAX_SIZE:
        raise TooMuch(f"it makes more than {MAX_SIZE:,} characters")


def _check_sum(left: Any, right: Any) -> None:
    weight((left, right))


def _check_product(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > _MAX_BITS:
            raise TooMuch("it computes with numbers that are too large")
        return
    for value, times in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(times, int):
            _check(weight(value) * max(0, times))


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * exponent > _MAX_BITS:
        raise TooMuch("it computes with numbers that are too large")


def _check_percent(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _check_format(left, "%", right)


def _check_format(text: str, sign: str, values: Any) -> None:
    fields = text.count(sign)
    if fields > _MAX_FIELDS or _WIDE[sign].search(text):
        raise TooMuch("it formats with too many fields, or too wide ones")
    _check(fields * weight(values))
    if "*" in text or _NESTED.search(text):  # widths among the values
        _check_numbers(_flat(values), _MAX_NUMBER // _MAX_FIELDS)


def _flat(values: Any) -> tuple[Any, ...]:
    if isinstance(values, dict):
        return _flat(tuple(values.values()))
    if isinstance(values, list | tuple):
        return tuple(each for value in values for each in _flat(value))
    return (values,)


def _check_numbers(values: Iterable[Any], limit: int = _MAX_NUMBER) -> None:
    """Widths and counts among what a method or a filter is given."""
    if any(isinstance(value, int) and abs(value) > limit for value in values):
        raise TooMuch(f"it asks for a width or a count of more than {limit:,}")


def _of_list(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A filter that is given a list where it would be given something lazy, so that its size is known beforehand."""

    def given(*arguments: Any, **named: Any) -> Any:
        changed = list(arguments)
        if isinstance(changed[place], Iterator):
            changed[place] = list(changed[place])
        return function(*changed, **named)

    return given


def _check_text_call(text: str, method: str, arguments: tuple[Any, ...]) -> None:
    if method == "replace":
        _check_replaced(text, arguments)
    elif method == "join" and arguments:
        _check(weight(arguments) + len(text) * len(arguments[0]))
    elif method == "expandtabs":
        _check(len(text) + text.count("\t") * max([8, *(each for each in arguments if isinstance(each, int))]))
    elif method == "translate":
        _check(len(text) * weight(arguments))


def _check_replaced(text: str, arguments: tuple[Any, ...]) -> None:
    if len(arguments) >= 2 and isinstance(arguments[0], str) and isinstance(arguments[1], str):
        _check(len(text) + (text.count(arguments[0]) if arguments[0] else len(text) + 1) * len(arguments[1]))


def _check_filter(name: str, value: Any, arguments: tuple[Any, ...]) -> None:
    size = weight(value)
    if name not in ("truncate", "int", "float", "default", "d"):
        _check_numbers(arguments)
    if name == "replace":
        _check_replaced(str(value), arguments)
    elif name in ("join", "indent"):
        lines = size if name == "join" else 1 + str(value).count("\n")
        widest = max((each if isinstance(each, int) else len(str(each)) for each in arguments), default=4)
        _check(size + lines * widest)
    elif name == "format":
        _check_format(str(value), "%", arguments)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: Any = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja2's own escapes HTML; this one is transformers'."""
    if weight((indent, separators)) > _MAX_FIELDS or (isinstance(indent, int) and indent > _MAX_FIELDS):
        raise TooMuch("it indents too far")
    weight(value)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    _check(len(text))
    return text


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(layout: str) -> str:
    if len(layout) > _MAX_FIELDS or _WIDE["%"].search(layout):
        raise TooMuch("it formats with too many fields, or too wide ones")
    return datetime.now().strftime(layout)
