"""The page in Chromium: each view without a complaint, light and dark, wide and 400 pixels; forms, buttons, streams."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from tests.chromium import Browser, browsing
from tests.runtime.server.harness import Running, running
from tests.runtime.server.page.looking import family
from zoo.store import Store

pytestmark = pytest.mark.chromium
VIEWS = (
    "/",
    "/ui/lineage",
    "/ui/models/org/fine",
    "/ui/models/org/lora",
    "/ui/compare?a=org/fine&b=org/twin",
    "/ui/live",
    "/ui/playground",
    "/ui/keys",
    "/ui/upkeep",
    "/ui/patterns",
    "/docs",
    "/ui/models/nix",
)
#: Contrast of texts with what is behind them, as WCAG 2 counts it; large and disabled texts are left out.
CONTRAST = """
const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
const parts = (text) => (text.match(/[0-9.]+/g) || []).map(Number);
const behind = (e) => { for (; e; e = e.parentElement) { const c = parts(getComputedStyle(e).backgroundColor);
  if (c.length === 3 || c[3] > 0) return c.slice(0, 3); } return [255, 255, 255]; };
const found = [];
for (const e of document.querySelectorAll("body *")) {
  if (e.disabled || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
  if (!e.getClientRects().length || e.closest("svg, option, .skip")) continue;
  const style = getComputedStyle(e), [a, b] = [light(parts(style.color).slice(0, 3)), light(behind(e))];
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  if (ratio < 4.5) found.push(`${e.tagName} ${e.className} ${ratio.toFixed(2)}: ${e.textContent.trim().slice(0, 30)}`);
}
return found;
"""
#: Controls without a name, pictures without one, ids that occur twice, headings that leave out a level.
NAMES = """
const found = [];
for (const e of document.querySelectorAll("input:not([type=hidden]), select, textarea"))
  if (!e.labels.length && !e.getAttribute("aria-label")) found.push(`no label: ${e.outerHTML.slice(0, 80)}`);
for (const e of document.querySelectorAll("button, a[href]"))
  if (!e.textContent.trim() && !e.getAttribute("aria-label")) found.push(`no name: ${e.outerHTML.slice(0, 80)}`);
for (const e of document.querySelectorAll("svg"))
  if (!e.getAttribute("aria-label") && e.getAttribute("aria-hidden") !== "true")
    found.push(`no name: ${e.className.baseVal}`);
for (const e of document.querySelectorAll("progress, meter"))
  if (!e.getAttribute("aria-label") && !e.labels.length && !e.title) found.push(`no name: ${e.outerHTML.slice(0, 80)}`);
const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
found.push(...ids.filter((id, at) => ids.indexOf(id) !== at).map((id) => `twice: ${id}`));
let level = 0;
for (const e of document.querySelectorAll("h1, h2, h3")) { const next = Number(e.tagName[1]);
  if (next > level + 1) found.push(`level left out: ${e.textContent}`); level = next; }
return found;
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with browsing() as started:
        yield started


@pytest.fixture(scope="module")
def keyed(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    slow = lambda _: time.sleep(0.005)  # noqa: E731
    with (
        family(tmp_path_factory.mktemp("browser") / "store") as store,
        running(tokenizer, store=store, config=ServerConfig(api_key="k"), pace=slow) as started,
    ):
        yield started


def at(browser: Browser, path: str) -> bool:
    """Return whether a page is shown whole. A click that leads to another one may return before it is."""
    return bool(
        browser.run("return location.pathname") == path and browser.run("return document.readyState") == "complete"
    )


def log_in(browser: Browser, server: Running) -> None:
    browser.look(1000, 800)
    browser.open(f"{server.address}/ui/lineage")
    if browser.run("return location.pathname") == "/ui/login":
        browser.write("#key", "k")
        browser.click(".login button")
    assert browser.eventually(lambda: at(browser, "/ui/lineage"))


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1200, 400])
def test_views_are_sound(browser: Browser, server: Running, stored: Store, width: int, dark: bool) -> None:
    browser.look(width, 900, dark)
    for path in VIEWS:
        browser.open(server.address + path)
        here = f"{path} at {width}"
        complaints = [each for each in browser.complaints() if "404 (Not Found)" not in each]
        assert not complaints, here
        loaded = browser.run("return performance.getEntriesByType('resource').map((e) => e.name)")
        assert len(loaded) >= 2 and all(each.startswith(server.address) for each in loaded), here
        assert browser.run("return document.scrollingElement.scrollWidth") <= width, here
        assert browser.run(CONTRAST) == [], here
        assert browser.run(NAMES) == [], here
        ground = browser.run("return getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(255, 255, 255)") is not dark


