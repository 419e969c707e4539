"""Guessing keys in the login form: bounded per address and altogether, and nothing else is shut out by it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from runtime.config import ServerConfig
from runtime.frontend.tokenizer import Tokenizer
from runtime.server.page import login_limit
from runtime.server.page.login_limit import MOST, MOST_OF_ADDRESS, LoginLimit
from tests.runtime.server.harness import Running, running
from zoo.store import Store

KEY = "s3cret"


@pytest.fixture
def server(tokenizer: Tokenizer, stored: Store) -> Iterator[Running]:
    with running(tokenizer, store=stored, config=ServerConfig(api_key=KEY)) as started:
        yield started


def logging_in(server: Running, key: str, host: int) -> httpx.Response:
    """Send the form from an address of this machine: 127.0.0.`host`."""
    source = httpx.HTTPTransport(local_address=f"127.0.0.{host}")
    with httpx.Client(base_url=server.address, transport=source, timeout=20) as browser:
        return browser.post("/ui/login", data={"key": key})


def check_refused(response: httpx.Response) -> None:
    assert response.status_code == 429 and "set-cookie" not in response.headers
    assert response.headers["content-type"].startswith("text/html") and "wrong keys" in response.text
    assert 1 <= int(response.headers["retry-after"]) <= 60


def test_an_address_that_guesses_is_refused_and_the_rest_is_not(server: Running) -> None:
    for _ in range(MOST_OF_ADDRESS):
        assert logging_in(server, "wrong", 1).status_code == 401
    check_refused(logging_in(server, "wrong", 1))
    check_refused(logging_in(server, KEY, 1))
    assert logging_in(server, KEY, 2).status_code == 303
    with server.http() as http:  # the key in a header, from the address that was refused
        assert http.get("/zoo/state").status_code == 200
        assert http.get("/ui/login").status_code == 200


def test_right_keys_are_not_counted(server: Running) -> None:
    for _ in range(MOST_OF_ADDRESS - 1):
        assert logging_in(server, "wrong", 1).status_code == 401
    for _ in range(5):
        assert logging_in(server, KEY, 1).status_code == 303
    assert logging_in(server, "wrong", 1).status_code == 401
    check_refused(logging_in(server, KEY, 1))


def test_many_addresses_are_bounded_together(server: Running) -> None:
    count = MOST // MOST_OF_ADDRESS
    for host in range(1, 1 + count):
        for _ in range(MOST_OF_ADDRESS):
            assert logging_in(server, "wrong", host).status_code == 401
    check_refused(logging_in(server, "wrong", 1 + count))
    check_refused(logging_in(server, KEY, 1 + count))


def test_guesses_that_come_at_once_are_counted_one_by_one(server: Running) -> None:
    found: list[int] = []
    guesses = [threading.Thread(target=lambda: found.append(logging_in(server, "x", 1).status_code)) for _ in range(25)]
    for guess in guesses:
        guess.start()
    for guess in guesses:
        guess.join()
    assert sorted(found) == [401] * MOST_OF_ADDRESS + [429] * (25 - MOST_OF_ADDRESS)


def test_after_a_while_the_form_takes_keys_again(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(login_limit, "SECONDS", 3.0)
    for _ in range(MOST_OF_ADDRESS):
        logging_in(server, "wrong", 1)
    refused = logging_in(server, KEY, 1)
    if refused.status_code == 429:  # else this machine took three seconds for ten requests
        time.sleep(int(refused.headers["retry-after"]))
        assert logging_in(server, KEY, 1).status_code == 303


def test_failures_of_the_last_minute_count_and_no_more_are_kept() -> None:
    now = 0.0
    limit = LoginLimit(lambda: now)
    for at in range(MOST_OF_ADDRESS):
        assert limit.wait_seconds("10.0.0.1") is None
        now = float(at)
        limit.count_failure("10.0.0.1")
    assert limit.wait_seconds("10.0.0.1") == 60 - (MOST_OF_ADDRESS - 1) and limit.wait_seconds("10.0.0.2") is None
    now = 60.0
    assert limit.wait_seconds("10.0.0.1") is None
    limit.count_failure("10.0.0.1")
    assert limit.wait_seconds("10.0.0.1") == 1
    for number in range(1000):
        limit.count_failure(f"10.1.{number // 256}.{number % 256}")
    assert len(limit._failed) == MOST and limit.wait_seconds("10.9.9.9") == 60
    now = 121.0
    assert limit.wait_seconds("10.9.9.9") is None and not limit._failed


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("::ffff:10.0.0.1", "::ffff:10.0.0.2", False),
        ("fe80::1%eth0", "fe80::2%eth0", True),
        ("10.0.0.1", "10.0.0.2", False),
        ("", "", True),
    ],
)
def test_what_counts_as_one_address(one: str, other: str, same: bool) -> None:
    limit = LoginLimit(lambda: 0.0)
    for _ in range(MOST_OF_ADDRESS):
        limit.count_failure(one)
    assert (limit.wait_seconds(other) is not None) is same
