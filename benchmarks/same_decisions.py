"""Record what the simulator decides, and compare two records: a refactoring must not change any decision.

    python -m benchmarks.same_decisions record FOLDER [--checkout ROOT] [--seeds 3] [--only NAME]...
    python -m benchmarks.same_decisions compare OLD NEW [--map FILE.json]

`record` runs `zoo simulate` of a checkout for each run of `decision_runs` and each seed, in one process after the
other. It writes NAME-SEED.jsonl.gz (the trace of the first run) and NAME-SEED.json (the report of all runs). `compare`
prints a line per record, with the first difference and its context; the exit code is 1 if anything differs. Times
measured on the machine are not compared.

The map translates names of OLD into names of NEW; every part is optional:

    {"events": {"old": "new"},             names of trace events
     "fields": {"old": "new", "a.b": "c"}, keys of trace and report; with dots: nested keys
     "values": {"old": "new"},             whole strings, anywhere but in a trace's `ev`
     "patterns": [["regex", "new"]],       parts of strings, likewise, after `values`
     "ignore": ["settings", "a.b"],        keys left out on both sides, by NEW's names, with everything below them
     "drop": ["event"]}                    trace events left out on both sides, by NEW's names
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

from benchmarks.decision_runs import RUNS, SCENARIOS

#: Keys with times measured on the machine.
MEASURED = ("wall_seconds", "real")
#: Events shown before a difference.
CONTEXT = 3
_SIMULATE = "from cli.app import main; main()"


class Unreadable(Exception):
    """Raised if a record or a map is missing or not JSON."""


@dataclass(frozen=True)
class Renames:
    """Translation of OLD's names into NEW's; the module's docstring explains each part."""

    events: Mapping[str, str] = field(default_factory=dict)
    fields: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, str] = field(default_factory=dict)
    patterns: Sequence[tuple[str, str]] = ()
    ignore: Sequence[str] = ()
    drop: Sequence[str] = ()

    @classmethod
    def read(cls, path: Path | None) -> Renames:
        """Read a map. Raises Unreadable."""
        if path is None:
            return cls()
        document = _json_of(path)
        if not isinstance(document, dict) or (unknown := sorted(set(document) - set(cls.__dataclass_fields__))):
            raise Unreadable(
                f"{path}: "
                + (f"unknown: {', '.join(unknown)}" if isinstance(document, dict) else "an object is expected")
            )
        return cls(**document)

    def value(self, value: Any) -> Any:
        """Return a leaf with NEW's names."""
        if not isinstance(value, str):
            return value
        value = self.values.get(value, value)
        for pattern, new in self.patterns:
            value = re.sub(pattern, new, value)
        return value


Flat = dict[tuple[str, ...], Any]


def flat(document: Any, renames: Renames | None = None) -> Flat:
    """Return every leaf by its keys. `renames` translates OLD's names; None if the names are NEW's."""
    leaves: Flat = {}
    _leaves(document, (), leaves)
    if renames is None:
        return leaves
    return {renamed_path(path, renames.fields): renames.value(value) for path, value in leaves.items()}


def renamed_path(path: tuple[str, ...], fields: Mapping[str, str]) -> tuple[str, ...]:
    """Rename a path's keys, each at most once. Rules with dots come first, longer ones before shorter ones."""
    rules = sorted(
        ((tuple(old.split(".")), tuple(new.split("."))) for old, new in fields.items() if "." in old),
        key=lambda rule: -len(rule[0]),
    )
    made: list[str] = []
    at = 0
    while at < len(path):
        for old, new in rules:
            if path[at : at + len(old)] == old:
                made += new
                at += len(old)
                break
        else:
            made.append(fields.get(path[at], path[at]))
            at += 1
    return tuple(made)


def kept(leaves: Flat, ignore: Iterable[str]) -> Flat:
    """Return the leaves that are not at or below a key of `ignore`; a key with dots matches nested keys."""
    rules = [tuple(each.split(".")) for each in ignore]
    return {path: value for path, value in leaves.items() if not any(_within(path, rule) for rule in rules)}


def trace_difference(old: Iterable[str], new: Iterable[str], renames: Renames) -> str | None:
    """Return the first event that differs, with the events before it; None if all are equal."""
    before: deque[str] = deque(maxlen=CONTEXT)
    mine = _events(old, renames, True)
    theirs = _events(new, renames, False)
    for number, (left, right) in enumerate(zip_longest(mine, theirs), 1):
        if left is None or right is None:
            longer, which = (right, "NEW") if left is None else (left, "OLD")
            assert longer is not None
            return _shown(before, f"event {number}: only in {which}: {longer.line}")
        if left.line != right.line and left.leaves != right.leaves:
            differs = ", ".join(_differing(left.leaves, right.leaves))
            return _shown(before, f"event {number} differs in {differs}\n    OLD {left.line}\n    NEW {right.line}")
        before.append(right.line)
    return None


def report_difference(old: Any, new: Any, renames: Renames) -> str | None:
    """Return the first leaves that differ, and how many do; None if all are equal."""
    left, right = (kept(each, (*MEASURED, *renames.ignore)) for each in (flat(old, renames), flat(new)))
    names = _differing(left, right)
    if not names:
        return None
    lines = [
        f"    {'.'.join(path)}: OLD {left.get(path, 'none')!r}, NEW {right.get(path, 'none')!r}"
        for path in _paths(left, right)[:5]
    ]
    return f"{len(names)} of {len(left)} values differ\n" + "\n".join(lines)


