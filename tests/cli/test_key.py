"""`zoo key`, and a running `zoo serve --client-keys` that takes what it makes."""

from __future__ import annotations

import os
import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path

import openai
import pytest

from tests.cli.test_alias import documents, zoo
from tests.cli.test_serve import serving
from zoo.api import Zoo
from zoo.money import amount_of
from zoo.records import KeyUsage


@pytest.fixture
def own(store: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may change."""
    return Path(shutil.copytree(store, tmp_path / "own"))


def test_make_list_show_and_revoke(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "zoo key NAME --create" in zoo(capsys, own, "key")
    limits = ["--model", "org/base", "--requests-per-minute", "5", "--tokens-per-day", "1000", "--priority", "2"]
    limits += ["--money-per-day", "2.5", "--tokens-per-month", "20000", "--money-per-month", "40"]
    secret = zoo(capsys, own, "key", "team", "--create", *limits)
    assert secret.startswith("zoo-") and len(secret) > 40
    (listed,) = documents(capsys, own, "key")["keys"]
    assert listed["name"] == "team" and listed["models"] == ["org/base"] and listed["revoked"] is None
    assert (listed["requests_per_minute"], listed["tokens_per_day"], listed["priority"]) == (5, 1000, 2)
    assert listed["money_per_day"] == "2.50"
    assert (listed["tokens_per_month"], listed["money_per_month"]) == (20000, "40.00")
    row = zoo(capsys, own, "key").splitlines()[1].split()
    assert row == ["team", "org/base", "5", "1,000", "2.50", "20,000", "40.00", "2", "0", "0.00", "0", "0.00"]
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
        ["team", "--create", "--money-per-day", "0"],
        ["team", "--create", "--money-per-day", "-1"],
        ["team", "--create", "--money-per-day", "1e3"],
        ["team", "--money-per-day", "1"],
        ["team", "--tokens-per-month", "1"],
        ["team", "--create", "--tokens-per-month", "0"],
        ["team", "--create", "--money-per-month", "0"],
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
    secret = zoo(capsys, own, "key", "team", "--create", "--model", "org/base", "--money-per-day", "100")
    zoo(capsys, own, "price", "org/base", "--input", "0.25", "--output", "1")
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
    cost = f"0.0000{day['prompt_tokens'] * 25 + day['generated_tokens'] * 100:04}".rstrip("0")
    (model,) = day["models"]
    assert (model["model"], model["answers"], model["cost"], day["cost"]) == ("org/base", 1, cost, cost)
    whole, of_model = (line.split() for line in zoo(capsys, own, "key", "team").splitlines()[1:])
    assert whole[1:4] == ["all", "2", "1"] and of_model[:2] == ["org/base", "1"] and whole[-1] == of_model[-1] == cost


def test_usage_is_shown_by_day_and_model_and_what_costs_nothing_is_free(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo(capsys, own, "key", "team", "--create")
    today = datetime.now(UTC).date()
    before = str(today - timedelta(days=1))
    with Zoo(own) as opened, opened.store.catalog.writing() as writer:
        used = [KeyUsage("team", before, 3, 10, 20), KeyUsage("team", str(today), 2)]
        used += [KeyUsage("team", str(today), 0, 1, 2, "b", 1, amount_of("0.7")), KeyUsage("other", str(today), 9)]
        used += [KeyUsage("team", str(today), 0, 4000, 5, "a", 7, 0, 900), KeyUsage("team", "2020-01-01", 5)]
        writer.add_key_usage(used)
    assert [line.split() for line in zoo(capsys, own, "key", "team").splitlines()[1:]] == [
        [before, "all", "3", "0", "10", "0", "20", "free"],
        [str(today), "all", "2", "8", "4,001", "900", "7", "0.70"],
        ["a", "7", "4,000", "900", "5", "free"],
        ["b", "1", "1", "0", "2", "0.70"],
    ]
    assert zoo(capsys, own, "key").splitlines()[1].split() == ["team", "all", "0", "4,008", "0.70"]
    (key,) = documents(capsys, own, "key")["keys"]
    (day,) = key["usage"]
    assert (day["requests"], day["cost"], [each["model"] for each in day["models"]]) == (2, "0.70", ["a", "b"])
    month, earlier = key["this_month"], 30 if before[:7] == str(today)[:7] else 0
    assert (month["month"], month["cached_tokens"], month["cost"]) == (str(today)[:7], 900, "0.70")
    assert month["prompt_tokens"] + month["generated_tokens"] == 4008 + earlier
    assert documents(capsys, own, "key", "team")["this_month"] == month
    zoo(capsys, own, "key", "bounded", "--create", "--money-per-month", "3")
    headings, _, row = (line.split() for line in zoo(capsys, own, "key").splitlines())
    assert headings[2] == "money/month" and row == ["bounded", "all", "3.00", "0", "0", "0.00", "0", "0.00"]


def test_prices_are_set_listed_and_removed(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "everything is free" in zoo(capsys, own, "price")
    zoo(capsys, own, "price", "org/base", "--input", "0.25", "--output", "1", "--cached-input", "0.025")
    zoo(capsys, own, "price", "--default", "--input", "0.1", "--output", "0.0375")
    assert [line.split() for line in zoo(capsys, own, "price").splitlines()[1:]] == [
        ["(all", "others)", "0.10", "0.10", "0.0375"],
        ["org/base", "0.25", "0.025", "1.00"],
    ]
    listed = [{"model": "org/base", "input": "0.25", "cached_input": "0.025", "output": "1.00"}]
    assert documents(capsys, own, "price", "org/base")["prices"] == listed
    assert documents(capsys, own, "price", "--default", "--remove") == {"removed": None}
    assert documents(capsys, own, "price")["prices"] == listed
    assert zoo(capsys, own, "price", "org/base", "--remove") == "removed the price of org/base"


@pytest.mark.parametrize(
    "arguments",
    [
        ["org/base", "--input", "1"],
        ["org/base", "--cached-input", "1"],
        ["org/base", "--cached-input", "1", "--remove"],
        ["org/base", "--default", "--input", "1", "--output", "1"],
        ["--input", "1", "--output", "1"],
        ["org/base", "--input", "1", "--output", "1", "--remove"],
        ["org/base", "--input", "0.00001", "--output", "1"],
        ["org/none", "--input", "1", "--output", "1"],
        ["org/base", "--remove"],
        ["org/base"],
        ["--remove"],
        ["--default"],
    ],
)
def test_bad_prices_are_one_line(own: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert len(zoo(capsys, own, "price", *arguments, code=2).splitlines()) == 1
    assert documents(capsys, own, "price")["prices"] == []
