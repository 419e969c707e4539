"""The papers' page has a row for every ID used in the repository and for no other, and the files it names exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.house import PAPER_ID, PAPERS, listed_ids
from benchmarks.sources import Repository

ROOT = Path(__file__).resolve().parent.parent.parent
_COLUMNS = ("id", "what", "where", "files", "tests")


def rows(text: str) -> list[dict[str, str]]:
    """Return the table lines that begin with an ID, by column."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [dict(zip(_COLUMNS, line, strict=True)) for line in cells if PAPER_ID.fullmatch(line[0])]


def paths(text: str) -> list[str]:
    return re.findall(r"`([\w./-]+\.py)`", text)


@pytest.fixture(scope="module")
def repository() -> Repository:
    return Repository(ROOT)


@pytest.fixture(scope="module")
def papers(repository: Repository) -> str:
    return repository.documents[PAPERS]


def used(repository: Repository) -> dict[str, list[str]]:
    """Return ID -> the files that contain it, the page itself excluded."""
    texts = {source.path: source.text for source in (*repository.own, *repository.tests)} | repository.documents
    found: dict[str, list[str]] = {}
    for path, text in texts.items():
        if path != PAPERS:
            for each in set(PAPER_ID.findall(text)):
                found.setdefault(each, []).append(path)
    return found


def test_every_id_that_is_used_has_a_row(repository: Repository, papers: str):
    unknown = {each: files for each, files in used(repository).items() if each not in listed_ids(papers)}
    assert not unknown


def test_every_row_is_of_an_id_that_is_used(repository: Repository, papers: str):
    assert listed_ids(papers) - set(used(repository)) == set()


def test_ids_stand_in_order_once_each_under_their_paper(papers: str):
    ids = [row["id"] for row in rows(papers)]
    assert len(ids) == len(set(ids)) == len(listed_ids(papers))
    for section in papers.split("\n## ")[1:]:
        of_paper = [row["id"] for row in rows(section)]
        assert of_paper == sorted(of_paper) and {each[:2] for each in of_paper} <= {section[:2]}


def test_every_row_says_what_it_is_where_it_is_and_what_shows_it(papers: str):
    for row in rows(papers):
        assert len(row["what"].split()) > 5 and row["where"], row["id"]
        assert paths(row["files"]), f"{row['id']} has no file"
        assert paths(row["tests"]), f"{row['id']} has no test"
        assert all(path.startswith("tests/") for path in paths(row["tests"])), row["id"]


def test_every_file_on_the_page_exists(papers: str):
    missing = [path for path in paths(papers) if not (ROOT / path).is_file()]
    assert paths(papers) and not missing


def test_a_row_and_the_code_know_each_other(repository: Repository, papers: str):
    """At least one of a row's files contains its ID, so that a reader of the code finds the page, too."""
    naming = used(repository)
    alone = [row["id"] for row in rows(papers) if not set(paths(row["files"] + row["tests"])) & set(naming[row["id"]])]
    assert not alone


def test_rows_are_read_as_they_stand():
    first = f"BL-{1:02}"
    text = f"| ID | a |\n|---|---|\n| {first} | what | 4.3 | `zoo/a.py`, `zoo/b.py` | `tests/c.py` |\n"
    (row,) = rows(text)
    assert row["id"] == first and row["where"] == "4.3" and paths(row["files"]) == ["zoo/a.py", "zoo/b.py"]
