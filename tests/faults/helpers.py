"""Helpers: checkpoints that share tensors, folders compared byte by byte, and stores checked file by file."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zoo import Zoo
from zoo.objects.headers import read_header

ROOT = Path(__file__).parents[2]


@dataclass
class Nursery:
    """The parent's end of `tests.faults.nursery`."""

    process: subprocess.Popen[str]

    def start(self, verb: str, *arguments: object) -> int:
        """Start a job; return the PID of its process."""
        self._say(" ".join([verb, *map(str, arguments)]))
        return int(self._answer("pid"))

    def wait(self) -> int:
        """Return the exit code of the job; the negative signal number if it was killed."""
        self._say("reap")
        return int(self._answer("exit"))

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def _answer(self, word: str) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().split()
        assert line[:1] == [word], line
        return line[-1]


@contextmanager
def nursery() -> Iterator[Nursery]:
    """Run a nursery while the context lasts."""
    command = [sys.executable, "-m", "tests.faults.nursery"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        running = Nursery(process)
        running._answer("ready")
        try:
            yield running
        finally:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(timeout=60)


def fine_tune(base: Path, folder: Path, layers: Collection[int], shift: int) -> Path:
    """Copy a checkpoint with changed tensors in some layers; another `shift` gives other bytes."""
    shutil.copytree(base, folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    for entry in read_header(path).entries:
        if any(f".layers.{layer}." in entry.key for layer in layers):
            data[entry.begin] = (data[entry.begin] + shift) % 256
    path.write_bytes(data)
    return folder


def same_folders(one: Path, other: Path) -> bool:
    """Return whether two folders hold the same files, byte for byte."""

    def contents(folder: Path) -> dict[str, bytes]:
        return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    return contents(one) == contents(other)


def exported(zoo: Zoo, name: str, folder: Path) -> Path:
    zoo.model(name).export(folder)
    return folder


def unowned(zoo: Zoo) -> set[str]:
    """Return files of the store that no model needs: objects and blobs without a user, and temporary files."""
    with zoo.store.catalog.reading() as reader:
        live: set[Any] = reader.live_tensors() | reader.live_blobs()
    shelves = [zoo.store.root / part for part in ("objects", "packed", "files")]
    return {str(path) for shelf in shelves for path in shelf.rglob("*") if path.is_file() and path.name not in live}


def missing(zoo: Zoo) -> set[str]:
    """Return the digests that models name and the store does not hold."""
    with zoo.store.catalog.reading() as reader:
        return (reader.live_tensors() - set(zoo.store.objects.digests())) | (
            reader.live_blobs() - set(zoo.store.blobs.digests())
        )


def torn_chains(zoo: Zoo) -> set[str]:
    """Return models with a broken chain.

    Either its blocks are not the model's components in order, or a component lies in another block in another chain.
    """
    home: dict[str, str] = {}
    torn = set()
    for name in (model.name for model in zoo.models()):
        handle = zoo.model(name)
        chained = [(block.digest, each.component.digest) for block in handle.chain for each in block.components]
        if [component for _, component in chained] != [
            placed.component.digest for placed in handle.manifest.components
        ]:
            torn.add(name)
        torn |= {name for block, component in chained if home.setdefault(component, block) != block}
    return torn
