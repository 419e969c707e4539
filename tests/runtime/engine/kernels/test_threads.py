"""The kernels' own threads: the results of one thread, under any load, and no thread that waits without sleeping."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from runtime.engine.kernels import build
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.build import compiled, library
from runtime.engine.kernels.operands import Parts, Pool, PromptChunk, PromptChunks
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
needs_own_threads = pytest.mark.skipif(
    not hasattr(library(), "zoo_wait"), reason="these kernels run on OpenMP's threads"
)

#: Calls of the compiled library without torch, in a process of its own: a defect hangs or kills only that one.
SCRIPT = """
import ctypes, os, sys, threading
from pathlib import Path
import numpy as np

lib = ctypes.CDLL(sys.argv[1])
P, I = ctypes.c_void_p, ctypes.c_int64
lib.zoo_stored.argtypes = (P, I, I, P, I, I, P, I, P, ctypes.c_int)
rows, k, n = 6, 64, 512
draw = np.random.default_rng(0)
x, w = draw.standard_normal((rows, k), dtype=np.float32), draw.standard_normal((n, k), dtype=np.float32)
short = (w.view(np.uint32) >> 16).astype(np.uint16)

def product(threads, times=1):
    out = np.empty((rows, n), np.float32)
    for _ in range(times):  # the second one has a barrier between two loops
        lib.zoo_stored(x.ctypes.data, rows, k, w.ctypes.data, k, 0, None, n, out.ctypes.data, threads)
        both = out.copy()
        lib.zoo_stored(x.ctypes.data, rows, k, short.ctypes.data, k, 1, None, n, out.ctypes.data, threads)
    return both.tobytes() + out.tobytes()

def tasks():
    return {int(each) for each in os.listdir("/proc/self/task")}

def state(task):
    return Path(f"/proc/self/task/{task}/stat").read_text().rpartition(")")[2].split()

expected = product(1)
"""


def run_script(code: str) -> str:
    """Run code after SCRIPT; return what it prints."""
    command = [sys.executable, "-c", SCRIPT + code, str(compiled(build._cache()))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.fixture
def spinning() -> Iterator[ctypes.CDLL]:
    """Let a test set how long waiting threads of this process spin."""
    found = library()
    assert isinstance(found, ctypes.CDLL)
    yield found
    build._with_waits(found)


def outputs(kernels: Kernels) -> list[bytes]:
    """Return the bits of products, prompts' attention and decoding, with many and few rows, in float32 and bfloat16."""
    draw = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, page = 6, 2, 64, 8
    weight, x, many = (
        torch.randn(200, 70, generator=draw),
        torch.randn(3, 70, generator=draw),
        torch.randn(150, 70, generator=draw),
    )
    made = [kernels.stored(x, weight, None), kernels.stored(x, weight.bfloat16(), None)]
    for each in (weight, weight.bfloat16()):
        parts = Parts([kernels.pack(each)], [200], [None])
        made += [kernels.linear(x, parts), kernels.linear(many, parts)]
    made.append(kernels.norm(many, torch.randn(70, generator=draw), 1e-6))
    k, v = torch.randn(40, page, kv_heads, dim, generator=draw), torch.randn(40, page, kv_heads, dim, generator=draw)
    pool = Pool(k, v, torch.randperm(40, generator=draw)[:30].view(1, 30))
    query = torch.randn(20, heads, dim, generator=draw)
    out, one = torch.empty_like(query), torch.empty(1, heads, dim)
    kernels.chunks(query, pool, PromptChunks([PromptChunk(0, 20, 100, 0)]), out, 0.125)
    kernels.decode(query[:1], pool, torch.tensor([240]), one, 0.125)
    return [each.numpy().tobytes() for each in (*made, out, one)]


@pytest.mark.skipif(
    sys.platform != "linux" or build.THREADS_VARIABLE in os.environ, reason="the kernels run on OpenMP's threads"
)
def test_the_library_needs_no_other_threads() -> None:
    """A loop that is not dynamic, or another construct without a definition, would link the compiler's OpenMP."""
    if "clang" in build._run([build._compiler(), "--version"]):
        pytest.skip("clang compiles OpenMP to another interface")
    assert hasattr(library(), "zoo_wait")
    assert b"libgomp" not in compiled(build._cache()).read_bytes()


@needs_own_threads
@pytest.mark.parametrize("limits", [(5_000, 100_000), (0, 0), (0, 50_000_000)], ids=["adapt", "sleep", "spin"])
def test_any_number_of_threads_gives_the_same_bits(limits: tuple[int, int], spinning: ctypes.CDLL) -> None:
    spinning.zoo_wait(*map(ctypes.c_int64, limits))
    alone = outputs(Kernels(1))
    for threads in (2, 3, 16):
        assert outputs(Kernels(threads)) == alone


