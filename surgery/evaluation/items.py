"""Questions made out of source files: which line comes next, which name was meant, how well is the text foreseen. Pure
and deterministic.

The same texts give the same questions in the same order, whatever the machine: places are drawn by a hash of where they
are. Knows nothing of where texts come from, of tokens, models or lm-eval.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

CHOICES = 4
#: Lines and characters that stand before a question: what a small context of 256 tokens holds.
_LINES_BEFORE = 10
_CHARACTERS_BEFORE = 560
#: Shorter lines are mostly brackets and keywords, which stand in every file; longer ones are rare.
_LINE_LENGTHS = range(12, 91)
_ATTRIBUTE = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]{3,})")


@dataclass(frozen=True, slots=True)
class Cloze:
    """A place in a file and four lines that could follow; `choices[answer]` is the line that does, the others are of
    other files.

    `context` ends with a newline; no choice has one.
    """

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Recall:
    """`context` ends with a dot, and `target` is the name behind it; the context has the name once more, further up."""

    context: str
    target: str


@dataclass(frozen=True, slots=True)
class _Line:
    """Line `number` of file `file`. `order` decides which places are drawn first."""

    file: int
    number: int
    text: str
    order: str

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())


def passages(texts: Sequence[str], most: int, characters: int) -> list[str]:
    """The first `characters` of each of the first `most` texts."""
    return [text[:characters] for text in texts[:most]]


def cloze_items(texts: Sequence[str], most: int, others: Sequence[str] = ()) -> list[Cloze]:
    """At most `most` questions about the texts, spread over them as their lines are.

    A wrong choice stands in another file (of `texts` or of `others`) at the same depth; of those drawn, the nearest in
    length are taken.
    """
    files = [text.splitlines() for text in (*texts, *(other for other in others if other not in texts))]
    lines = sorted(_lines(files), key=lambda line: line.order)
    pool = _by_indent(lines)
    items: list[Cloze] = []
    for line in lines:
        if len(items) == most:
            break
        wrong = _distractors(line, pool[line.indent])
        if line.file < len(texts) and line.number > 0 and len(wrong) == CHOICES - 1:
            items.append(_cloze(line, files[line.file], wrong))
    return items


def recall_items(texts: Sequence[str], most: int) -> list[Recall]:
    """At most `most` questions: attributes whose name stands in the context already, so that it can be known and not
    only guessed.
    """
    found = [(order, recall) for index, text in enumerate(texts) for order, recall in _recalls(index, text)]
    return [recall for _, recall in sorted(found, key=lambda pair: pair[0])[:most]]


def _lines(files: Sequence[Sequence[str]]) -> Iterator[_Line]:
    for file, lines in enumerate(files):
        for number, text in enumerate(lines):
            if len(text.strip()) in _LINE_LENGTHS and not text.lstrip().startswith("#"):
                yield _Line(file, number, text.rstrip(), _order(file, number, text))


def _order(*place: object) -> str:
    return hashlib.sha256("\0".join(map(str, place)).encode()).hexdigest()


def _by_indent(lines: Iterable[_Line]) -> Mapping[int, list[_Line]]:
    found: dict[int, list[_Line]] = defaultdict(list)
    for line in lines:
        found[line.indent].append(line)
    return found


#: Lines that compete to be a question's wrong choices.
_DRAWN = 24


def _distractors(line: _Line, others: Sequence[_Line]) -> list[str]:
    """Three lines of other files, all different. Which are drawn depends on the question's place; of those the nearest
    in length count.
    """
    start = int(line.order[:8], 16) % len(others)
    drawn: dict[str, None] = {}
    for step in range(min(len(others), 8 * _DRAWN)):
        other = others[(start + step) % len(others)]
        if other.file != line.file and other.text != line.text:
            drawn[other.text] = None
        if len(drawn) == _DRAWN:
            break
    return sorted(drawn, key=lambda text: abs(len(text) - len(line.text)))[: CHOICES - 1]


def _cloze(line: _Line, file: Sequence[str], wrong: Sequence[str]) -> Cloze:
    answer = int(line.order[8:16], 16) % CHOICES
    choices = (*wrong[:answer], line.text, *wrong[answer:])
    return Cloze(_before(file, line.number), choices, answer)


def _before(file: Sequence[str], number: int) -> str:
    """Whole lines above a line, as many as fit."""
    kept: list[str] = []
    for text in reversed(file[max(0, number - _LINES_BEFORE) : number]):
        if kept and sum(map(len, kept)) + len(text) > _CHARACTERS_BEFORE:
            break
        kept.append(text[-_CHARACTERS_BEFORE:])
    return "\n".join(reversed(kept)) + "\n"


def _recalls(index: int, text: str) -> Iterator[tuple[str, Recall]]:
    for found in _ATTRIBUTE.finditer(text):
        start, name = found.start(1), found.group(1)
        context = text[max(0, start - _CHARACTERS_BEFORE) : start]
        if re.search(rf"\b{name}\b", context):
            yield _order(index, start, name), Recall(context, name)
