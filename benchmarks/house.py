"""Measure the repository's style: sizes of folders and files, names, words, references, files that nothing imports.

    python -m benchmarks.house [--json] [--check] [--list MEASURE] [--root FOLDER]

`--check` compares every measure with its limit in LIMITS; the exit code is 1 if one is above it. `--list` prints what a
measure counts, one finding per line. Read are the Python files of the packages, benchmarks and tests, and Markdown
files at the top level and in docs.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from benchmarks.sources import Repository, Source, imported_modules

#: Upper bounds of the measures. Lower them when a measure falls; the goal is zero except for folders and words.
LIMITS: Mapping[str, float] = {
    "files per folder, most": 16,
    "files per folder of runtime, median": 8,
    "words for people in 1000, code": 0.2,
    "words for people in 1000, tests": 1,
    "words for people in 1000, documents": 0.5,
    "class names defined twice": 15,
    "class names defined twice in a package": 0,
    "methods named by a bare verb": 0,
    "paper IDs that lead nowhere": 0,
    "references to texts outside": 0,
    "lines longer than 120": 36,
    "files of more than 300 lines of code": 20,
    "files that nothing imports": 0,
}
#: Maximum length of a line and of a file.
COLUMNS, LINES = 120, 300
#: Words for people, which should not be used for things.
PEOPLE = frozenset(
    ["who", "whoever", "whose", "whom", "nobody", "somebody", "anybody", "everybody", "others", "newcomer", "newcomers"]
)
#: Names of methods that state neither their object nor their result.
BARE = frozenset(
    [
        "ask", "asked", "came", "come", "done", "drop", "ended", "forget", "gave", "give", "given", "go", "gone", "had",
        "hear", "heard", "keep", "kept", "leave", "left", "let", "lost", "made", "meet", "met", "of", "over", "ran",
        "said", "say", "see", "seen", "stand", "stood", "take", "taken", "tell", "told", "took", "went",
    ]
)  # fmt: skip
#: IDs of the papers' mechanisms, and phrases that refer to a text outside the repository.
PAPER_ID = re.compile(r"\b(?:BL|IL|QL|TI|BA|UN)-[0-9]{2}\b")
_OUTSIDE = re.compile(r"\bdesign,? section\b|\bmechanisms [0-9]|\bcontract, section\b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+(?:'[a-z]+)?")
PAPERS = "docs/papers.md"


@dataclass(frozen=True)
class Measure:
    """One row of the table.

    Fields:
        found: The findings, if the measure counts a list.
    """

    name: str
    value: float
    found: tuple[str, ...] = ()


def folders(repository: Repository) -> list[Measure]:
    """Return files per folder, without `__init__.py` and without the verbs of `cli`, which stay in one folder."""
    sizes = Counter(
        str(PurePosixPath(each.path).parent) for each in repository.product if not each.path.endswith("__init__.py")
    )
    sizes.pop("cli", None)
    named = tuple(f"{folder}: {count}" for folder, count in sizes.most_common())
    of_runtime = [count for folder, count in sizes.items() if folder.startswith("runtime")]
    return [
        Measure("files per folder, most", max(sizes.values(), default=0), named),
        Measure("files per folder of runtime, median", statistics.median(of_runtime or [0]), named),
    ]


def words(repository: Repository) -> list[Measure]:
    """Return the words for people per 1000 words of comments and docstrings, and of documents."""
    code = [(each.path, text) for each in repository.own for text in each.prose]
    tests = [(each.path, text) for each in repository.tests for text in each.prose]
    documents = list(repository.documents.items())
    return [_people("code", code), _people("tests", tests), _people("documents", documents)]


def classes(repository: Repository) -> list[Measure]:
    """Return the class names defined more than once, in total and within one package."""
    where: dict[str, list[Source]] = defaultdict(list)
    for source in repository.own:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(source)
    doubled = {name: sources for name, sources in where.items() if len(sources) > 1}
    inside: list[str] = []
    for name, sources in doubled.items():
        packages = Counter(_package(each) for each in sources)
        inside += [f"{name}: {count} x in {package}" for package, count in packages.items() if count > 1]
    return [
        Measure("class names defined twice", len(doubled), _places(doubled)),
        Measure("class names defined twice in a package", len(inside), tuple(sorted(inside))),
    ]


def methods(repository: Repository) -> list[Measure]:
    """Return the methods named by a bare verb or preposition."""
    found = [
        f"{source.path}:{method.lineno}: {node.name}.{method.name}"
        for source in repository.own
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
        for method in node.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef) and method.name.lstrip("_") in BARE
    ]
    return [Measure("methods named by a bare verb", len(found), tuple(found))]


def references(repository: Repository) -> list[Measure]:
    """Return the mechanism IDs missing from the papers' page, and phrases that refer outside the repository."""
    known = listed_ids(repository.documents.get(PAPERS, ""))
    texts = {source.path: source.text for source in (*repository.own, *repository.tests)} | repository.documents
    unknown, outside = [], []
    for path, text in texts.items():
        for number, line in enumerate(text.splitlines(), 1):
            unknown += [f"{path}:{number}: {each}" for each in PAPER_ID.findall(line) if each not in known]
            outside += [f"{path}:{number}: {each.group()}" for each in _OUTSIDE.finditer(line)]
    return [
        Measure("paper IDs that lead nowhere", len(unknown), tuple(unknown)),
        Measure("references to texts outside", len(outside), tuple(outside)),
    ]


