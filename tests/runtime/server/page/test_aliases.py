"""The page shows which aliases point to a model, what a rollback leads to, and the history."""

from __future__ import annotations

from pathlib import Path

import pytest

from runtime.frontend.tokenizer import Tokenizer
from tests.runtime.server.harness import running
from tests.runtime.server.page.looking import HOSTILE, family, seen
from zoo.aliases import set_alias


@pytest.fixture(scope="module")
def credit() -> int:
    return 1


def test_aliases_and_their_history_are_on_a_models_view(tokenizer: Tokenizer, tmp_path: Path) -> None:
    figures = [{"condition": "cloze>=live", "candidate": 0.61234, "live": 0.6}]
    with family(tmp_path / "store") as store, running(tokenizer, store=store) as server, server.http() as http:
        assert not [each for each in seen(http, "/ui/models/org/fine").all("h2") if each.text == "Aliases"]
        set_alias(store, "prod", "org/base")
        set_alias(store, "prod", "org/fine", "promote", figures)
        set_alias(store, "<b>beta", "org/base:90,org/fine:10")
        page = seen(http, "/ui/models/org/fine")
        tags = [tag.text for tag in page.one("h1").all("span") if "alias" in tag.attributes["class"]]
        assert tags == ["alias <b>beta", "alias prod"]
        table = page.one("table", class_="changes")
        rows = [[cell.text for cell in row if cell.tag in ("th", "td")] for row in table.one("tbody").all("tr")]
        assert [(row[0], row[2], row[3]) for row in rows] == [
            ("<b>beta", "set", "org/base 90 %, org/fine 10 %"), ("prod", "promote", "org/fine")
        ]  # fmt: skip
        assert rows[1][4] == "cloze>=live: 0.6123, live 0.6000"
        assert "prod points to it; a rollback leads to org/base" in page.text
        base = seen(http, "/ui/models/org/base")
        assert "alias prod" not in base.one("h1").text and len(base.one("table", class_="changes").all("tr")) == 3
        listed = {
            row.one("th").text: row for row in seen(http, "/").one("table", class_="models").one("tbody").all("tr")
        }
        assert any("alias prod" in name and name.startswith("org/fine") for name in listed)
        with store.catalog.writing() as writer:
            writer.roll_back("prod")
        assert "No alias points" not in seen(http, "/ui/models/org/fine").text
        assert "alias prod" in seen(http, "/ui/models/org/base").one("h1").text


def test_a_name_with_markup_and_wildcards_finds_its_own_history_only(tokenizer: Tokenizer, tmp_path: Path) -> None:
    with family(tmp_path / "store") as store, store.catalog.writing() as writer:
        assert writer.alias_changes_of(HOSTILE) == []
    with family(tmp_path / "other") as store:
        set_alias(store, "prod", HOSTILE)
        with store.catalog.reading() as reader:
            assert [change.alias for change in reader.alias_changes_of(HOSTILE)] == ["prod"]
            assert reader.alias_changes_of("%") == [] and reader.alias_changes_of("org/fine") == []
