"""The held-out text that the built-in tasks and experiments are made of: files of the standard library that no demo model learns from."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from cli.demo.corpus import SLICES, Corpus, read_library

#: Names of the parts of the text.
SUBJECTS = SLICES


@cache
def _library() -> Corpus:
    return read_library()


def held_out(subject: str) -> Sequence[str]:
    """The texts of one of `SUBJECTS`, one per file. Raises InputError where the standard library has no sources."""
    return [text for text in _library().slice(subject).held_out if text.strip()]
