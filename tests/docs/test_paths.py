"""The documentation names files that exist, its links resolve, and a new reader's path ends in code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: `docs/moves.md` deliberately names files that are gone; the change log is history.
PAGES = sorted(
    page.relative_to(ROOT)
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
    if page.name not in ("moves.md", "CHANGELOG.md")
)
PACKAGES = ("zoo", "surgery", "stitch", "surrogates", "runtime", "cli", "benchmarks", "tests", "docs")
CODE = re.compile(r"`((?:" + "|".join(PACKAGES) + r")/[\w./-]*)`")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")


def code_paths(page: Path) -> set[str]:
    return set(CODE.findall((ROOT / page).read_text()))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_that_a_page_names_exist(page: Path) -> None:
    assert [name for name in sorted(code_paths(page)) if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_of_a_page_lead_somewhere(page: Path) -> None:
    folder = (ROOT / page).parent
    assert [link for link in LINK.findall((ROOT / page).read_text()) if not (folder / link).exists()] == []


def test_a_new_readers_path_ends_in_code() -> None:
    """README -> docs/overview.md -> docs/request.md -> the files of each hop."""
    assert "docs/overview.md" in LINK.findall((ROOT / "README.md").read_text())
    assert "request.md" in LINK.findall((ROOT / "docs/overview.md").read_text())
    hops = {name for name in code_paths(Path("docs/request.md")) if name.endswith(".py")}
    parts = {name.split("/")[1] for name in hops}
    assert parts >= {"server", "frontend", "cluster", "scheduler", "agent", "engine"}


def test_where_files_went_is_true() -> None:
    """Every row of docs/moves.md leads to a file, and no old path still exists."""
    rows = re.findall(r"\| `([^`]+)` \| `([^`]+)` \|", (ROOT / "docs/moves.md").read_text())
    assert len(rows) > 200
    targets = [target for _, target in rows if "{" not in target]
    assert [target for target in targets if not (ROOT / target).exists()] == []
