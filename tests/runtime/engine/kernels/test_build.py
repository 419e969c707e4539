"""Compiling the kernels: once, into a cache private to the user.

Without a compiler everything runs stock, unless kernels are required.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest

from runtime.config import EngineConfig
from runtime.engine.kernels import build
from runtime.engine.kernels.build import NoKernels, compiled, library
from runtime.engine.kernels.logits import LogitKernels
from runtime.engine.models.registry import kernels_for
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.drive import DenseDevice, PagedDevice, drive
from tests.runtime.engine.test_equality import ask, prompts
from zoo.errors import InputError

pytestmark = needs_kernels


@pytest.fixture
def anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """Look for the library again, in a cache of the test's own; yield the kernels' folder in it."""
    monkeypatch.setenv("BLOCKZOO_CACHE", str(tmp_path / "cache"))
    library.cache_clear()
    yield tmp_path / "cache" / "kernels"
    library.cache_clear()


def test_compiled_once(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(library(), ctypes.CDLL)
    (file,) = anew.iterdir()
    before = file.stat().st_mtime_ns
    assert anew.stat().st_mode & 0o777 == 0o700
    library.cache_clear()
    assert isinstance(library(), ctypes.CDLL) and file.stat().st_mtime_ns == before
    monkeypatch.setattr(build, "_processor", lambda: "another one")
    assert compiled(anew) != file


def test_without_a_compiler(anew: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    found = library()
    assert isinstance(found, NoKernels) and "no-such-compiler" in str(found)
    assert kernels_for(EngineConfig()) is None
    with pytest.raises(InputError, match="no C compiler"):
        kernels_for(EngineConfig(kernels="native"))


def test_a_compiler_that_fails(anew: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "what is -fopenmp?" >&2\nexit 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    found = library()
    assert isinstance(found, NoKernels) and "what is -fopenmp?" in str(found)
    assert not list(anew.iterdir()), "something was left behind"


def test_a_cache_that_others_can_write_to(anew: Path) -> None:
    anew.mkdir(parents=True)
    anew.chmod(0o777)
    found = library()
    assert isinstance(found, NoKernels) and "writable by others" in str(found)


def test_a_damaged_library(anew: Path) -> None:
    compiled(build._cache()).write_bytes(b"no library")
    assert isinstance(library(), NoKernels)


def test_stock_and_native_give_the_same_tokens(bench) -> None:
    name = bench.family("llama", "native-or-not", seed=8)
    out = {}
    for kernels in ("stock", "native"):
        made = PagedDevice(
            bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels=kernels), [name]
        )
        assert (made._registry.units.kernels is not None) == (kernels == "native")
        run = drive(made, {0: [ask(name, prompt, f"{i}") for i, prompt in enumerate(prompts(3, (5, 9, 20)))]})
        out[kernels] = [run.tokens(f"{i}") for i in range(3)]
    assert out["stock"] == out["native"]


def test_greedy_tokens_are_found_by_the_kernels(bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    largest = LogitKernels.chosen
    monkeypatch.setattr(
        LogitKernels, "chosen", lambda self, x, *rest: seen.append(x.shape[0]) or largest(self, x, *rest)
    )
    name = bench.family("llama", "native-greedy", seed=8)
    for executor, kernels in ((PagedDevice, "native"), (DenseDevice, "native"), (PagedDevice, "stock")):
        made = executor(
            bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4, kernels=kernels), [name]
        )
        drive(made, {0: [ask(name, prompt, f"{i}") for i, prompt in enumerate(prompts(3, (5, 9)))]})
        assert bool(seen) == (kernels == "native")
        seen.clear()


def test_half_precision_and_accelerators_take_no_kernels(bench) -> None:
    name = bench.family("llama", "native-bf16", dtype="bfloat16", seed=8)
    made = PagedDevice(bench.store, EngineConfig(kv_cache_memory_bytes=4 << 20, page_tokens=4), [name])
    run = drive(made, {0: [ask(name, prompt, f"{i}") for i, prompt in enumerate(prompts(3, (5, 9)))]})
    assert all(run.tokens(f"{i}") for i in range(2))
    assert kernels_for(EngineConfig(device="meta")) is None
