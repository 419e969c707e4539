"""The bring-up's checks pass on a CPU with tiny models, with few packages, and fail where the engine is wrong."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_bringup
from benchmarks.gpu import agreement, models, speed
from benchmarks.gpu.isolation import RunSettings
from runtime.engine.attention import gathered
from runtime.engine.attention.varlen import varlen_attention
from runtime.engine.models import components
from runtime.engine.recording import graphs
from tests.runtime.engine.gpu_kernel_fakes import PlainVarlen, Refusing, Watched

#: Packages of Block Zoo that a GPU machine may lack; the checks must not import them.
ABSENT = (
    "fastapi",
    "ray",
    "vllm",
    "datasets",
    "zmq",
    "uvicorn",
    "highspy",
    "ortools",
    "aio_pika",
    "starlette",
    "zstandard",
)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> RunSettings:
    made = RunSettings(tmp_path_factory.mktemp("bringup"), "cpu", True)
    models.make_compared(made)
    return made


def test_correctness_with_the_stand_ins_for_a_gpu(settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    """All rows attend in one call of a kernel that reads no pages; decode steps are recorded as strictly as CUDA's."""
    plain = PlainVarlen(0, ends=True)
    monkeypatch.setattr(components, "device_attention", lambda device: varlen_attention(plain.kernel))
    monkeypatch.setattr(
        components, "looked_up", lambda module: module
    )  # as on a GPU: no lookup of the largest position
    monkeypatch.setattr(graphs, "Rerun", Watched)
    values = agreement.check_lora_bfloat16(settings)
    assert values["graphs"]["replayed"] > 10 and plain.calls > 0 and values["sequences"] == 12


def test_a_wrong_engine_fails(settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(graphs, "Rerun", Refusing)
        with pytest.raises(AssertionError, match="were not replayed"):
            agreement.check_recorded_float32(settings)
    right = gathered.softmax_attention
    monkeypatch.setattr(gathered, "softmax_attention", lambda *given: right(*given) * 1.5)
    with pytest.raises(AssertionError, match="log-probabilities deviate"):
        agreement.check_float32(settings)


def test_wrong_attention_fails(settings: RunSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "device_attention", lambda device: varlen_attention(PlainVarlen(0, True).kernel))
    assert max(agreement.check_attention(settings)["relative error"].values()) < 2e-2
    monkeypatch.setattr(torch, "softmax", lambda scores, **_: torch.zeros_like(scores))
    with pytest.raises(AssertionError, match="attention deviates"):
        agreement.check_attention(settings)


def test_measurements_have_numbers(settings: RunSettings) -> None:
    models.make_7b(settings)
    measured = speed.measure_7b(settings)
    assert set(measured) == {f"{how}, {rows} rows" for how in ("by module", "recorded") for rows in (1, 4)}
    assert all(each["floor ms"] > 0.0 and each["ahead ms"] > 0.0 for each in measured.values())
    assert speed.measure_sampling(settings)["top-k ms"] > 0
    assert speed.check_memory_share(settings)["pool GiB"] == 1.0


def test_the_names_of_checks_and_their_needs_fit() -> None:
    names = [check.name for check in gpu_bringup.CHECKS]
    assert len(set(names)) == len(names)
    for check in gpu_bringup.CHECKS:
        module, _, function = check.run.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert all(set(check.needs) <= set(names[:at]) for at, check in enumerate(gpu_bringup.CHECKS))
    assert [check.name for check in gpu_bringup._with_needs(["variants", "machine"])] == [
        "machine",
        "make-1b",
        "variants",
    ]


def test_one_command_without_the_servers_packages(tmp_path: Path) -> None:
    """The whole command runs where the packages of the server and of clusters are not installed."""
    blocker = tmp_path / "sitecustomize.py"
    blocker.write_text(f"import sys\nfor name in {ABSENT!r}:\n    sys.modules[name] = None\n")
    root = Path(gpu_bringup.__file__).resolve().parents[1]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_bringup", "--device", "cpu", "--small", "--only", "sampling", "float32",
         "--output", str(tmp_path / "out")],
        cwd=root, env={"PYTHONPATH": f"{tmp_path}:{root}", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PATH": ""},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.count("passed") == 6, "as they come, and in the table"
    assert "largest difference" in (tmp_path / "out" / "report.txt").read_text()
