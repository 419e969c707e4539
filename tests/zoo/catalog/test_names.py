"""Names: exact first, then unique endings, then endings without regard to letter case."""

from __future__ import annotations

import pytest

from zoo.catalog.names import resolve
from zoo.errors import AmbiguousName, NotFound

NAMES = ["meta-llama/Llama-2-7b", "meta-llama/Llama-2-13b", "other/llama-2-7B-chat", "chat", "7b-lora"]


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("meta-llama/Llama-2-7b", "meta-llama/Llama-2-7b"),
        ("7b", "meta-llama/Llama-2-7b"),
        ("Llama-2-13b", "meta-llama/Llama-2-13b"),
        ("LLAMA-2-13B", "meta-llama/Llama-2-13b"),
        ("7b-chat", "other/llama-2-7B-chat"),
        ("chat", "chat"),  # a name, though another ends in it
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
