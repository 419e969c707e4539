"""Resolve the tasks that a user names: built-in names, YAML files, folders of them, and lm-eval's own names.

lm-eval's index takes many seconds to build, so its names are found by reading the heads of its files, and the index is
built only if one of them is requested.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surgery.evaluation.builtin import Builtin, Texts, builtins, library_texts, write_task
from surgery.evaluation.trust import check_no_code, read_task_file
from zoo.errors import InputError

_YAML = (".yaml", ".yml")
_NAME = re.compile(r"""^\s*[-{]?\s*["']?(?:task|group|tag)["']?:\s*["']?([\w.-]+)""", re.MULTILINE)
_TAG_LIST = re.compile(r"^tag:\s*\n((?:\s*-\s*[\w.-]+\s*\n)+)", re.MULTILINE)


@dataclass(frozen=True)
class WantedTask:
    """Requested tasks by origin.

    Fields:
        files: YAML files.
        names: Names in lm-eval's own index.
        code: Code that the files name may be run.
    """

    builtin: tuple[Builtin, ...]
    files: tuple[Path, ...]
    names: tuple[str, ...]
    code: bool = False


def want(specs: Sequence[str], allow_code: bool = False) -> WantedTask:
    """Sort the requested tasks by origin.

    lm-eval's own tasks are trusted like lm-eval; files may run code only with `allow_code`.

    Raises:
        InputError: Nothing requested; a task, file or folder that does not exist; a folder without tasks; a file that
            would run code.
    """
    known = builtins()
    builtin: list[Builtin] = []
    files: list[Path] = []
    names: list[str] = []
    for spec in dict.fromkeys(specs):
        if spec in known:
            builtin.append(known[spec])
        elif spec.endswith(_YAML) or "/" in spec or Path(spec).is_dir():
            files.extend(_files(Path(spec)))
        else:
            names.append(spec)
    if not (builtin or files or names):
        raise InputError(f"no task was named; built in are {_listed(known)}")
    _check_names(names, known)
    for file in () if allow_code else files:
        check_no_code(file)
    return WantedTask(tuple(builtin), tuple(files), tuple(names), allow_code)


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        found = sorted(each for each in path.iterdir() if each.suffix in _YAML and _names_in(each))
        if not found:
            raise InputError(f"{path} holds no YAML file that names a task")
        return found
    if not path.is_file():
        raise InputError(f"there is no task file {path}")
    return [path]


def _check_names(names: Sequence[str], known: Iterable[str]) -> None:
    """Raise InputError for the first name that neither the zoo nor lm-eval has."""
    if not names:
        return
    theirs = set(_their_names())
    for name in names:
        if name not in theirs:
            near = difflib.get_close_matches(name, [*known, *theirs], n=4, cutoff=0.6)
            like = f"; near it are {', '.join(near)}" if near else ""
            raise InputError(f"there is no task {name!r}{like}; built in are {_listed(known)}")


def _listed(known: Iterable[str]) -> str:
    """Return the built-in tasks in one line, with those of single subjects as a pattern."""
    names = list(known)
    whole = [name for name in names if name.count("_") == 1]
    subjects = sorted({name.split("_", 2)[2] for name in names if name not in whole})
    return ", ".join(whole) + (
        f" (also of one subject, as in {whole[0]}_{subjects[0]}: {', '.join(subjects)})" if subjects else ""
    )


def _their_names() -> Iterator[str]:
    """Yield the tasks, groups and tags named in the files of lm-eval's own tasks."""
    import lm_eval

    root = Path(lm_eval.__file__).parent / "tasks"
    for path in root.rglob("*.yaml"):
        yield from _names_in(path)


def _names_in(path: Path) -> list[str]:
    try:
        text = read_task_file(path)
    except InputError:
        return []
    tags = [tag.strip(" -") for block in _TAG_LIST.findall(text) for tag in block.splitlines()]
    return [*_NAME.findall(text), *tags]


def load_tasks(wanted: WantedTask, folder: Path, texts: Texts | None = None) -> list[Any]:
    """Return lm-eval's task and group objects, with their data loaded.

    Args:
        folder: Where built-in tasks are written; it must outlive them.
        texts: Texts of built-in tasks; the standard library when None.

    Raises:
        InputError: A task's file or data cannot be read.
    """
    from lm_eval.tasks import TaskManager

    local = TaskManager(include_defaults=False)
    found = _load_builtin(local, wanted.builtin, folder, texts or library_texts()) if wanted.builtin else []
    for file in wanted.files:
        found += _load(local, str(file.resolve()), str(file))
    theirs = TaskManager() if wanted.names else local
    for name in wanted.names:
        found += _load(theirs, name, name)
    return found


def _load_builtin(manager: Any, tasks: Sequence[Builtin], folder: Path, texts: Texts) -> list[Any]:
    found: list[Any] = []
    for task in tasks:
        try:
            path = write_task(task, texts, folder)
        except ValueError as error:
            raise InputError(str(error)) from None
        found += _load(manager, str(path), task.name)
    return found


def _load(manager: Any, spec: str, name: str) -> list[Any]:
    """Return the top-level objects of a spec. Any error is attributed to the task's file or its data."""
    from jinja2.exceptions import SecurityError

    try:
        loaded = manager.load([spec])
    except SecurityError:
        raise  # templates are rendered here too; `trust.sandboxed` reports these errors
    except Exception as error:
        line = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"the task {name} cannot be loaded: {type(error).__name__}: {line}") from error
    inner = {child for children in loaded["group_map"].values() for child in children}
    groups = [group for key, group in loaded["groups"].items() if key not in inner]
    return groups or list(loaded["tasks"].values())
