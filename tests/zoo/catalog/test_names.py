"""Model names are matched exactly first, then by unique ending, then by ending ignoring case."""

from __future__ import annotations

import pytest

from zoo.catalog.names import check_name, resolve
from zoo.errors import AmbiguousName, InputError, NotFound

NAMES = ["meta-llama/Llama-2-7b", "meta-llama/Llama-2-13b", "other/llama-2-7B-chat", "chat", "7b-lora"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b"),
        ("7b", "meta-llama/Llama-2-7b"),
        ("Llama-2-13b", "meta-llama/Llama-2-13b"),
        ("LLAMA-2-13B", "meta-llama/Llama-2-13b"),
        ("7b-chat", "other/llama-2-7B-chat"),
        ("chat", "chat"),  # an exact name, though another name ends in it
        ("-lora", "7b-lora"),
    ],
)
def test_who_is_meant(typed: str, meant: str) -> None:
    assert resolve(typed, NAMES) == meant


def test_several_endings_are_listed() -> None:
    with pytest.raises(AmbiguousName, match="meta-llama/Llama-2-13b, meta-llama/Llama-2-7b"):
        resolve("b", NAMES)
    with pytest.raises(AmbiguousName, match="A/x, B/x"):
        resolve("X", ["A/x", "B/x", "c"])


def test_nobody_is_meant() -> None:
    with pytest.raises(NotFound, match="did you mean meta-llama/Llama-2-7b"):
        resolve("meta-llama/Llama-3-7b", NAMES)
    with pytest.raises(NotFound, match="the zoo has 7b-lora, chat"):
        resolve("zzzzzz", NAMES)
    with pytest.raises(NotFound):
        resolve("", NAMES)
    with pytest.raises(NotFound, match="the zoo is empty"):
        resolve("7b", [])


def test_the_error_stays_one_short_line() -> None:
    with pytest.raises(NotFound) as caught:
        resolve("x\ny" * 10_000, [f"model-{i}" for i in range(500)])
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert "and 492 more" in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "meta-llama/Llama-2-7b",
        "chat@exit-2",
        "a:b#c",
        "a/b@step-10",
        "m@delta-r8+norms",
        "...",
        "a..b/.hidden",
        "Modèle 7 B",
        "x" * 255,
    ],
)
def test_legal_names_are_kept_as_they_are(name: str) -> None:
    assert check_name(name) == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        " ",
        "a ",
        "../evil",
        "a/../b",
        "..",
        ".",
        "a/.",
        "/etc/passwd",
        "a//b",
        "a/",
        "a\\b",
        "a\0b",
        "a\nb",
        "a\x1b[31mb",
        "a\u202eb",
        "a\ud800",
        "-rf",
        "--name",
        "x" * 256,
    ],
)
def test_names_that_leave_a_folder_or_hide_what_they_are_are_refused(name: str) -> None:
    with pytest.raises(InputError, match="cannot be a model's name"):
        check_name(name)
