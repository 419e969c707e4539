"""Refuse task files that run code, unless the user allows it. A task's YAML can name Python in several ways:

!function module.name        imported and called                  metric: org/any      a script that `evaluate`
                                                                  fetches from the hub
{{ templates }}              Jinja, which reaches everything that Python objects have: run in its sandbox here
dataset_path: pandas         unpickles its files                  include: other.yaml  any of these, elsewhere
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from zoo.errors import InputError

#: Maximum bytes of a task file: the largest of lm-eval's own have some hundred kB.
MOST_BYTES = 4 << 20
_ALLOW = "--allow-code runs it"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """A loader of plain YAML that raises an error at a function."""


def _refuse_function(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    raise _Code(f"names the Python function {str(node.value)[:80]!r}")


class _Code(Exception):
    """The reason why a document would run code."""


_Loader.add_constructor("!function", _refuse_function)


def read_task_file(path: Path) -> str:
    """Return a task file's text. Raises InputError if it cannot be read or is too large."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise InputError(f"the task file {path} cannot be read: {error.strerror}") from None
    if len(text) > MOST_BYTES:
        raise InputError(f"{path} is no task file: it is larger than {MOST_BYTES >> 20} MiB")
    return text.decode("utf-8", "replace")


def check_no_code(path: Path) -> None:
    """Raise InputError for a file that would run its author's Python, or is not YAML; includes are checked too."""
    seen: set[Path] = set()
    waiting = [path]
    while waiting:
        here = waiting.pop().expanduser().resolve()
        if here in seen:
            continue
        seen.add(here)
        settings = _parse(here)
        included = settings.get("include") or []
        waiting += [here.parent / str(each) for each in (included if isinstance(included, list) else [included])]


def _parse(path: Path) -> Mapping[str, Any]:
    try:
        settings = yaml.load(read_task_file(path), _Loader)  # noqa: S506
        for each in _mappings(settings):
            _check_settings(each)
    except _Code as why:
        raise InputError(f"the task file {path} {why}: {_ALLOW}") from None
    except (yaml.YAMLError, RecursionError) as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"the task file {path} is no YAML: {line}") from None
    return settings if isinstance(settings, Mapping) else {}


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all mappings in a document, each once; groups contain tasks of their own."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if not isinstance(here, Mapping | list) or id(here) in seen:
            continue
        seen.add(id(here))
        if isinstance(here, Mapping):
            yield here
            waiting += here.values()
        else:
            waiting += here


def _check_settings(settings: Mapping[str, Any]) -> None:
    if settings.get("dataset_path") == "pandas":
        raise _Code("reads pickles, which run code")
    if settings.get("unsafe_code"):
        raise _Code("runs what the model writes")
    metric = settings.get("metric")
    if isinstance(metric, str) and (settings.get("hf_evaluate") or not _is_known(metric)):
        raise _Code(f"fetches the metric {metric[:80]!r} as a script")


def _is_known(metric: str) -> bool:
    import lm_eval.api.metrics  # noqa: F401
    from lm_eval.api.registry import metric_registry

    return metric in metric_registry


@contextlib.contextmanager
def sandboxed() -> Iterator[None]:
    """Render templates of tasks in Jinja's sandbox in the context. Raises InputError for one that tries to leave it."""
    import lm_eval.utils
    from jinja2.exceptions import SecurityError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    usual = lm_eval.utils.env
    safe = ImmutableSandboxedEnvironment(undefined=usual.undefined, keep_trailing_newline=usual.keep_trailing_newline)
    safe.filters.update(usual.filters)
    lm_eval.utils.env = safe
    try:
        yield
    except SecurityError as error:
        raise InputError(f"a template of the task reaches into Python ({str(error)[:120]}): {_ALLOW}") from None
    finally:
        lm_eval.utils.env = usual
