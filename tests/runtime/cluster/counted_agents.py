"""An agent's program that counts, from outside of the code that runs, which way attention to lent pages goes.

`python -m tests.runtime.cluster.counted_agents FOLDER` is `cli.serving.agent_engines`. Each process has its counts in
a file of the folder, by its process id. They are there while it runs, and after it was killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.serving.agent_engines import ENGINES
from runtime.cluster.agent_process.main import main
from runtime.cluster.agent_process.side_link import SideClient
from runtime.engine.attention.away import AwayAttention
from runtime.engine.attention.lent import LentPages
from runtime.engine.kernels.exchange import NativeAway, NativeQuestions


class Counts(ctypes.Structure):
    """What one process has done.

    Fields:
        merged: Layers of steps that one native call did, from the questions to the merge.
        unmerged: Those of which Python did the rest.
        sent, asked: Questions that native code, and Python, sent.
        attended: Questions of other agents that Python answered.
        answered: Those that native code answered. A call counts when it ends, a fifth of a second after the last one.
        beside: Layers of which some rows had all pages here, with lent pages of the rest.
        chunks: Layers with tokens of prompts, with lent pages of some rows.
        misplaced: Native calls in either of these.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ["merged", "unmerged", "sent", "asked", "attended", "answered", "beside", "chunks", "misplaced"]
    )
    merged: int
    unmerged: int
    sent: int
    asked: int
    attended: int
    answered: int
    beside: int
    chunks: int
    misplaced: int

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) + getattr(other, name) for name, *_ in self._fields_))

    def __sub__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, name) - getattr(other, name) for name, *_ in self._fields_))

    def __repr__(self) -> str:
        return ", ".join(f"{name} {getattr(self, name)}" for name, *_ in self._fields_)


def counts_of(folder: Path, pid: int) -> Counts:
    """Return the counts of a process; zeros if it has begun no engine."""
    file = folder / str(pid)
    return Counts.from_buffer_copy(file.read_bytes()) if file.exists() else Counts()


def sum_of(folder: Path) -> Counts:
    """Return the counts of all processes so far."""
    return sum((counts_of(folder, int(file.name)) for file in folder.iterdir()), Counts())


def _counts_in(file: Path) -> Counts:
    file.write_bytes(bytes(ctypes.sizeof(Counts)))
    with file.open("r+b") as opened:
        return Counts.from_buffer(mmap.mmap(opened.fileno(), 0))


def _wrap(kind: type, name: str, seen: Callable[..., None], before: Callable[..., Any] = lambda *_: None) -> None:
    """Call `seen` with each result of a method, what `before` returned, and the arguments."""
    method = getattr(kind, name)

    def wrapped(*given: Any) -> Any:
        earlier = before(*given)
        result = method(*given)
        seen(result, earlier, *given)
        return result

    setattr(kind, name, wrapped)


def count_in(counts: Counts) -> None:
    """Count what this process does from now on. Each field is written by one thread."""

    def away(done: Any, _: object, *given: object) -> None:
        counts.merged += done.merged
        counts.unmerged += not done.merged
        counts.sent += done.sent

    def answered(done: Any, _: object, *given: object) -> None:
        counts.answered += 0 if done is None else sum(done.counts)

    def attended(_: object, __: object, *given: object) -> None:
        counts.attended += 1

    def asked(_: object, __: object, *given: object) -> None:
        counts.asked += 1

    def calls(*_: object) -> int:
        return counts.merged + counts.unmerged

    def decoded(_: object, calls_before: int, backend: AwayAttention, *given: object) -> None:
        spans = backend.paging.spans
        beside, chunks = len(backend.paging.away) < len(spans), any(span.hi - span.lo > 1 for span in spans)
        counts.beside += beside
        counts.chunks += chunks
        counts.misplaced += calls() > calls_before and (beside or chunks)

    _wrap(NativeAway, "attend", away)
    _wrap(NativeQuestions, "answer", answered)
    _wrap(LentPages, "attend", attended)
    _wrap(SideClient, "send_query", asked)
    _wrap(AwayAttention, "decode", decoded, calls)


if __name__ == "__main__":
    count_in(_counts_in(Path(sys.argv[1]) / str(os.getpid())))
    sys.exit(main(ENGINES))