@needs_own_threads
def test_openmp_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    own = outputs(Kernels(2))
    monkeypatch.setenv(build.THREADS_VARIABLE, "openmp")
    library.cache_clear()
    try:
        assert not hasattr(library(), "zoo_wait")
        assert outputs(Kernels(2)) == own
    finally:
        library.cache_clear()


def test_several_callers_at_once() -> None:
    kernels, alone = Kernels(3), outputs(Kernels(1))
    found: list[bool] = []
    callers = [
        threading.Thread(target=lambda: found.extend(outputs(kernels) == alone for _ in range(10))) for _ in range(4)
    ]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert found == [True] * 40


@needs_own_threads
def test_waiting_threads_sleep_and_are_woken() -> None:
    """Without a limit a worker would never sleep; without being woken it would never work again."""
    assert "done" in run_script("""
before = tasks()
product(2)
(worker,) = tasks() - before
for _ in range(3):
    while state(worker)[0] != "S":
        pass
    woken = int(Path(f"/proc/self/task/{worker}/schedstat").read_text().split()[2])
    while int(Path(f"/proc/self/task/{worker}/schedstat").read_text().split()[2]) == woken:
        assert product(2) == expected
print("done")
""")


@needs_own_threads
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two processors")
def test_workers_keep_off_the_processor_of_their_caller() -> None:
    """A worker that is woken where its caller runs would wait for it, and then take its time."""
    assert "done" in run_script("""
allowed, before = os.sched_getaffinity(0), tasks()
product(3)
workers = tasks() - before
assert len(workers) == 2
for worker in workers:
    while state(worker)[0] != "S":
        pass
product(3)
masks = {frozenset(os.sched_getaffinity(worker)) for worker in workers}
(mask,) = masks
assert mask < allowed and len(mask) == len(allowed) - 1, (mask, allowed)
assert os.sched_getaffinity(0) == allowed
processor = next(iter(mask))  # a caller that may only run there leaves them where they may be
os.sched_setaffinity(0, {processor})
for worker in workers:
    while state(worker)[0] != "S":
        pass
assert product(3) == expected
assert {frozenset(os.sched_getaffinity(worker)) for worker in workers} == masks
print("done")
""")


@needs_own_threads
def test_a_worker_spins_through_gaps_that_are_shorter_than_the_longest_spin() -> None:
    """Also after waits that were longer, which made it sleep at once."""
    assert "done" in run_script("""
import time
lib.zoo_wait(I(5_000), I(50_000_000))
before = tasks()
product(2)
(worker,) = tasks() - before

def sleeps():
    lines = Path(f"/proc/self/task/{worker}/status").read_text().splitlines()
    return int(next(each for each in lines if each.startswith("voluntary")).split()[1])

for _ in range(40):
    product(2)
    time.sleep(0.06)
slept, regions = sleeps(), 40
for _ in range(regions):
    product(2)
    end = time.perf_counter() + 0.002
    while time.perf_counter() < end:
        pass
assert sleeps() - slept < regions // 2, sleeps() - slept
print("done")
""")


@needs_own_threads
def test_no_wake_up_is_lost() -> None:
    """Every wait sleeps at once, in regions with barriers and more threads than processors."""
    assert "done" in run_script("""
lib.zoo_wait(I(0), I(0))
for threads in (2, 3, 5):
    assert product(threads, 3000) == expected
print("done")
""")


@needs_own_threads
def test_a_fork_makes_threads_of_its_own() -> None:
    assert "done" in run_script("""
assert product(3) == expected
for _ in range(3):
    child = os.fork()
    if not child:
        once = len(tasks())
        os._exit(0 if product(3) == expected and (once, len(tasks())) == (1, 3) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert product(3) == expected
print("done")
""")


@needs_own_threads
def test_threads_that_cannot_be_created_are_not_needed() -> None:
    assert "done" in run_script("""
import resource
before = len(tasks())
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 20), resource.RLIM_INFINITY))  # no room for a stack
assert product(4) == expected and len(tasks()) == before
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert product(4) == expected and len(tasks()) == before + 3
print("done")
""")


@needs_own_threads
def test_threads_end_with_their_caller() -> None:
    assert "done" in run_script("""
before = tasks()
seen = []
caller = threading.Thread(target=lambda: (product(4), seen.append(len(tasks()))))
caller.start(); caller.join()
assert seen == [len(before) + 4]
while tasks() != before:
    pass
print("done")
""")


def test_the_process_ends_while_threads_work() -> None:
    assert "done" in run_script("""
started = threading.Event()
def work():
    while True:
        product(3)
        started.set()
for _ in range(2):
    threading.Thread(target=work, daemon=True).start()
started.wait()
product(3)
print("done")
""")
