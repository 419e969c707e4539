"""The repository's Python and Markdown files as text and syntax trees, for checks that import none of it."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

#: The packages that are installed.
PACKAGES = ("zoo", "surgery", "stitch", "surrogates", "runtime", "cli")

_NO_CODE = frozenset(
    [tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER]
)


@dataclass(frozen=True)
class Source:
    """A Python file.

    Fields:
        path: Relative to the repository, with slashes.
    """

    path: str
    text: str

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def prose(self) -> Iterator[str]:
        """The file's docstrings and comments."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.string

    @property
    def code_lines(self) -> int:
        """Lines that are neither blank nor only comment or docstring."""
        words = {
            line
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node, clean=False) is not None
            for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
        }
        written = {
            line
            for token in tokenize.generate_tokens(io.StringIO(self.text).readline)
            if token.type not in _NO_CODE
            for line in range(token.start[0], token.end[0] + 1)
        }
        return len(written - words)


class Repository:
    """The files below a folder. Raises FileNotFoundError if it has none of the packages."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.product = self._sources(*PACKAGES)
        self.benchmarks = self._sources("benchmarks")
        self.tests = self._sources("tests")
        if not self.product:
            raise FileNotFoundError(f"{root} has none of the folders {', '.join(PACKAGES)}")
        documents = sorted([*root.glob("*.md"), *root.glob("docs/**/*.md")])
        self.documents = {path.relative_to(root).as_posix(): path.read_text(encoding="utf-8") for path in documents}

    @property
    def own(self) -> list[Source]:
        """All Python files except tests."""
        return [*self.product, *self.benchmarks]

    def _sources(self, *folders: str) -> list[Source]:
        paths = sorted(path for folder in folders for path in (self.root / folder).rglob("*.py"))
        return [Source(path.relative_to(self.root).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def imported_modules(source: Source) -> Iterator[str]:
    """Yield the modules that a file imports anywhere, and their parent packages."""
    package = source.module if source.path.endswith("__init__.py") else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                yield from _with_parents(each.name)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join([*above, *([node.module] if node.module else [])])
            yield from _with_parents(origin)
            yield from (f"{origin}.{each.name}" for each in node.names)


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    yield from (".".join(parts[:end]) for end in range(1, len(parts) + 1))
