"""The view of clients' keys: what each may do and has used, for the server's own key alone."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.keys import key_book
from runtime.server.page.views import keys as view
from tests.runtime.server.aliases.looking import stored as three_models
from tests.runtime.server.harness import Running, eventually, running
from tests.runtime.server.page.looking import HOSTILE, Element, seen
from zoo.keys import make_key, set_price
from zoo.money import amount_of, price_of
from zoo.records import KeyUsage
from zoo.store import Store

OWN = "the-server's-own"
ASK = {"model": "org/base", "prompt": [5, 6, 7], "max_tokens": 4}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with three_models(tmp_path / "store") as store:
        yield store


@pytest.fixture
def served(tokenizer: Tokenizer, store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setattr(key_book, "PAUSE", 0.05)
    with running(tokenizer, store=store, config=ServerConfig(api_key=OWN, client_keys=True)) as server:
        yield server


def rows(page: Element) -> dict[str, list[str]]:
    """Return the cells behind each key's name."""
    found = page.one("table", class_="keys").one("tbody").all("tr")
    return {row.one("th").text: [cell.text for cell in row.all("td")] for row in found}


def test_each_key_is_shown_with_its_limits_and_what_it_has_used(served: Running, store: Store) -> None:
    with served.http() as http:
        assert "zoo key NAME --create" in seen(http, "/ui/keys").text
        secret = make_key(store, "team", ["org/base", "org/fine"], 6000, 14, priority=3)
        assert "so everything is free" in seen(http, "/ui/keys").text
        set_price(store, "org/base", price_of("1"), price_of("2.5"))
        other = make_key(store, "another")
        assert rows(seen(http, "/ui/keys")) == {
            "another": ["all", "0", "any", "0", "any", "0.00", "any", "0", "0", "0"],
            "team": ["org/base, org/fine", "0", "6,000", "0", "14", "0.00", "any", "0", "0", "3"],
        }
        with httpx.Client(base_url=served.address, headers={"x-api-key": secret}, trust_env=False) as client:
            # The server reads keys and prices together, so that it knows the price once it knows the later key.
            later = {"x-api-key": other}
            assert eventually(lambda: client.get("/v1/models", headers=later).status_code == 200)
            for _ in range(2):
                assert client.post("/v1/completions", json=ASK).status_code == 200
            assert client.get("/ui/keys").status_code in (303, 403)
            used = ["org/base, org/fine", "2", "6,000", "14 used up", "14", "0.000026", "any", "6", "8", "3"]
            assert eventually(lambda: rows(seen(http, "/ui/keys"))["team"] == used, 10)
            assert client.post("/v1/completions", json=ASK).status_code == 429
            assert "so everything is free" not in seen(http, "/ui/keys").text
        page = http.get("/ui/keys").text
        assert secret not in page and other not in page and "zoo-" not in page
        assert not [key for key in keys_of(store) if key in page]


def keys_of(store: Store) -> list[str]:
    with store.catalog.reading() as reader:
        found = reader.keys()
    return [key.principal for key in found]


