"""The processors that a process may use, and OpenMP's settings before torch is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runtime.processors import count_usable, prepare_openmp


def lay(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V1 = "sys/fs/cgroup/cpu"
QUOTAS: dict[str, tuple[dict[str, str], int]] = {
    "none": ({}, 8),
    "v2 unlimited": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "max 100000\n"}, 8),
    "v2": ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "250000 100000\n"}, 3),
    "v2 above": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
        },
        2,
    ),
    "v2 in a container": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 1),
    "v1": (
        {
            "proc/self/cgroup": "4:memory:/m\n3:cpu,cpuacct:/c\n",
            f"{V1}/c/cpu.cfs_quota_us": "400000\n",
            f"{V1}/c/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    "v1 unlimited": (
        {"proc/self/cgroup": "3:cpu:/\n", f"{V1}/cpu.cfs_quota_us": "-1\n", f"{V1}/cpu.cfs_period_us": "100000\n"},
        8,
    ),
    "damaged": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "what\n"}, 8),
}


@pytest.mark.parametrize("name", QUOTAS)
def test_quotas_and_affinity_limit_the_processors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, expected = QUOTAS[name]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert count_usable(lay(tmp_path, files)) == expected
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {5}, raising=False)
    assert count_usable(lay(tmp_path, files)) == 1


def test_settings_of_the_user_are_kept() -> None:
    cores = os.cpu_count() or 1
    made: dict[str, str] = {}
    prepare_openmp(made, cores)
    assert "OMP_NUM_THREADS" not in made and made["GOMP_SPINCOUNT"] == "0"
    openmp = {"BLOCKZOO_KERNEL_THREADS": "openmp"}
    prepare_openmp(openmp, cores)
    assert 0 < int(openmp["GOMP_SPINCOUNT"]) < 10_000
    fewer: dict[str, str] = {}
    prepare_openmp(fewer, 0)
    assert fewer["OMP_NUM_THREADS"] == "0"
    for given in (
        {"OMP_WAIT_POLICY": "active", "OMP_NUM_THREADS": "7"},
        {"GOMP_SPINCOUNT": "5", "OMP_NUM_THREADS": "7"},
    ):
        kept = dict(given)
        prepare_openmp(kept, 0)
        assert kept == given
