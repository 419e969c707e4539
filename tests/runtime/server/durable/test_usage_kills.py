"""Servers that are killed lose no usage of durable requests, and count none twice."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import postgres
from tests.runtime.server.aliases.looking import stored
from tests.runtime.server.durable.test_kills import BODY, LEASE, Child, lives, tokenizer_folder
from tests.runtime.server.durable.test_usage import counted
from tests.runtime.server.harness import eventually
from zoo.keys import make_key
from zoo.store import Store

__all__ = ["lives", "tokenizer_folder"]

OWN = {"Authorization": "Bearer the-server's-own"}
#: So rarely that it does not happen: what was used is exchanged with the catalogue at a server's start and end alone.
NEVER = ("--flush", "600")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with stored(tmp_path / "store") as store:
        yield store


def client(child: Child, secret: str) -> httpx.Client:
    headers = {"Authorization": f"Bearer {secret}"}
    return httpx.Client(base_url=child.address, headers=headers, timeout=120, trust_env=False)


def ask(http: httpx.Client, key: str = "a") -> httpx.Response:
    return http.post("/v1/completions", json=BODY, headers={"Idempotency-Key": key})


def end(child: Child) -> None:
    """Let a server end in order."""
    child.process.send_signal(signal.SIGTERM)
    assert child.process.wait(60) == 0


def test_a_server_that_is_killed_loses_no_usage(lives: Any, store: Store) -> None:
    secret, folder = make_key(store, "team"), ("--store", str(store.root))
    with lives(*folder, *NEVER) as child, client(child, secret) as http:
        for key in ("a", "b"):
            assert ask(http, key).status_code == 200
        child.kill()
    assert counted(store) == (0, 0, 0)
    with lives(*folder, *NEVER) as child:
        assert counted(store) == (2, 6, 80), "it is counted before the next server answers"
        end(child)
    assert counted(store) == (2, 6, 80)


@pytest.mark.parametrize(
    ("point", "at", "answered"),
    [
        ("written", 3, False),
        ("finalise", 1, False),
        ("answered", 1, False),
        ("fold", 1, True),
        ("folded", 1, True),
        ("unfolded", 2, True),
    ],
)
def test_a_request_is_counted_once_over_a_death(lives: Any, store: Store, point: str, at: int, answered: bool) -> None:
    """The death comes after the next exchange with the catalogue, if it does not come in one."""
    secret, folder = make_key(store, "team"), ("--store", str(store.root))
    death = ("--die", point, "--at", str(at), "--linger", "0" if answered else "0.4")
    with lives(*folder, *death) as child, client(child, secret) as http:
        if answered:
            assert ask(http).status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                ask(http)
        assert child.process.wait(60) == -signal.SIGKILL
    with lives(*folder) as child, client(child, secret) as http:
        assert ask(http).json()["usage"]["total_tokens"] == 43
        assert eventually(lambda: counted(store)[0] > 0)
        end(child)
    assert counted(store) == (1, 3, 40)


@pytest.mark.postgres
def test_a_server_that_was_stopped_past_its_lease_charges_nothing_again(
    lives: Any, store: Store, postgres_server: str
) -> None:
    secret, target = make_key(store, "team"), postgres.new_database(postgres_server)
    folder = ("--store", str(store.root), *LEASE)
    with (
        lives(*folder, "--pace", "0.1", target=target) as first,
        lives(*folder, target=target) as other,
        client(first, secret) as http,
        client(other, secret) as another,
        ThreadPoolExecutor() as pool,
    ):
        waiting = pool.submit(ask, http)
        with httpx.Client(base_url=first.address, headers=OWN, trust_env=False) as own:
            assert eventually(lambda: own.get("/zoo/state").json()["queue"]["running"] == 1)
        os.kill(first.process.pid, signal.SIGSTOP)
        try:
            assert ask(another).json()["usage"]["total_tokens"] == 43
        finally:
            os.kill(first.process.pid, signal.SIGCONT)
        assert waiting.result(60).status_code in (200, 503)
        assert eventually(lambda: ask(http, "b").status_code == 200)  # it takes part again
        end(first)
        end(other)
    assert counted(store) == (2, 6, 80)


@pytest.mark.postgres
def test_what_a_dead_server_has_left_is_counted_by_another_one(lives: Any, store: Store, postgres_server: str) -> None:
    secret, target = make_key(store, "team"), postgres.new_database(postgres_server)
    folder = ("--store", str(store.root), *LEASE)
    with lives(*folder, target=target) as other, client(other, secret) as another:
        with lives(*folder, *NEVER, target=target) as first, client(first, secret) as http:
            assert ask(http).status_code == 200
            first.kill()
        assert eventually(lambda: counted(store) == (1, 3, 40))
        assert ask(another).status_code == 200  # the same one
        end(other)
    assert counted(store) == (1, 3, 40)
