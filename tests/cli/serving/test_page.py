"""The page of a server that is started as users start it."""

from __future__ import annotations

from pathlib import Path

import httpx

from tests.cli.test_serve import serving
from tests.runtime.server.harness import eventually
from tests.runtime.server.page.looking import parsed, seen


def test_the_zoos_page_is_at_the_root(store: Path, tmp_path: Path) -> None:
    with (
        serving(store, tmp_path / "log", "base", "lora") as served,
        httpx.Client(base_url=served.address, trust_env=False, timeout=60, headers={"X-Zoo-Page": "1"}) as browser,
    ):
        assert browser.get("/").headers["location"] == "/ui/login?next=%2F"
        assert browser.post("/ui/login", data={"key": "k3y"}).status_code == 303
        table = seen(browser, "/").one("table", class_="models").one("tbody")
        assert [row.one("th").text for row in table.all("tr")] == [
            "org/bare",
            "org/base served",
            "org/bloom",
            "org/lora served",
        ]
        assert len(seen(browser, "/ui/models/org/lora").one("svg", class_="strip").all("circle", class_="adapter")) > 0
        assert "org/lora" in seen(browser, "/ui/live").one("div", id="live").text
        for work, ending in (("verify", "all sound."), ("gc", "Removed: 0 objects, 0 B.")):
            assert browser.post(f"/ui/upkeep/{work}").status_code == 202
            assert eventually(lambda: "data-running" not in browser.get("/ui/upkeep/state").text, 30)
            assert parsed(browser.get("/ui/upkeep/state").text).text.endswith(ending)
        ask = {"model": "lora", "prompt": "def hello", "max_tokens": 3}
        assert browser.post("/v1/completions", json=ask).json()["usage"]["completion_tokens"] > 0
