"""The process that compiles grammars of clients first, and that is killed where one takes too much.

    python -m runtime.grammars.guard    # one grammar per line on standard input, as JSON; one answer per line

llguidance bounds most of its work, but not what a JSON schema unfolds into: `allOf` of `anyOf`, or references of
references, take time and memory without end. The system ends this process there: by its limit on memory, or by a timer
of its processor time. The rest of the server compiles only what passed here.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress

from runtime.grammars.compiled import CompiledGrammars, told
from runtime.grammars.limits import COMPILE_BYTES, COMPILE_CPU_SECONDS, GrammarRefused
from runtime.grammars.vocabulary import bytes_vocabulary


def main() -> None:
    """Answer until the input ends: an empty text for a grammar that passes, else why it is refused."""
    vocabulary = bytes_vocabulary()
    _limit_memory()
    print(flush=True)  # ready
    for line in sys.stdin:
        _arm(COMPILE_CPU_SECONDS)
        answer = refusal(CompiledGrammars(vocabulary), json.loads(line))
        _arm(0)
        print(json.dumps(answer), flush=True)


def refusal(grammars: CompiledGrammars, grammar: str) -> str:
    """Return why a grammar cannot be compiled, or accepts no text; empty if it can be used."""
    try:
        matcher = grammars.matcher(grammar)
    except GrammarRefused as error:
        return str(error)
    first = matcher.compute_bitmask()
    if matcher.is_error():
        return "it accepts no text" if "NoExtension" in matcher.get_error() else told(matcher.get_error())
    return "" if any(first) else "it accepts no text"


def _limit_memory() -> None:
    with suppress(ImportError, OSError, ValueError, IndexError):  # not on Windows; no /proc on macOS
        import resource

        with open("/proc/self/statm") as file:  # noqa: PTH123  # pathlib would be one more import
            now = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (now + COMPILE_BYTES, now + COMPILE_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _arm(seconds: float) -> None:
    """Let the system end this process after so many seconds of its processor time; 0: not any more."""
    with suppress(ImportError, AttributeError):
        import signal

        signal.setitimer(signal.ITIMER_PROF, seconds)  # its signal's default is to end the process


if __name__ == "__main__":
    main()
