"""A sandbox for chat templates: Jinja2's own, with bounds on time, values and output.

A chat template is a program that comes with a model. Jinja2's sandbox denies it unsafe attributes, mutation of values
and files, but does not protect the machine: two nested loops can run for days, `'a' * 10**10` takes all memory.

Here loops and calls check a limit of CPU seconds. Whatever can make a large value out of small ones (operators,
literals, string methods, filters, output) is checked before it runs. A template within the bounds renders what
transformers renders.
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

#: CPU seconds for one rendering, including compilation on first use. Real templates take milliseconds.
MAX_SECONDS = 2.0
#: Characters of one value and of the output, and elements of a value. Longer than a conversation of any context.
MAX_SIZE = 8_000_000
#: Characters of all values together: variables and blocks keep their values to the end.
_MAX_MADE = 64 * MAX_SIZE
#: Bits of a number that a template computes.
_MAX_BITS = 100_000
#: A number passed to a string method or to a filter: a width, a count.
_MAX_NUMBER = 100_000
_MAX_FIELDS = 1000
#: A width of five digits in a format of either kind.
_WIDE = {"%": re.compile(r"%(\([^)]*\))?[^a-zA-Z%]*\d{5}"), "{": re.compile(r"\{[^{}]*[:.!][^{}]*\d{5}")}
_NESTED = re.compile(r":[^{}]*\{")


class TooMuch(Exception):
    """Raised when a template exceeds its bounds."""


class BoundedEnvironment(ImmutableSandboxedEnvironment):  # type: ignore[misc]
    """transformers' environment for chat templates, with bounds. Several threads may render templates at once."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        # `optimized=False`: no constant expression is evaluated while a template is compiled.
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
        """Set up the limits for the calling thread, which compiles or renders one template inside the block."""
        self._running.until = time.thread_time() + MAX_SECONDS
        self._running.made = 0
        try:
            yield
        finally:
            del self._running.until, self._running.made

    def tick(self) -> bool:
        """Raise TooMuch if the CPU time is used up. Returns True, for use in conditions."""
        if time.thread_time() > self._running.until:
            raise TooMuch(f"it does not end within {MAX_SECONDS:g} s")
        return True

    def weighed(self, value: Any) -> Any:
        """Return `value` after counting its size. Raises TooMuch if it, or all values together, are too large."""
        self._running.made += weight(value)
        if self._running.made > _MAX_MADE:
            raise TooMuch(f"it makes more than {_MAX_MADE:,} characters in all")
        return value

    shown = weighed

    def joined(self, *parts: Any) -> str:
        """Implement the operator `~` with a check of the size."""
        weight(parts)
        return str(self.weighed("".join(map(str, parts))))

    def concat(self, parts: Iterable[str]) -> str:
        """Join the output of a block or macro."""
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
        """Wrap `str.format` as Jinja2's sandbox does, with bounds on widths and fields."""
        formatted = super().wrap_str_format(value)
        if formatted is None:
            return None

        def bounded(*arguments: Any, **named: Any) -> str:
            _check_format(value.__self__, "{", (arguments, named))
            return str(formatted(*arguments, **named))

        return bounded

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a filter with checks of its input, numbers and result."""
        marked = getattr(function, "jinja_pass_arg", None)

        def bounded(*arguments: Any, **named: Any) -> Any:
            self.tick()
            value, *rest = arguments[1:] if marked is not None else arguments
            _check_filter(name, value, (*rest, *named.values()))
            found = function(*arguments, **named)
            # An iterator stays one: it is true in a condition even if it yields nothing.
            return self._counted(found) if isinstance(found, Iterator) else self.weighed(found)

        if name == "join":
            bounded = _of_list(bounded, 1 if marked is not None else 0)
        if marked is not None:  # the filter takes the context, or the environment, first
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
    """The tag `{% generation %}`, which marks the assistant's text for training; it renders its content."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_inside"), [], [], body).set_lineno(line)

    @pass_eval_context  # type: ignore[untyped-decorator]
    def _inside(self, context: nodes.EvalContext, caller: Callable[[], str]) -> str:
        return caller()


class _Watched(NodeTransformer):  # type: ignore[misc]
    """Inserts time checks into loops, and size checks where syntax creates values."""

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
    """Return the characters and elements of a value as it would be printed: a value contained twice counts twice.

    Raises TooMuch.
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
            rest.extend(getattr(each, "_Namespace__attrs").values())  # noqa: B009 (Jinja2's private attribute)
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
    if "*" in text or _NESTED.search(text):  # some widths are among the values
        _check_numbers(_flat(values), _MAX_NUMBER // _MAX_FIELDS)


def _flat(values: Any) -> tuple[Any, ...]:
    if isinstance(values, dict):
        return _flat(tuple(values.values()))
    if isinstance(values, list | tuple):
        return tuple(each for value in values for each in _flat(value))
    return (values,)


def _check_numbers(values: Iterable[Any], limit: int = _MAX_NUMBER) -> None:
    """Raise TooMuch if a width or count among the arguments of a method or filter is too large."""
    if any(isinstance(value, int) and abs(value) > limit for value in values):
        raise TooMuch(f"it asks for a width or a count of more than {limit:,}")


def _of_list(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """Wrap a filter so that a lazy argument at `place` becomes a list with a known size."""

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
    """Return JSON as transformers' `tojson` does; Jinja2's own filter escapes HTML."""
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
