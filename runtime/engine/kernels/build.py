"""Compile `kernels.c` and what it includes, once per machine and version, and load it into this process.

The result is kept in the user's cache.

    library(build) -> the loaded library, or the reason why there is none

A C compiler with OpenMP suffices; compiling takes about a second. The library is compiled for this very processor, so
its file name is a hash of the source, the flags, the compiler and the processor. A path of products that is forced
(`Build`) is a library of its own, so engines of one process may use different ones. A cache folder that other users
could write to is refused, because its contents would run in this process.

With gcc on Linux the kernels run on threads of their own (`threads.c`), and the library is linked without libgomp, so
that an OpenMP construct that `threads.c` does not define is an error of the linker. Then, with other compilers, and
with BLOCKZOO_KERNEL_THREADS=openmp, they run on the compiler's OpenMP library.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

_log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.c")
#: Files that it includes.
_INCLUDED = (*sorted(SOURCE.with_name("csrc").rglob("*.c")), SOURCE.with_name("threads.c"))
#: How products with bfloat16 weights are computed, by the number in `csrc/amx.c`; 0 is the processor's fastest.
PATHS = ("auto", "widen", "avx512", "amx", "emulated")
_FLAGS = ("-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC", "-std=gnu11")
_OWN_THREADS = "-DOWN_THREADS"
_LINK_OWN_THREADS = ("-shared", "-pthread", "-Wl,-z,defs")
_SECONDS = 120

#: Environment variable that selects the threads of the kernels, for comparisons: "own" (default) or "openmp".
THREADS_VARIABLE = "BLOCKZOO_KERNEL_THREADS"
#: Shortest and longest time in ns that a waiting thread of the kernels spins before it sleeps, by OMP_WAIT_POLICY.
_SPIN_NS = {"": (5_000, 100_000), "active": (5_000_000, 5_000_000), "passive": (0, 0)}


@dataclass(frozen=True, slots=True)
class Build:
    """What the kernels are compiled for.

    Fields:
        path: One of `PATHS`; `emulated` runs the code for AMX on an emulated tile unit.
        march: The compiler's name of a kind of processor.
    """

    path: str = "auto"
    march: str = "native"

    @property
    def flags(self) -> tuple[str, ...]:
        return *_FLAGS, f"-march={self.march}", f"-DPRODUCTS={PATHS.index(self.path)}"


class NoKernels(Exception):
    """No compiled kernels are available; the message has the reason."""


@functools.cache
def library(build: Build = Build()) -> ctypes.CDLL | NoKernels:
    """Return the kernels, compiled on first use; at most once per process.

    Errors are returned, not raised, because everything runs without the kernels as well.
    """
    try:
        import torch  # noqa: F401

        return _with_waits(ctypes.CDLL(str(compiled(_cache(), build))))
    except NoKernels as why:
        _log.info("no kernels of our own: %s", why)
        return why
    except OSError as error:
        _log.warning("the compiled kernels do not load: %s", error)
        return NoKernels(f"the compiled kernels do not load: {error}")


def compiled(folder: Path, build: Build = Build()) -> Path:
    """Return the library's path in a folder, compiling it if it is not there. Raises NoKernels."""
    compiler = _compiler()
    file = folder / f"kernels-{_fingerprint(compiler, build)}.so"
    if file.exists():
        return file
    with tempfile.TemporaryDirectory(dir=folder, prefix="building-") as scratch:
        made = Path(scratch) / file.name
        if not (_own_threads() and _link_own_threads(compiler, build, made)):
            _run([compiler, *build.flags, "-shared", "-o", str(made), str(SOURCE), "-lm"])
        made.replace(file)  # atomic, in case another process compiles it at the same time
    return file


def _link_own_threads(compiler: str, build: Build, made: Path) -> bool:
    """Compile and link the kernels with threads of their own; return whether this compiler can."""
    parts = made.with_suffix(".o")
    try:
        _run([compiler, *build.flags, _OWN_THREADS, "-c", "-o", str(parts), str(SOURCE)])
        _run([compiler, *_LINK_OWN_THREADS, "-o", str(made), str(parts), "-lm"])
    except NoKernels as why:
        _log.info("the kernels run on the compiler's OpenMP threads: %s", why)
        return False
    return True


def _own_threads() -> bool:
    return os.environ.get(THREADS_VARIABLE, "own") != "openmp"


def _with_waits(found: ctypes.CDLL) -> ctypes.CDLL:
    """Set how long the kernels' own threads spin while they wait."""
    if hasattr(found, "zoo_wait"):
        policy = os.environ.get("OMP_WAIT_POLICY", "").strip().lower()
        found.zoo_wait(*map(ctypes.c_int64, _SPIN_NS.get(policy, _SPIN_NS[""])))
    return found


def _compiler() -> str:
    names = [os.environ["CC"]] if os.environ.get("CC") else ["cc", "gcc", "clang"]
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        raise NoKernels(f"there is no C compiler ({', '.join(names)})")
    return found


def _fingerprint(compiler: str, build: Build) -> str:
    version = _run([compiler, "--version"])
    sources = [file.read_text() for file in (SOURCE, *_INCLUDED)]
    flags = [*build.flags, *((_OWN_THREADS, *_LINK_OWN_THREADS) if _own_threads() else ())]
    return blake3("\0".join([*flags, compiler, version, _processor(), *sources]).encode()).hexdigest()[:24]


def _processor() -> str:
    """Return what `-march=native` depends on: the processor's model and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(
        sorted(
            {line for line in lines if line.split(":")[0].strip() in ("model name", "flags", "Features", "CPU part")}
        )
    )


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoKernels(f"{command[0]} does not run: {error}") from None
    if done.returncode != 0:
        said = done.stderr.strip().splitlines()
        raise NoKernels(f"{command[0]} does not compile them: {said[0] if said else f'exit status {done.returncode}'}")
    return done.stdout


def _cache() -> Path:
    """Return the folder of compiled files. Raises NoKernels if other users can write to it."""
    try:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockzoo"
        folder = Path(os.environ.get("BLOCKZOO_CACHE") or base) / "kernels"
    except RuntimeError as error:  # this user has no home
        raise NoKernels(str(error)) from None
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        seen = folder.stat()
    except OSError as error:
        raise NoKernels(f"{folder} cannot be used: {error}") from None
    if seen.st_uid != os.getuid() or seen.st_mode & 0o022:
        raise NoKernels(f"{folder} is writable by others, or belongs to another user")
    return folder
