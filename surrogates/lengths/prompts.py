"""Prompts from which answers of very different lengths follow: requests of people, or cuts of a text.

    questions   templates filled with subjects: a word, a sentence, a list, a story
    cuts        beginnings of a text, for models that only continue text

Contract: a function of its arguments, the same on every machine. No two prompts are equal.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from itertools import count

#: What to ask, by rough length of what follows.
TEMPLATES = (
    "Answer with one word: what colour is {a}?",
    "Reply with a number only: {m} plus {n}.",
    "Yes or no: is {a} larger than {b}?",
    "Name one thing that goes with {a}.",
    "What is the plural of {a}?",
    "Translate '{a}' into French. Give the word only.",
    "What is {m} times {n}?",
    "Which is older, {a} or {b}? Answer briefly.",
    "What is {a}? Answer in one sentence.",
    "Define {a} in one short sentence.",
    "Write a title for an article about {a} and {b}.",
    "Complete the sentence: {a} and {b} are",
    "Give me one tip on {a}.",
    "Use {a} in a sentence.",
    "List three facts about {a}.",
    "Name {k} kinds of {a}, one per line, without explanations.",
    "Give two differences between {a} and {b}.",
    "Write a haiku about {a}.",
    "Write a short message that invites a friend to see {a}.",
    "What is {a} used for?",
    "Explain {a} to a child.",
    "Describe {a} in a paragraph.",
    "Summarize what is known about {a} in {k} sentences.",
    "Why do people like {a}?",
    "How does {a} work?",
    "Count from 1 to {m}.",
    "Repeat the word {a} {k} times.",
    "List {m} words that have to do with {a}.",
    "Write a short story about {a} and {b}.",
    "Write a long, detailed story in which {a} meets {b}.",
    "Write an essay about the history of {a}.",
    "Write a detailed guide, step by step, on how to choose {a}.",
    "Compare {a} and {b} in detail, with advantages and disadvantages of each.",
    "Write a dialogue between a seller of {a} and a buyer of {b}.",
    "Write a Python function that sorts a list of {a} by size.",
    "Plan a week of lessons about {a}, day by day.",
)
SUBJECTS = (
    "a river", "the moon", "a bicycle", "bread", "a violin", "the ocean", "a lighthouse", "tea", "a spider", "snow",
    "a castle", "a bridge", "chess", "a volcano", "honey", "a clock", "the desert", "a whale", "paper", "a garden",
    "salt", "a train", "a mountain", "glass", "a library", "coffee", "an island", "a robot", "silk", "a harbour",
    "iron", "a forest", "a telescope", "rice", "a market", "thunder", "an orchard", "a camera", "wool", "a glacier",
    "a compass", "the theatre", "a horse", "cheese", "a windmill", "gold", "a school", "a tunnel", "an apple", "music",
)  # fmt: skip


def questions(number: int, seed: int = 0) -> list[str]:
    """Return so many different questions, spread evenly over the templates."""
    return list(questions_by_kind(number, seed))


def questions_by_kind(number: int, seed: int = 0) -> dict[str, int]:
    """Return the questions of `questions`, each with the number of its template."""
    made: dict[str, int] = {}
    for at in count():
        if len(made) == number or at > 50 * number:
            return made
        draws = _draws(f"{seed} {at}")
        first = next(draws) % len(SUBJECTS)
        second = (first + 1 + next(draws) % (len(SUBJECTS) - 1)) % len(SUBJECTS)
        numbers = {"k": 2 + next(draws) % 9, "m": 5 + next(draws) % 56, "n": 2 + next(draws) % 98}
        text = TEMPLATES[at % len(TEMPLATES)].format(a=SUBJECTS[first], b=SUBJECTS[second], **numbers)
        made.setdefault(text, at % len(TEMPLATES))
    raise AssertionError("unreachable")


def cuts(text: str, number: int, seed: int = 0, shortest: int = 20, longest: int = 400) -> list[str]:
    """Return so many different pieces of a text, each `shortest` to `longest` characters, cut between words."""
    made: dict[str, None] = {}
    for at in range(20 * number):
        if len(made) == number or len(text) <= longest:
            break
        draws = _draws(f"{seed} cut {at}")
        begin = next(draws) % (len(text) - longest)
        begin = text.rfind(" ", 0, begin) + 1
        piece = text[begin : begin + shortest + next(draws) % (longest - shortest + 1)]
        piece = piece[: piece.rfind(" ")] if " " in piece else piece
        if piece.strip():
            made.setdefault(piece)
    return list(made)


def _draws(name: str) -> Iterator[int]:
    """Yield random numbers that the name determines."""
    for at in count():
        yield int.from_bytes(hashlib.blake2b(f"{name} {at}".encode(), digest_size=8).digest(), "big")