def compare(old: Path, new: Path, renames: Renames) -> dict[str, str | None]:
    """Return the first difference of each record of OLD, None if equal. Raises Unreadable if OLD has no record."""
    names = sorted(path.stem for path in old.glob("*.json"))
    if not names:
        raise Unreadable(f"{old} has no records")
    return {name: _compared(old, new, name, renames) for name in names}


def record(folder: Path, checkout: Path, seeds: Sequence[int], only: Sequence[str] = ()) -> None:
    """Run what the folder does not have yet. Raises SystemExit if the simulator fails."""
    folder.mkdir(parents=True, exist_ok=True)
    if unknown := set(only) - {*RUNS, *SCENARIOS}:
        raise SystemExit(f"there is no run {sorted(unknown)[0]!r}; there are {', '.join([*RUNS, *SCENARIOS])}")
    for seed in seeds:
        for name in only or (*RUNS, *SCENARIOS):
            if not (folder / f"{name}-{seed}.json").exists():
                print(f"{name}-{seed}", flush=True)
                _recorded(folder, name, seed, checkout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    recording = verbs.add_parser("record", help="run the presets and keep what they decide")
    recording.add_argument("folder", type=Path)
    recording.add_argument(
        "--checkout",
        type=Path,
        default=Path(__file__).resolve().parent.parent,
        help="whose simulator; default: this one",
    )
    recording.add_argument("--seeds", type=int, default=3, help="so many, from 0")
    recording.add_argument("--only", action="append", default=[], help="a row of the table; may be given again")
    comparing = verbs.add_parser("compare", help="compare two folders of `record`")
    comparing.add_argument("old", type=Path)
    comparing.add_argument("new", type=Path)
    comparing.add_argument("--map", type=Path, help="how OLD's names are called in NEW")
    given = parser.parse_args(arguments)
    if given.verb == "record":
        record(given.folder, given.checkout.resolve(), range(given.seeds), given.only)
        return 0
    try:
        found = compare(given.old, given.new, Renames.read(given.map))
    except Unreadable as error:
        print(error, file=sys.stderr)
        return 2
    for name, difference in found.items():
        print(f"{name}: {'equal' if difference is None else difference}")
    differ = sum(difference is not None for difference in found.values())
    print(f"{len(found) - differ} of {len(found)} records are equal")
    return 1 if differ else 0


@dataclass(frozen=True)
class _Event:
    line: str
    leaves: Flat


def _events(lines: Iterable[str], renames: Renames, old: bool) -> Iterator[_Event]:
    for text in lines:
        event = json.loads(text)
        name = event.pop("ev", "")
        if old:
            name = renames.events.get(name, name)
        if name not in renames.drop:
            leaves = kept(flat(event, renames if old else None), renames.ignore)
            yield _Event(text.rstrip("\n"), leaves | {("ev",): name})


def _leaves(node: Any, path: tuple[str, ...], into: Flat) -> None:
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    if not children:
        into[path] = node
    for key, child in children:
        _leaves(child, (*path, str(key)), into)


def _within(path: tuple[str, ...], rule: tuple[str, ...]) -> bool:
    return any(path[at : at + len(rule)] == rule for at in range(len(path) - len(rule) + 1))


def _paths(left: Flat, right: Flat) -> list[tuple[str, ...]]:
    missing = object()
    return [path for path in {**left, **right} if left.get(path, missing) != right.get(path, missing)]


def _differing(left: Flat, right: Flat) -> list[str]:
    return [".".join(path) for path in _paths(left, right)]


def _shown(before: Iterable[str], text: str) -> str:
    return "\n".join([text.split("\n")[0], *(f"        {line}" for line in before), *text.split("\n")[1:]])


def _compared(old: Path, new: Path, name: str, renames: Renames) -> str | None:
    missing = [path.name for path in (new / f"{name}.json", new / f"{name}.jsonl.gz") if not path.exists()]
    if missing:
        return f"NEW has no {missing[0]}"
    mine, theirs = (folder / f"{name}.jsonl.gz" for folder in (old, new))
    try:
        with gzip.open(mine, "rt", encoding="utf-8") as left, gzip.open(theirs, "rt", encoding="utf-8") as right:
            found = trace_difference(left, right, renames)
    except (OSError, EOFError, ValueError) as error:
        raise Unreadable(f"{name}.jsonl.gz: {error}") from None
    if found is not None:
        return f"trace: {found}"
    found = report_difference(_json_of(old / f"{name}.json"), _json_of(new / f"{name}.json"), renames)
    return found and f"report: {found}"


def _json_of(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Unreadable(f"{path}: {error}") from None


def _recorded(folder: Path, name: str, seed: int, checkout: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryDirectory() as scratch:
        trace, scenario = Path(scratch, "trace.jsonl"), Path(scratch, f"{name}.json")
        if name in SCENARIOS:
            scenario.write_text(json.dumps(SCENARIOS[name]))
        options = RUNS.get(name, ("--config", str(scenario)))
        command = [
            sys.executable,
            "-c",
            _SIMULATE,
            "simulate",
            *options,
            "--seed",
            str(seed),
            "--trace",
            str(trace),
            "--json",
        ]
        done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, check=False)
        if done.returncode not in (0, 1) or not done.stdout:  # 1: requests were refused, which is a decision too
            raise SystemExit(f"{name}-{seed}: zoo simulate ended with {done.returncode}")
        with gzip.GzipFile(folder / f"{name}-{seed}.jsonl.gz", "wb", mtime=0) as packed:
            packed.write(trace.read_bytes())
        (folder / f"{name}-{seed}.json").write_bytes(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