def test_a_login_is_asked_for_and_ends(browser: Browser, keyed: Running) -> None:
    browser.look(1000, 800)
    browser.open(f"{keyed.address}/ui/lineage")
    browser.write("#key", "wrong")
    browser.click(".login button")
    assert browser.eventually(lambda: browser.run("return !!document.querySelector('#wrong')"))
    assert "not the key" in browser.text("#wrong")
    browser.write("#key", "k")
    browser.click(".login button")
    assert browser.eventually(lambda: at(browser, "/ui/lineage"))
    assert browser.run("return document.cookie") == ""
    assert "org/fine" in browser.text("svg.tree")
    browser.click("header form button")
    assert browser.eventually(lambda: at(browser, "/ui/login"))
    browser.open(f"{keyed.address}/")
    assert browser.run("return location.pathname") == "/ui/login"
    assert all("401" in each for each in browser.complaints())  # of the wrong key


def test_the_live_view_follows_without_loading_again(browser: Browser, keyed: Running) -> None:
    log_in(browser, keyed)
    browser.open(f"{keyed.address}/ui/live")
    assert browser.eventually(lambda: browser.text("#live-note").startswith("follows"))
    with keyed.client() as client:
        stream = client.completions.create(model="org/base", prompt="hi", max_tokens=240, stream=True)
        running_now = "#live .figure:first-child dd"
        assert browser.eventually(lambda: browser.text(running_now) == "1")
        stream.close()
        assert browser.eventually(lambda: browser.text(running_now) == "0")
    browser.open("about:blank")
    browser.complaints()


def test_the_playground_asks_several_models_at_once(browser: Browser, keyed: Running) -> None:
    log_in(browser, keyed)
    browser.open(f"{keyed.address}/ui/playground")
    browser.write("#prompt", "hello")
    browser.click("#playground button")
    assert browser.eventually(
        lambda: (
            browser.run("return [...document.querySelectorAll('.answer .end')].map((e) => e.textContent)")
            == ["length", "length"]
        )
    )
    answers = browser.run("return [...document.querySelectorAll('.answer')].map((e) => e.innerText)")
    assert "org/base" in answers[0] and "org/fine" in answers[1]
    assert (
        browser.run("return [...document.querySelectorAll('.answer .tokens')].map((e) => e.textContent)") == ["64"] * 2
    )
    rates = browser.run("return [...document.querySelectorAll('.answer .rate')].map((e) => Number(e.textContent))")
    assert all(1 < rate < 220 for rate in rates)  # 5 ms a step at least
    assert browser.run("return [...document.querySelectorAll('.served-by')].map((e) => e.textContent)") == [
        "org/base",
        "org/fine",
    ]
    with keyed.client() as client:
        expected = client.completions.create(model="org/fine", prompt="hello", max_tokens=64, temperature=0, seed=0)
    assert browser.run("return document.querySelectorAll('.answer pre')[1].textContent") == expected.choices[0].text
    assert not browser.complaints()


def test_what_is_wrong_is_said_in_its_answer_and_keys_ask(browser: Browser, keyed: Running) -> None:
    log_in(browser, keyed)
    browser.open(f"{keyed.address}/ui/playground?model=org/base")
    browser.run("document.getElementById('max_tokens').value = 4000")
    browser.write("#prompt", "hello\ue009\ue007")  # Control and Enter
    assert browser.eventually(lambda: "maximum context length" in browser.text(".answer .end.error"))
    browser.complaints()  # the refused request


def test_an_answer_is_stopped(browser: Browser, keyed: Running) -> None:
    log_in(browser, keyed)
    browser.open(f"{keyed.address}/ui/playground?model=org/base")
    browser.run("document.getElementById('max_tokens').value = 240")
    browser.write("#prompt", "hello")
    browser.click("#playground button")
    assert browser.eventually(lambda: int(browser.text(".answer .tokens") or 0) > 2)
    browser.click("#stop")
    assert browser.eventually(lambda: browser.text(".answer .end") == "stopped")
    assert browser.eventually(lambda: keyed.state()["running"] == 0)


def test_distances_are_measured_on_demand(browser: Browser, keyed: Running) -> None:
    log_in(browser, keyed)
    browser.open(f"{keyed.address}/ui/compare?a=org/fine&b=org/twin")
    assert browser.text("[data-pair='2']") == ""
    browser.click("#measure")
    assert browser.eventually(lambda: browser.text("#measure-note") == "over all weights that differ")
    assert float(browser.text("[data-pair='2']")) > 0 and browser.text("[data-pair='0']") == "0"
    assert not browser.complaints()


def test_the_store_is_verified_and_collected_by_buttons(browser: Browser, keyed: Running) -> None:
    log_in(browser, keyed)
    browser.open(f"{keyed.address}/ui/upkeep")
    browser.click("[data-start='/ui/upkeep/verify']")
    assert browser.eventually(lambda: "all sound" in browser.text("#upkeep"))
    browser.click("[data-start='/ui/upkeep/gc']")
    browser.accept()
    assert browser.eventually(lambda: "Removed: 0 objects" in " ".join(browser.text("#upkeep").split()))
    assert not browser.complaints()