def test_usage_by_model_is_shown_with_its_cost_and_a_spent_budget(
    served: Running, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_key(store, "team", money_per_day=amount_of("0.5"))
    make_key(store, "rich", money_per_day=amount_of("1.25"))
    today = str(datetime.now(UTC).date())
    with store.catalog.writing() as writer:
        used = [KeyUsage("team", today, 4), KeyUsage("team", today, 0, 70, 30, HOSTILE, 3, amount_of("0.5"))]
        used += [KeyUsage("rich", today, 0, 5_000, 1, "org/base", 2, amount_of("1.2499999999"), 4_000)]
        used += [KeyUsage("rich", today, 0, 1, 1, "org/fine", 1)]
        writer.add_key_usage(used)
    with served.http() as http:
        page = seen(http, "/ui/keys")
        assert rows(page)["team"][5:7] == ["0.50 used up", "0.50"]
        assert rows(page)["rich"][5:7] == ["1.2499999999", "1.25"]
        assert by_model(page) == [
            ["rich", "org/base", "2", "5,000", "4,000", "1", "1.2499999999"],
            ["team", HOSTILE, "3", "70", "0", "30", "0.50"],
            ["rich", "org/fine", "1", "1", "0", "1", "0.00"],
        ]
        assert not page.all("table", class_="months")
        monkeypatch.setattr(view, "MOST_SHOWN", 2)
        page = seen(http, "/ui/keys")
        assert len(by_model(page)) == 2 and "1 more are not shown" in page.text


def test_a_month_is_shown_where_it_is_bounded(served: Running, store: Store) -> None:
    make_key(store, "team", money_per_month=amount_of("0.5"))
    make_key(store, "rich", tokens_per_month=1000, money_per_month=amount_of("2"))
    make_key(store, "any")
    make_key(store, "gone", tokens_per_month=1)
    today = datetime.now(UTC).date()
    with store.catalog.writing() as writer:
        writer.revoke_key("gone")
        days = [today.replace(day=1), today.replace(day=1) - timedelta(days=1)]
        for name in ("team", "rich", "any", "gone"):
            writer.add_key_usage([KeyUsage(name, str(day), 1, 700, 300, "m", 1, amount_of("0.5")) for day in days])
    with served.http() as http:
        found = seen(http, "/ui/keys").one("table", class_="months").one("tbody").all("tr")
    assert [[cell.text for cell in (row.one("th"), *row.all("td"))] for row in found] == [
        ["rich", "1,000 used up", "1,000", "0.50", "2.00"],
        ["team", "1,000", "any", "0.50 used up", "0.50"],
    ]


def by_model(page: Element) -> list[list[str]]:
    found = page.one("table", class_="usage").one("tbody").all("tr")
    return [[row.one("th").text, *(cell.text for cell in row.all("td"))] for row in found]


def test_a_revoked_key_stands_behind_the_valid_ones_and_other_days_do_not_count(served: Running, store: Store) -> None:
    make_key(store, "a")
    make_key(store, "b")
    today = datetime.now(UTC).date()
    with store.catalog.writing() as writer:
        writer.revoke_key("a")
        days = [KeyUsage("b", str(today - timedelta(days=1)), 5, 50, 500), KeyUsage("a", str(today), 1, 2, 3)]
        writer.add_key_usage(days)
    with served.http() as http:
        found = rows(seen(http, "/ui/keys"))
    assert list(found) == ["b", "a revoked"] and found["b"][3] == "0" and found["a revoked"][3] == "5"
    make_key(store, "a")
    with served.http() as http:  # usage is by name
        found = rows(seen(http, "/ui/keys"))
    assert list(found) == ["a", "b", "a revoked"] and (found["a"][3], found["a revoked"][3]) == ("5", "0")


def test_only_so_many_are_shown(served: Running, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view, "MOST_SHOWN", 3)
    for number in range(5):
        make_key(store, f"key-{number}", [f"org/{name}" for name in ("base", "fine", "spare")])
    with served.http() as http:
        page = seen(http, "/ui/keys")
    assert list(rows(page)) == ["key-0", "key-1", "key-2"] and "2 more are not shown" in page.text


def test_without_a_key_of_its_own_a_server_shows_none(tokenizer: Tokenizer, store: Store) -> None:
    make_key(store, "team", ["org/fine"])
    with running(tokenizer, store=store) as server, server.http() as http:
        page = seen(http, "/ui/keys")
        assert "team" not in page.text and "has no key" in page.text and not page.all("table")
    with running(tokenizer, store=store, config=ServerConfig(api_key=OWN)) as server:
        with server.http() as http:
            assert "without --client-keys" in seen(http, "/ui/keys").text
        assert httpx.get(f"{server.address}/ui/keys", trust_env=False).status_code == 303
