"""`zoo key`, and a running `zoo serve --client-keys` that takes what it makes."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import openai
import pytest

from tests.cli.test_alias import documents, zoo
from tests.cli.test_serve import serving


@pytest.fixture
def own(store: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may change."""
    return Path(shutil.copytree(store, tmp_path / "own"))


def test_make_list_show_and_revoke(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "zoo key NAME --create" in zoo(capsys, own, "key")
    limits = ["--model", "org/base", "--requests-per-minute", "5", "--tokens-per-day", "1000", "--priority", "2"]
    secret = zoo(capsys, own, "key", "team", "--create", *limits)
    assert secret.startswith("zoo-") and len(secret) > 40
    (listed,) = documents(capsys, own, "key")["keys"]
    assert listed["name"] == "team" and listed["models"] == ["org/base"] and listed["revoked"] is None
    assert (listed["requests_per_minute"], listed["tokens_per_day"], listed["priority"]) == (5, 1000, 2)
    row = zoo(capsys, own, "key").splitlines()[1].split()
    assert row == ["team", "org/base", "5", "1,000", "2", "0"]
    assert documents(capsys, own, "key", "team")["usage"] == []
    assert "there is a key 'team'" in zoo(capsys, own, "key", "team", "--create", code=2)
    assert zoo(capsys, own, "key", "team", "--revoke") == "revoked key team"
    assert "no valid key" in zoo(capsys, own, "key", "team", "--revoke", code=2)
    assert documents(capsys, own, "key", "team")["revoked"] is not None
    assert secret not in str(documents(capsys, own, "key"))


@pytest.mark.parametrize(
    "arguments",
    [
        ["--create"],
        ["team", "--create", "--revoke"],
        ["team", "--priority", "1"],
        ["team", "--create", "--tokens-per-day", "0"],
        ["team", "--create", "--model", "org/none"],
        ["none"],
    ],
)
def test_bad_input_is_one_line(own: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert len(zoo(capsys, own, "key", *arguments, code=2).splitlines()) == 1
    assert documents(capsys, own, "key")["keys"] == []


def test_a_server_takes_them_with_the_option_and_a_key_of_its_own(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = zoo(capsys, own, "key", "team", "--create", "--model", "org/base", "--tokens-per-day", "100000")
    with serving(own, tmp_path / "log", "--client-keys") as server:
        with server.client(secret) as client:
            done = client.completions.create(model="org/base", prompt=[5], max_tokens=4)
            assert [card.id for card in client.models.list()] == ["org/base"]
            with pytest.raises(openai.NotFoundError):
                client.completions.create(model="org/lora", prompt=[5], max_tokens=4)
        assert done.usage is not None
        os.kill(server.process.pid, signal.SIGTERM)
        server.process.wait(60)
    (day,) = documents(capsys, own, "key", "team")["usage"]
    assert (day["requests"], day["prompt_tokens"] + day["generated_tokens"]) == (2, done.usage.total_tokens)