def sizes(repository: Repository) -> list[Measure]:
    """Return the lines and files that are too long."""
    everything = [*repository.own, *repository.tests]
    lines = [
        f"{source.path}:{number}: {len(line)}"
        for source in everything
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > COLUMNS
    ]
    lengths = {source.path: source.code_lines for source in everything}
    files = [f"{path}: {count}" for path, count in sorted(lengths.items(), key=lambda each: -each[1]) if count > LINES]
    return [
        Measure(f"lines longer than {COLUMNS}", len(lines), tuple(lines)),
        Measure(f"files of more than {LINES} lines of code", len(files), tuple(files)),
    ]


def dead(repository: Repository) -> list[Measure]:
    """Return modules that no code or document imports (tests aside), no entry point starts and no string names."""
    project = repository.root / "pyproject.toml"
    used = set(re.findall(r'"([\w.]+):\w+"', project.read_text(encoding="utf-8") if project.exists() else ""))
    used |= {name for text in repository.documents.values() for name in re.findall(r"\bfrom ([\w.]+) import", text)}
    strings: set[str] = set()
    for source in repository.own:
        used |= {name for name in imported_modules(source) if name != source.module}
        strings |= {
            node.value
            for node in ast.walk(source.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    found = [each.path for each in repository.product if not (each.module in used | strings or _enters_itself(each))]
    return [Measure("files that nothing imports", len(found), tuple(found))]


MEASURES: Sequence[Callable[[Repository], list[Measure]]] = (folders, words, classes, methods, references, sizes, dead)


def measured(root: Path) -> list[Measure]:
    repository = Repository(root)
    return [each for measure in MEASURES for each in measure(repository)]


def listed_ids(papers: str) -> set[str]:
    """Return the IDs that the papers' page has a row for."""
    return set(re.findall(rf"^\| *({PAPER_ID.pattern}) *\|", papers, re.MULTILINE))


def above(found: Sequence[Measure], limits: Mapping[str, float]) -> list[str]:
    """Return a text for each measure above its limit or without one."""
    wrong = [f"{each.name}: no limit in the table" for each in found if each.name not in limits]
    return wrong + [
        f"{each.name}: {each.value:g}, limit {limits[each.name]:g}"
        for each in found
        if each.name in limits and each.value > limits[each.name]
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--check", action="store_true", help="exit code 1 where a measure is above its limit")
    parser.add_argument("--list", metavar="MEASURE", help="print what this measure counts")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent, help="the repository")
    given = parser.parse_args(arguments)
    found = measured(given.root)
    if given.list is not None:
        chosen = [each for each in found if each.name == given.list]
        if not chosen:
            parser.error(f"there is no measure {given.list!r}; there are {', '.join(each.name for each in found)}")
        print("\n".join(chosen[0].found))
        return 0
    if given.json:
        print(
            json.dumps({each.name: {"value": each.value, "limit": LIMITS.get(each.name)} for each in found}, indent=2)
        )
    else:
        width = max(len(each.name) for each in found)
        print(f"{'':{width}}  {'now':>8}  {'limit':>8}")
        for each in found:
            print(f"{each.name:{width}}  {each.value:8g}  {LIMITS.get(each.name, float('nan')):8g}")
    wrong = above(found, LIMITS) if given.check else []
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


def _people(what: str, texts: Sequence[tuple[str, str]]) -> Measure:
    total, found = 0, []
    for path, text in texts:
        said = [word.lower().removesuffix("'s") for word in _WORD.findall(text)]
        total += len(said)
        found += [f"{path}: {word}" for word in said if word in PEOPLE]
    return Measure(f"words for people in 1000, {what}", round(1000 * len(found) / max(1, total), 2), tuple(found))


def _places(named: Mapping[str, Sequence[Source]]) -> tuple[str, ...]:
    most = sorted(named.items(), key=lambda each: (-len(each[1]), each[0]))
    return tuple(f"{name}: {', '.join(source.path for source in sources)}" for name, sources in most)


def _package(source: Source) -> str:
    """Return the package within which class names must be unique: `runtime/engine` or `zoo`, for example."""
    parts = PurePosixPath(source.path).parts
    return "/".join(parts[: 2 if parts[0] == "runtime" and len(parts) > 2 else 1])


def _enters_itself(source: Source) -> bool:
    """Return whether a file needs no import: a package, a migration (found by Alembic), or a program."""
    return (
        source.path.endswith("__init__.py") or "/migrations/" in source.path or '__name__ == "__main__"' in source.text
    )


if __name__ == "__main__":
    sys.exit(main())
