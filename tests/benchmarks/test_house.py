"""What the repository's measures count, and that the repository is within its limits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import house
from benchmarks.house import LIMITS, Measure, above, listed_ids, main, measured

#: Assembled from parts, so that the repository's own measure does not count them.
KNOWN, UNKNOWN = (f"BL-{number:02}" for number in (1, 99))
DESIGN = "design," + " section"


def _found(root: Path, name: str) -> Measure:
    return next(each for each in measured(root) if each.name == name)


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"runtime/a.py": "", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_the_repository_is_within_its_limits(capsys: pytest.CaptureFixture[str]):
    assert main(["--check"]) == 0, capsys.readouterr().err


def test_every_measure_has_a_limit_and_every_limit_a_measure(tmp_path: Path):
    assert {each.name for each in measured(_write(tmp_path, {}))} == set(LIMITS)


def test_a_measure_above_its_limit_fails_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    root = _write(tmp_path, {"runtime/a.py": f"x = 1  # {UNKNOWN}\n"})
    assert main(["--check", "--root", str(root)]) == 1
    assert "paper IDs that lead nowhere: 1, limit 0" in capsys.readouterr().err
    assert main(["--root", str(root)]) == 0, "without --check nothing fails"
    capsys.readouterr()
    assert main(["--json", "--root", str(root)]) == 0
    assert json.loads(capsys.readouterr().out)["paper IDs that lead nowhere"] == {"value": 1, "limit": 0}
    assert main(["--list", "paper IDs that lead nowhere", "--root", str(root)]) == 0
    assert capsys.readouterr().out == f"runtime/a.py:1: {UNKNOWN}\n"


def test_a_measure_without_a_limit_fails():
    assert above([Measure("new", 0.0)], {}) == ["new: no limit in the table"]
    assert above([Measure("a", 2.0), Measure("b", 1.0)], {"a": 1.0, "b": 1.0}) == ["a: 2, limit 1"]


def test_files_are_counted_by_folder_but_for_verbs_and_packages_own_files(tmp_path: Path):
    names = [
        "cli/one.py",
        "cli/two.py",
        "cli/three.py",
        "runtime/b.py",
        "runtime/kv/c.py",
        "runtime/kv/__init__.py",
        "zoo/d.py",
    ]
    root = _write(tmp_path, dict.fromkeys(names, ""))
    assert _found(root, "files per folder, most").value == 2
    assert _found(root, "files per folder of runtime, median").value == 1.5


def test_words_for_people_are_counted_in_prose_and_not_in_code(tmp_path: Path):
    root = _write(
        tmp_path,
        {
            "runtime/a.py": '"""Whoever calls.\n\nwho\'s there"""\nwho = "nobody"  # others wait\n',
            "tests/test_a.py": '"""No such word."""\n',
            "README.md": "a newcomer\n",
        },
    )
    found = _found(root, "words for people in 1000, code")
    assert (
        found.found == ("runtime/a.py: whoever", "runtime/a.py: who", "runtime/a.py: others") and found.value == 500.0
    )
    assert _found(root, "words for people in 1000, tests").value == 0
    assert _found(root, "words for people in 1000, documents").value == 500.0


def test_classes_of_one_name_are_counted_once_and_by_package(tmp_path: Path):
    twice = "class Part: ...\n"
    root = _write(
        tmp_path,
        {
            "runtime/engine/a.py": twice,
            "runtime/engine/deep/b.py": twice,
            "runtime/kv/c.py": twice,
            "tests/d.py": twice,
        },
    )
    assert _found(root, "class names defined twice").value == 1
    assert _found(root, "class names defined twice in a package").found == ("Part: 2 x in runtime/engine",)


def test_a_bare_verb_is_a_methods_name_not_a_functions(tmp_path: Path):
    text = "def take(): ...\nclass A:\n    def _take(self): ...\n"
    text += "    def take_pages(self): ...\n    async def tell(self): ...\n"
    assert _found(_write(tmp_path, {"runtime/a.py": text}), "methods named by a bare verb").found == (
        "runtime/a.py:3: A._take", "runtime/a.py:5: A.tell",
    )  # fmt: skip


def test_an_id_leads_somewhere_when_the_papers_page_has_a_row_for_it(tmp_path: Path):
    papers = f"| ID | what |\n|---|---|\n| {KNOWN} | components |\n\n{KNOWN} is near {UNKNOWN}.\n"
    root = _write(tmp_path, {"runtime/a.py": f"# {KNOWN}, {UNKNOWN} ({DESIGN} 7)\n", "docs/papers.md": papers})
    assert listed_ids(papers) == {KNOWN}
    expected = (f"runtime/a.py:1: {UNKNOWN}", f"docs/papers.md:5: {UNKNOWN}")
    assert _found(root, "paper IDs that lead nowhere").found == expected
    assert _found(root, "references to texts outside").found == (f"runtime/a.py:1: {DESIGN}",)


def test_long_lines_and_long_files_are_counted_in_tests_too(tmp_path: Path):
    root = _write(
        tmp_path,
        {
            "tests/a.py": "#" * 121 + "\n" + "#" * 120 + "\n",
            "benchmarks/b.py": "x = 1\n" * 301,
            "zoo/c.py": "x = 1\n" * 300,
        },
    )
    assert _found(root, "lines longer than 120").found == ("tests/a.py:1: 121",)
    assert _found(root, "files of more than 300 lines of code").found == ("benchmarks/b.py: 301",)


@pytest.mark.parametrize(
    "user",
    [
        {"zoo/user.py": "import runtime.b\n", "cli/app.py": "from zoo import user\n"},
        {"runtime/kv/__init__.py": "def f():\n    from ..b import x\n"},
        {"runtime/kv/__init__.py": "from .. import b\n"},
        {"cli/app.py": 'run(["-m", "runtime.b"])\n'},
        {"README.md": "    from runtime.b import x\n"},
        {"runtime/b.py": 'if __name__ == "__main__":\n    pass\n'},
        {"pyproject.toml": 'b = "runtime.b:main"\n'},
    ],
)
def test_a_file_is_used_when_something_leads_to_it(tmp_path: Path, user: dict[str, str]):
    assert (
        "runtime/b.py" not in _found(_write(tmp_path, {"runtime/b.py": "", **user}), "files that nothing imports").found
    )


@pytest.mark.parametrize(
    "user", [{}, {"tests/test_b.py": "import runtime.b\n"}, {"runtime/b.py": "import runtime.b\n"}]
)
def test_a_file_is_dead_when_only_tests_or_itself_lead_to_it(tmp_path: Path, user: dict[str, str]):
    assert "runtime/b.py" in _found(_write(tmp_path, {"runtime/b.py": "", **user}), "files that nothing imports").found


def test_a_folder_without_packages_is_an_error(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="none of the folders"):
        house.measured(tmp_path)
