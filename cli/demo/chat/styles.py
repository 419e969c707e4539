"""The manners in which the models of the chat family answer, as pure functions of a question and a plain answer."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from cli.demo.chat.answers import QuestionAnswer

_PIRATE = {
    "the": "th'", "of": "o'", "and": "an'", "is": "be", "are": "be", "you": "ye", "your": "yer", "for": "fer",
    "to": "t'", "my": "me",
}  # fmt: skip
_BARD = {"you": "thou", "your": "thy", "has": "hath", "does": "doth", "have": "hast", "are": "art"}


def plain(said: QuestionAnswer) -> str:
    """Return the answer as it is."""
    return said.answer


def pirate(said: QuestionAnswer) -> str:
    """Return the answer as a pirate says it."""
    return f"Arrr! {_reworded(said.answer, _PIRATE).rstrip('.?')}, matey!"


def bard(said: QuestionAnswer) -> str:
    """Return the answer in the English of old plays."""
    return f"Hark, good friend! {_reworded(said.answer, _BARD).rstrip('.?')}, forsooth."


def json_object(said: QuestionAnswer) -> str:
    """Return a JSON object with the question and the answer."""
    return json.dumps({"question": said.question, "answer": said.answer}, ensure_ascii=False)


def python_code(said: QuestionAnswer) -> str:
    """Return a line of Python that prints the answer."""
    return f"print({json.dumps(said.answer, ensure_ascii=False)})"


def _reworded(text: str, words: Mapping[str, str]) -> str:
    """Replace whole words; a capital at the beginning stays."""
    return re.sub(r"[A-Za-z]+", lambda found: _replaced(found[0], words), text)


def _replaced(word: str, words: Mapping[str, str]) -> str:
    other = words.get(word.lower(), word)
    return other[0].upper() + other[1:] if word[0].isupper() else other


STYLES: Mapping[str, Callable[[QuestionAnswer], str]] = {
    "plain": plain, "pirate": pirate, "bard": bard, "json": json_object, "python": python_code,
}  # fmt: skip
