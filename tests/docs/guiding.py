"""Run a guide of docs/guides as a reader does: its blocks as they stand, in their order, in one shell.

Blocks of `sh` run in the shell, blocks of `python` as a script beside them. A block of `text` is what the block before
it prints: `…` stands for any text in a line, a line of `…` alone for any lines.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
GUIDES = ROOT / "docs" / "guides"
_BLOCK = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.MULTILINE | re.DOTALL)

#: How blocks run; those in other languages are only shown.
_STARTS = {"sh": "source", "python": "python"}
#: What a reader has not set; without compiled files each command would compile the packages again.
_LEFT_OUT = ("ZOO_", "BLOCKZOO_", "PYTHONDONTWRITEBYTECODE")


@dataclass(frozen=True)
class Block:
    """One block of code.

    Fields:
        needs: A program that may be missing, as in "```sh vllm".
        expected: What it prints on standard output, where the guide says so.
    """

    language: str
    code: str
    needs: str = ""
    expected: str | None = None


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page in order. Raises ValueError for output without a block before it, or without name."""
    if page.count("```") != 2 * len(_BLOCK.findall(page)):
        raise ValueError("a block has no language")
    blocks: list[Block] = []
    for language, needs, code in _BLOCK.findall(page):
        if language in _STARTS:
            blocks.append(Block(language, code, needs))
        elif language == "text" and (not blocks or blocks[-1].expected is not None):
            raise ValueError(f"output of nothing: {code}")
        elif language == "text":
            blocks[-1] = replace(blocks[-1], expected=code)
    return blocks


def matches(expected: str, printed: str) -> bool:
    """Return whether a text is what a guide says; any blanks in a line are as good as one."""
    lines = [re.escape(" ".join(line.split())).replace("…", ".*") for line in expected.strip().splitlines()]
    pattern = "\n".join("(?:.*\n)*?.*" if line == ".*" else line for line in lines)
    return re.fullmatch(pattern, "\n".join(" ".join(line.split()) for line in printed.strip().splitlines())) is not None


def run_guide(
    name: str, folder: Path, programs: Mapping[str, str] = MappingProxyType({}), seconds: float = 400
) -> dict[str, str]:
    """Run a guide's blocks in a folder. Returns what each printed.

    Args:
        programs: Name -> command of programs that a block may need.

    Raises AssertionError if a block fails, takes too long, or prints something else than the guide says.
    """
    page = (GUIDES / f"{name}.md").read_text(encoding="utf-8")
    blocks = [block for block in blocks_of(page) if not block.needs or block.needs in programs]
    kept = folder.parent / f"{folder.name}-blocks"
    kept.mkdir()
    script = ["set -euo pipefail"]
    for number, block in enumerate(blocks):
        path = kept / f"{number}.{block.language}"
        path.write_text(block.code, encoding="utf-8")
        script.append(
            f"{_STARTS[block.language]} {shlex.quote(str(path))} > {shlex.quote(str(kept / f'{number}.out'))}"
        )
    # A file, since a pipe would wait for what a guide leaves behind.
    with (
        (kept / "errors").open("w") as errors,
        subprocess.Popen(
            ["bash", "-c", "\n".join(script)],
            cwd=folder,
            env=_environment(kept, programs),
            stderr=errors,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        ) as shell,
    ):
        try:
            shell.wait(seconds)
        except subprocess.TimeoutExpired:
            errors.write(f"not done in {seconds} s")
        finally:
            _end_session(shell)
    printed = {number: (kept / f"{number}.out") for number in range(len(blocks))}
    texts = {number: path.read_text() for number, path in printed.items() if path.exists()}
    logs = "".join(path.read_text()[-3000:] for path in (kept / "errors", *sorted(folder.glob("*.log"))))
    last = blocks[max(texts, default=0)].code
    assert shell.returncode == 0, f"{name}.md ends with {shell.returncode} in\n{last}\n{logs}"
    for number, block in enumerate(blocks):
        if block.expected is not None:
            assert matches(block.expected, texts[number]), f"{name}.md says\n{block.expected}\nbut\n{texts[number]}"
    return {block.code: texts[number] for number, block in enumerate(blocks)}


def _environment(folder: Path, more: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a reader who has installed this checkout; PORT is a free one."""
    programs = folder / "bin"
    programs.mkdir()
    python = shlex.quote(sys.executable)
    starts = {"zoo": f"{python} -c 'from cli.app import main; main()'", "python": python, **more}
    for program, command in starts.items():
        (programs / program).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / program).chmod(0o755)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(_LEFT_OUT)}
    return {
        **kept,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "NO_PROXY": "127.0.0.1",
    }


def _end_session(shell: subprocess.Popen[bytes]) -> None:
    """End what a guide has started and not ended itself."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    shell.wait(30)
