"""The built-in text, used to train the demo's models: the sources of Python's standard library, in slices by subject.

Deterministic: the same Python gives the same corpus, in the same order, with the same held-out files. No network.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path

from zoo.errors import InputError

#: Folders that are left out: tests and graphics (absent from many builds), generated tables, third-party packages.
_SKIPPED_FOLDERS = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "encodings",
        "lib2to3",
        "pydoc_data",
        "ensurepip",
        "turtledemo",
        "tkinter",
        "idlelib",
        "distutils",
    )
)
#: Generated tables and frozen configuration.
_SKIPPED_FILES = re.compile(
    r"^(_sysconfigdata.*|entities|turtle|_osx_support|this|antigravity|__phello__|nturl2path|decimal)\.py$"
)
_QUOTED = re.compile(r'"""(.*?)"""', re.DOTALL)
#: Shorter docstrings are mostly one line that repeats a name.
_SHORTEST_DOCSTRING = 60
_MAX_FILE = 1 << 20

#: Subject -> first parts of modules' paths. All other files are `general`.
SUBJECTS: Mapping[str, frozenset[str]] = {
    "concurrency": frozenset(
        (
            "asyncio",
            "concurrent",
            "multiprocessing",
            "threading",
            "_threading_local",
            "queue",
            "selectors",
            "socketserver",
            "sched",
            "subprocess",
            "asyncore",
            "asynchat",
        )
    ),
    "mail": frozenset(
        (
            "email",
            "http",
            "mailbox",
            "smtplib",
            "smtpd",
            "imaplib",
            "poplib",
            "nntplib",
            "urllib",
            "ftplib",
            "cgi",
            "wsgiref",
            "xmlrpc",
        )
    ),
    "maths": frozenset(
        ("_pydecimal", "fractions", "statistics", "random", "numbers", "datetime", "_pydatetime", "colorsys")
    ),
}
GENERAL = "general"
#: Slices over all subjects: everything, and the docstrings of everything.
EVERYTHING = "python"
PROSE = "prose"
SLICES = (EVERYTHING, GENERAL, *SUBJECTS, PROSE)


@dataclass(frozen=True, slots=True)
class LibraryDocument:
    """One source file. `path` is relative to the library's folder, with forward slashes."""

    path: str
    text: str


@dataclass(frozen=True, slots=True)
class LibrarySlice:
    """The texts of one subject, for training and for measuring. No file is in both."""

    train: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Corpus:
    """All documents, split into held-out and training files by a hash of their paths."""

    documents: tuple[LibraryDocument, ...]

    @cached_property
    def digest(self) -> str:
        """SHA-256 over paths and texts: equal for equal corpora."""
        whole = hashlib.sha256()
        for document in self.documents:
            whole.update(f"{document.path}\0{document.text}\0".encode())
        return whole.hexdigest()

    @property
    def nbytes(self) -> int:
        return sum(len(document.text) for document in self.documents)

    @cached_property
    def _slices(self) -> dict[str, LibrarySlice]:
        parts = {name: self._subject(name) for name in (GENERAL, *SUBJECTS)}
        everything = LibrarySlice(
            tuple(text for part in parts.values() for text in part.train),
            tuple(text for part in parts.values() for text in part.held_out),
        )
        return {**parts, EVERYTHING: everything}

    @cached_property
    def _prose(self) -> LibrarySlice:
        everything = self._slices[EVERYTHING]
        return LibrarySlice(tuple(map(docstrings, everything.train)), tuple(map(docstrings, everything.held_out)))

    def slice(self, name: str) -> LibrarySlice:
        """Return one of `SLICES`."""
        return self._prose if name == PROSE else self._slices[name]

    def _subject(self, name: str) -> LibrarySlice:
        ordered = sorted(
            (d for d in self.documents if subject_of(d.path) == name),
            key=lambda d: hashlib.sha256(d.path.encode()).digest(),
        )
        held = _held_out(ordered)
        return LibrarySlice(tuple(d.text for d in ordered if d not in held), tuple(d.text for d in held))


def subject_of(path: str) -> str:
    """Return the subject of a file, by the first part of its path."""
    first = path.split("/", 1)[0].removesuffix(".py")
    return next((subject for subject, names in SUBJECTS.items() if first in names), GENERAL)


def _held_out(documents: Sequence[LibraryDocument]) -> list[LibraryDocument]:
    """Return the first files that make up a sixteenth of the text, none of them longer than a quarter of it."""
    total = sum(len(document.text) for document in documents)
    fit = [document for document in documents if 4 * len(document.text) <= total] or list(documents[:1])
    before = accumulate((len(document.text) for document in fit), initial=0)
    return [document for document, length in zip(fit, before, strict=False) if 16 * length < total]


def docstrings(text: str) -> str:
    """Return the longer triple-quoted strings of a source file, without their indentation."""
    return "\n\n".join(inspect.cleandoc(found) for found in _QUOTED.findall(text) if len(found) >= _SHORTEST_DOCSTRING)


def _sources(library: Path) -> list[Path]:
    """Return the source files, sorted by path.

    Folders that are left out are not walked: site-packages may hold ten times the library.
    """
    found = []
    for folder, below, files in os.walk(library):
        below[:] = [name for name in below if name not in _SKIPPED_FOLDERS and not name.startswith("config-")]
        found += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(found, key=lambda path: path.relative_to(library).as_posix())


def _read(library: Path, path: Path) -> LibraryDocument | None:
    if _SKIPPED_FILES.match(path.name) or path.stat().st_size > _MAX_FILE:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None
    return LibraryDocument(path.relative_to(library).as_posix(), text) if text.strip() else None


def read_library(library: Path | None = None, max_bytes: int | None = None) -> Corpus:
    """Read the standard library of the running Python (or of `library`).

    Args:
        max_bytes: Keep about this many characters of each subject, whole files in path order; None keeps all.

    Raises:
        InputError: The sources are absent (a Python without its `.py` files), or too few.
    """
    folder = library or Path(sysconfig.get_paths()["stdlib"])
    documents = [document for path in _sources(folder) if (document := _read(folder, path)) is not None]
    if max_bytes is not None:
        documents = [document for name in (GENERAL, *SUBJECTS) for document in _first(documents, name, max_bytes)]
    corpus = Corpus(tuple(documents))
    if any(not corpus.slice(name).train for name in SUBJECTS):
        raise InputError(
            f"the built-in text is the sources of Python's standard library, and {folder} does not hold them"
        )
    return corpus


def _first(documents: Sequence[LibraryDocument], subject: str, max_bytes: int) -> list[LibraryDocument]:
    """Return the first documents of a subject that fit `max_bytes`, at least two: one to train on, one to measure."""
    kept = [document for document in documents if subject_of(document.path) == subject]
    ends = accumulate(len(document.text) for document in kept)
    return [
        document for index, (document, end) in enumerate(zip(kept, ends, strict=True)) if index < 2 or end <= max_bytes
    ]
