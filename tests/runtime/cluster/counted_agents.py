"""An agent's program that counts, from outside of the code that runs, which way attention to lent pages goes.

`python -m tests.runtime.cluster.counted_agents FOLDER` is `cli.serving.agent_engines`. Each process has its counts in
a file of the folder, by its process id. They are there while it runs, and after it was killed.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from cli.serving.agent_engines import ENGINES
from runtime.cluster.agent_process.main import main
from runtime.cluster.agent_process.side_link import SideClient
from runtime.engine.attention.away import AwayAttention
from runtime.engine.attention.lent import LentPages
from runtime.engine.kernels.away_calls import NativeAway
from runtime.engine.kernels.exchange import NativeQuestions


class Counts(ctypes.Structure):
    """What one process has done.

    Fields:
        received: Answers that native code received and merged.
        left: Layers that it began, and of which Python did the rest.
        sent, asked: Questions that native code, and Python, sent.
        attended: Questions of other agents that Python answered.
        answered: Those that native code answered. A call counts when it ends, a fifth of a second after the last one.
        beside: Layers for which a step had a native call, where some rows had all pages here.
        chunks: Those where these had tokens of prompts.
        misplaced: Native calls for rows with lent pages and several tokens.
    """

    _fields_ = tuple(
        (name, ctypes.c_int64)
        for name in ["received", "left", "sent", "asked", "attended", "answered", "beside", "chunks", "misplaced"]
    )
    received: int
    left: int
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

    def away(_: object, __: object, link: object, questions: Sequence[object], *given: Any) -> None:
        sent, received, _packet, before = given
        counts.sent += sent + sum(before.values())
        counts.received += received + sum(before.values())
        counts.left += received < len(questions)

    def answered(done: Any, _: object, *given: object) -> None:
        counts.answered += 0 if done is None else sum(done.counts)

    def attended(_: object, __: object, *given: object) -> None:
        counts.attended += 1

    def asked(_: object, __: object, *given: object) -> None:
        counts.asked += 1

    def prepared(call: Any, _: object, backend: AwayAttention, *given: object) -> None:
        away, spans = {one.row for one in backend.paging.away}, backend.paging.spans
        long = {row for row, span in enumerate(spans) if span.hi - span.lo > 1}
        counts.beside += call is not None and call.beside is not None
        counts.chunks += call is not None and bool(long - away)
        counts.misplaced += call is not None and bool(long & away)

    def called(_: object, __: object, native: object, call: Any, query: Tensor, out: object) -> None:
        counts.misplaced += call.data.here.rows != len(query)

    _wrap(SideClient, "count_packets", away)
    _wrap(NativeAway, "attend", called)
    _wrap(NativeQuestions, "answer", answered)
    _wrap(LentPages, "attend", attended)
    _wrap(SideClient, "send_query", asked)
    _wrap(AwayAttention, "step_layer", prepared)


if __name__ == "__main__":
    count_in(_counts_in(Path(sys.argv[1]) / str(os.getpid())))
    sys.exit(main(ENGINES))
