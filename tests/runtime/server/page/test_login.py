"""The login: what a browser may do without the key, with its cookie, and if another site uses it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from http.cookies import SimpleCookie

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.page.sessions import MOST_SESSIONS, SESSION_SECONDS, Sessions
from tests.runtime.server.harness import Running, running
from tests.runtime.server.page.looking import seen
from zoo.store import Store

KEY = "s3cret-é key"
ASK = {"model": "org/base", "prompt": "hi", "max_tokens": 2}


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer, stored: Store) -> Iterator[Running]:
    with running(tokenizer, store=stored, config=ServerConfig(api_key=KEY)) as started:
        yield started


@pytest.fixture
def browser(server: Running) -> Iterator[httpx.Client]:
    """A client with a jar of cookies and without the key."""
    with httpx.Client(base_url=server.address, timeout=20, trust_env=False) as client:
        yield client


def logged_in(browser: httpx.Client) -> httpx.Response:
    response = browser.post("/ui/login", data={"key": KEY, "next": "/ui/lineage"})
    assert response.status_code == 303 and response.headers["location"] == "/ui/lineage"
    return response


def test_without_the_key_every_view_leads_to_the_login(browser: httpx.Client) -> None:
    for path in ("/", "/ui/lineage", "/ui/models/org/base", "/ui/nothing"):
        response = browser.get(path)
        assert response.status_code == 303 and response.headers["location"].startswith("/ui/login?next=%2F")
        assert "org/" not in response.text
    form = seen(browser, "/ui/login?next=/ui/lineage").one("form", action="/ui/login")
    assert form.one("input", name="next").attributes["value"] == "/ui/lineage"
    for path in ("/v1/models", "/zoo/state", "/zoo/models", "/nothing"):
        assert browser.get(path).status_code == 401
    assert browser.get("/ui/zoo.css").status_code == 200


def test_the_cookie_stands_for_the_key_and_does_not_hold_it(browser: httpx.Client) -> None:
    cookie = SimpleCookie(logged_in(browser).headers["set-cookie"])
    ((name, morsel),) = cookie.items()
    assert name.startswith("zoo_session_") and morsel["httponly"] and morsel["samesite"] == "strict"
    assert morsel["path"] == "/" and 0 < int(morsel["max-age"]) <= 24 * 3600 and not morsel["domain"]
    assert len(morsel.value) >= 40 and "s3cret" not in morsel.value
    assert seen(browser, "/").one("h1").text == "Models"
    assert browser.get("/zoo/state").status_code == 200
    with httpx.Client(base_url=str(browser.base_url), trust_env=False) as other:
        for value in (morsel.value[:-1], morsel.value + "x", "", "x", "é".encode().decode("latin-1"), '"', "a" * 4000):
            assert other.get("/", headers={"Cookie": f"{name}={value}".encode("latin-1")}).status_code == 303
        assert other.get("/", headers={"Cookie": f"{name}={morsel.value}"}).status_code == 200


def test_a_cookie_alone_runs_nothing(browser: httpx.Client) -> None:
    """The browser sends the cookie whatever page asks; a header of its own only a page of this server can add."""
    logged_in(browser)
    assert browser.post("/v1/completions", json=ASK).status_code == 401
    assert browser.post("/zoo/models/org/spare/load").status_code == 401
    assert browser.delete("/v1/files/x").status_code == 401
    assert browser.post("/v1/completions", json=ASK, headers={"X-Zoo-Page": "1"}).status_code == 200
    browser.cookies.clear()
    assert browser.post("/v1/completions", json=ASK, headers={"X-Zoo-Page": "1"}).status_code == 401


def test_a_wrong_key_gives_no_cookie(browser: httpx.Client) -> None:
    for key in ("", "x", KEY + "x", KEY[:-1], "\ud800".encode("utf-8", "surrogatepass"), b"\xff"):
        response = browser.post("/ui/login", data={"key": key, "next": "/"})
        assert response.status_code == 401 and "set-cookie" not in response.headers
        assert "not the key" in response.text
    assert browser.post("/ui/login", content=b"").status_code == 401
    assert browser.post("/ui/login", content=b"key=" + b"x" * 9000).status_code == 413
    assert browser.post("/ui/login", content=b"&".join(b"a=b" for _ in range(100))).status_code == 400


def test_another_site_cannot_log_a_browser_in_or_out(browser: httpx.Client) -> None:
    for origin in ("https://elsewhere.example", "null", str(browser.base_url).replace("http", "http", 1) + "0"):
        response = browser.post("/ui/login", data={"key": KEY}, headers={"Origin": origin})
        assert response.status_code == 403 and "set-cookie" not in response.headers
    own = str(browser.base_url).rstrip("/")
    assert browser.post("/ui/login", data={"key": KEY}, headers={"Origin": own}).status_code == 303
    assert browser.post("/ui/logout", headers={"Origin": "https://elsewhere.example"}).status_code == 403
    assert browser.get("/").status_code == 200


def test_logging_out_ends_the_session_itself(browser: httpx.Client) -> None:
    kept = SimpleCookie(logged_in(browser).headers["set-cookie"])
    name, value = next((name, morsel.value) for name, morsel in kept.items())
    assert browser.post("/ui/logout").headers["location"] == "/ui/login"
    assert not browser.cookies
    assert browser.get("/", headers={"Cookie": f"{name}={value}"}).status_code == 303


@pytest.mark.parametrize(
    "target",
    ["https://elsewhere.example/", "//elsewhere.example", "/\\elsewhere.example", "/ui/../..//elsewhere.example",
     "javascript:alert(1)", "/ui/x\r\nSet-Cookie: a=b", "/ui/login", "/v1/models", ""],
)  # fmt: skip
def test_a_login_leads_to_views_of_this_server_only(browser: httpx.Client, target: str) -> None:
    response = browser.post("/ui/login", data={"key": KEY, "next": target})
    assert response.status_code == 303 and response.headers["location"] == "/"
    assert (
        seen(browser, "/ui/login?" + str(httpx.QueryParams(next=target))).one("input", name="next").attributes["value"]
        == "/"
    )


def test_a_server_without_a_key_needs_no_login(tokenizer: Tokenizer, stored: Store) -> None:
    with running(tokenizer, store=stored) as server, server.http() as http:
        assert http.get("/").status_code == 200 and not seen(http, "/").all("form", action="/ui/logout")
        assert http.get("/ui/login").headers["location"] == "/"
        assert http.post("/ui/login", data={"key": "x"}).status_code == 303


def test_cookies_are_read_in_time_linear_in_their_length(browser: httpx.Client) -> None:
    """Quoted values with many backslashes took `http.cookies` 20 s, before any key was checked."""
    port = browser.base_url.port
    for cookie in ('a="' + "\\a" * 30_000 + '"', "a=" * 30_000, ";" * 60_000, f"zoo_session_{port}=x;" * 2500):
        began = time.monotonic()
        assert browser.get("/", headers={"Cookie": cookie}).status_code == 303
        assert time.monotonic() - began < 15


def test_sessions_end_with_time_and_are_bounded() -> None:
    now = 0.0
    sessions = Sessions("key", lambda: now)

    def admitted(name: str | None) -> bool:
        cookie = f"zoo_session_8000={name}".encode()
        return sessions.admits({"method": "GET", "server": ("::1", 8000), "headers": [(b"cookie", cookie)]})

    first, second = sessions.begin("key"), sessions.begin("key")
    assert sessions.begin("Key") is None and first != second and admitted(first) and admitted(second)
    now = SESSION_SECONDS - 1.0
    third = sessions.begin("key")
    assert admitted(first)
    now = SESSION_SECONDS + 1.0
    assert not admitted(first) and not admitted(second) and admitted(third)
    newest = [sessions.begin("key") for _ in range(MOST_SESSIONS)]
    assert not admitted(third) and all(map(admitted, newest))
