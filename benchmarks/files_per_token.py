"""Count the project's source files that run for one decoded token, on one device and over a path of two hops.

    python -m benchmarks.files_per_token [--tokens 64] [--calls] [--output FILE]

One sequence decodes greedily on a tiny Llama of random weights, as `zoo serve` does by default. `one_device` has the
default agent in the scheduler's thread; `two_hops` has two agents in threads of this process, each with half of the
chain.

A profile function on every thread (`sys.setprofile`, `threading.setprofile`) records the file of each Python function
entered between two tokens that reach the client. Reported are medians over `--tokens` tokens after a warm-up:

    files         distinct files, all threads together
    thread_files  the same, but a file counts once for each thread on which it runs
    calls         functions entered; each resumption of a generator counts; comprehensions, C functions and libraries
                  do not
    packages      files by folder, of those entered for at least half of the tokens

`--calls` adds the median calls of each such file.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import runtime
from benchmarks.reports import deliver
from cli.serving.driver import start_driver
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions
from runtime.types import SamplingParams, SequenceRequest
from surgery.ingest.ingest import ingest
from surgery.sources import open_source
from zoo.api import Zoo
from zoo.store import Store

ROOT = Path(runtime.__file__).resolve().parent.parent
WARM_UP = 16
_MODEL = "tiny"
_PROMPT = tuple(range(3, 11))
_SHAPE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256,
}  # fmt: skip
_ONE = ServeOptions(kv_cache_memory_bytes="4MiB", max_model_len=256)
SETTINGS: Mapping[str, ServeOptions] = {
    "one_device": _ONE,
    "two_hops": replace(_ONE, agents=2, backend="threads", placement="partition"),
}


#: Code objects with their own frames in some versions of Python only.
_COMPREHENSIONS = frozenset(["<listcomp>", "<dictcomp>", "<setcomp>"])
#: Calls by (thread, file).
Calls = Counter[tuple[str, str]]


class Entered:
    """Records the project's files with functions entered on this thread and on threads started inside `watching`."""

    def __init__(self, root: Path = ROOT) -> None:
        self._root = f"{root}/"
        self._own: dict[str, str | None] = {}
        self._seen: list[tuple[str, str]] = []

    @contextmanager
    def watching(self) -> Iterator[Entered]:
        threading.setprofile(self._note)
        sys.setprofile(self._note)
        try:
            yield self
        finally:
            sys.setprofile(None)
            threading.setprofile(None)

    def drain_calls(self) -> Calls:
        """Return the calls by thread and file since the previous call."""
        taken, self._seen = self._seen, []
        return Counter(taken)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_name in _COMPREHENSIONS:
            return
        path = frame.f_code.co_filename
        if path not in self._own:
            self._own[path] = self._name(path)
        name = self._own[path]
        if name is not None:
            self._seen.append((threading.current_thread().name, name))

    def _name(self, path: str) -> str | None:
        name = path.removeprefix(self._root)
        return None if name == path or name.startswith((".venv/", "tests/", "benchmarks/")) else name


def make_store(folder: Path) -> Path:
    """Make a store with one Llama of random weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**_SHAPE)).save_pretrained(folder / "model")
    with Store.open(folder / "store") as store:
        ingest(store, open_source(str(folder / "model")), name=_MODEL)
    return folder / "store"


def steps(zoo: Zoo, options: ServeOptions, tokens: int) -> list[Calls]:
    """Return the calls for each of `tokens` tokens of one sequence, after the warm-up."""
    sampling = SamplingParams(WARM_UP + tokens, ignore_eos=True)
    request = SequenceRequest("s", "r", _MODEL, _PROMPT, sampling)
    found: list[Calls] = []
    with Entered().watching() as entered, start_driver(zoo, options, Chosen((_MODEL,), ())) as driver:
        for event in driver.run([request]):
            if event.token is not None:
                found.append(entered.drain_calls())
    return found[WARM_UP:]


def summary(found: Sequence[Calls], calls: bool = False) -> dict[str, Any]:
    """Return medians over tokens, and by folder the files that at least half of the tokens enter."""
    if not found:
        raise ValueError("no token was decoded after the warm-up")
    by_file: list[Counter[str]] = []
    for each in found:
        by_file.append(Counter())
        for (_, name), count in each.items():
            by_file[-1][name] += count
    names = sorted({name for each in by_file for name in each})
    often = {name: median for name in names if (median := statistics.median(each[name] for each in by_file))}
    document: dict[str, Any] = {
        "files": statistics.median(len(each) for each in by_file),
        "thread_files": statistics.median(len(each) for each in found),
        "calls": statistics.median(each.total() for each in found),
        "tokens": len(found),
        "packages": dict(sorted(Counter(str(Path(name).parent) for name in often).items())),
    }
    return document | ({"files_calls": often} if calls else {})


def measured(tokens: int, calls: bool = False) -> dict[str, Any]:
    """Measure every setting, one after the other."""
    with tempfile.TemporaryDirectory() as scratch, Zoo(make_store(Path(scratch))) as zoo:
        return {name: summary(steps(zoo, options, tokens), calls) for name, options in SETTINGS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--calls", action="store_true", help="the calls of every file, too")
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    deliver(measured(given.tokens, given.calls), given.output)


if __name__ == "__main__":
    main()
