"""Make questions from source files: which line comes next, which name was meant, passages for likelihood.

Pure and deterministic: the same texts give the same questions in the same order on any machine, since places are drawn
by a hash of their position.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

CHOICES = 4
#: Lines and characters of context before a question: they fit into a small context of 256 tokens.
_LINES_BEFORE = 10
_CHARACTERS_BEFORE = 560
#: Lengths of lines used: shorter ones are mostly brackets and keywords common to all files; longer ones are rare.
_LINE_LENGTHS = range(12, 91)
_ATTRIBUTE = re.compile(r"\.([A-Za-z_][A-Za-z0-9_]{3,})")


@dataclass(frozen=True, slots=True)
class Cloze:
    """A place in a file and four lines that could follow.

    Fields:
        context: Ends with a newline; no choice has one.
        choices: One is the line that follows, the rest come from other files.
        answer: Index of the right choice.
    """

    context: str
    choices: tuple[str, ...]
    answer: int


@dataclass(frozen=True, slots=True)
class Recall:
    """A name to recall.

    Fields:
        context: Ends with a dot; contains the name once more before.
        target: The name after the dot.
    """

    context: str
    target: str


@dataclass(frozen=True, slots=True)
class _Line:
    """Line `number` of file `file`. `order` determines which places are drawn first."""

    file: int
    number: int
    text: str
    order: str

    @property
    def indent(self) -> int:
        return len(self.text) - len(self.text.lstrip())


def passages(texts: Sequence[str], most: int, characters: int) -> list[str]:
    """Return the first `characters` of each of the first `most` texts."""
    return [text[:characters] for text in texts[:most]]


def cloze_items(texts: Sequence[str], most: int, others: Sequence[str] = ()) -> list[Cloze]:
    """Return at most `most` questions about the texts, spread over them like their lines.

    Wrong choices come from another file (of `texts` or of `others`), at the same indentation; of the lines drawn, those
    nearest in length are used.
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
    """Return at most `most` questions: attributes with a name that the context already contains.

    So the name can be known and need not be guessed.
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


#: Number of lines drawn as candidates for a question's wrong choices.
_DRAWN = 24


def _distractors(line: _Line, others: Sequence[_Line]) -> list[str]:
    """Return three different lines of other files.

    The question's place determines which are drawn; of these, the nearest in length are returned.
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
    """Return as many whole lines above a line as fit."""
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
