"""Check grammars of requests before anything runs: what is hostile, malformed or empty is refused in bounded time."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import OrderedDict
from functools import cached_property

from blake3 import blake3

from runtime.grammars.compiled import CompiledGrammars
from runtime.grammars.limits import COMPILE_SECONDS, GrammarRefused
from runtime.grammars.vocabulary import bytes_vocabulary

#: Verdicts that are kept, by the grammar's digest.
_KEPT_VERDICTS = 4096
#: Seconds that a guard may take to start, on a busy machine.
_START_SECONDS = 20.0
_TOO_MUCH = "compiling it takes too much time or memory"


class GrammarsBusy(Exception):
    """Raised when too many grammars wait to be checked."""


class _Guard:
    """One process of `runtime.grammars.guard`."""

    def __init__(self) -> None:
        here = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "runtime.grammars.guard"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": here}, text=True,
        )  # fmt: skip
        if self._process.stdin is None:
            raise RuntimeError("a process without input")
        self._input = self._process.stdin
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._ready = False
        threading.Thread(target=self._read, name="zoo-grammar-guard", daemon=True).start()

    def ready(self) -> bool:
        """Wait until it can take a grammar; False if it cannot be started."""
        self._ready = self._ready or bool(self._line(_START_SECONDS))
        return self._ready

    def answer_of(self, grammar: str) -> str | None:
        """Return its answer; None if the system ended it: the grammar takes too much.

        Raises TimeoutError if there is no answer in time, as on a machine that is busy. Then it is of no more use.
        """
        try:
            self._input.write(json.dumps(grammar) + "\n")
            self._input.flush()
        except OSError:
            return None
        line = self._line(COMPILE_SECONDS)
        if line is None:
            raise TimeoutError
        return str(json.loads(line)) if line else None

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def _line(self, seconds: float) -> str | None:
        """Return its next line; an empty one if it has ended, None if nothing comes in time."""
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            return None

    def _read(self) -> None:
        for line in self._process.stdout or ():
            self._lines.put(line)
        self._lines.put("")


class GrammarChecker:
    """Checks grammars in a process of its own, one at a time; verdicts are kept. Safe to call from several threads.

    Fields:
        passed, refused: Grammars that were checked, without those of kept verdicts.
        given_up: Those of the refused ones that took too much time or memory.
    """

    def __init__(self) -> None:
        self._verdicts: OrderedDict[bytes, str] = OrderedDict()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._guard: _Guard | None = None
        self.passed = self.refused = self.given_up = 0

    def check(self, grammar: str) -> None:
        """Raise GrammarRefused for a grammar that cannot be compiled within the limits, or that accepts no text.

        Raises GrammarsBusy after five seconds behind other grammars, and where the clock says that it takes too long:
        its processor time is what a grammar is judged by.
        """
        digest = blake3(grammar.encode("utf-8", "surrogatepass")).digest()
        with self._lock:
            verdict = self._verdicts.get(digest)
        if verdict is None:
            verdict = self._judge(grammar)
            with self._lock:
                self._verdicts[digest] = verdict
                while len(self._verdicts) > _KEPT_VERDICTS:
                    self._verdicts.popitem(last=False)
        if verdict:
            raise GrammarRefused(verdict)

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether a grammar that was checked accepts a whole text."""
        matcher = self._grammars.matcher(grammar)
        return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())

    def close(self) -> None:
        """End the process."""
        with self._turn:
            if self._guard is not None:
                self._guard.end()
                self._guard = None

    @cached_property
    def _grammars(self) -> CompiledGrammars:
        return CompiledGrammars(bytes_vocabulary())

    def _judge(self, grammar: str) -> str:
        if not self._turn.acquire(timeout=5):
            raise GrammarsBusy("too many grammars wait to be compiled")
        try:
            if self._guard is None:
                self._guard = _Guard()
            guard = self._guard
            if not guard.ready():
                self._guard = None
                guard.end()
                raise GrammarsBusy("the process that checks grammars could not be started")
            try:
                answer = guard.answer_of(grammar)
            except TimeoutError:
                self._replace(guard)
                raise GrammarsBusy("the grammar could not be compiled in time") from None
            if answer is None:
                self._replace(guard)
                self.given_up += 1
            self.refused += answer != ""
            self.passed += answer == ""
            return _TOO_MUCH if answer is None else answer
        finally:
            self._turn.release()

    def _replace(self, guard: _Guard) -> None:
        guard.end()
        self._guard = _Guard()  # started now, so that the next grammar finds it ready
