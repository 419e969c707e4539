"""Which agent gets which GPU, and how much of its memory, with a stand-in for torch's view of the machine."""

from __future__ import annotations

import pytest
import torch

from cli.serving.cluster import _on_gpu, weights_on_device
from cli.serving.gpus import VISIBLE, check_cuda, gpus_of_agents, visible_to
from cli.serving.models import check_device
from cli.serving.options import ServeOptions, gather
from runtime.config import EngineConfig
from runtime.engine.executors.device import WORK_SPACE, pool_bytes, share_of_device
from zoo.errors import InputError, NotServable

GIB = 1 << 30
AGENTS = [f"agent-{number}" for number in range(3)]


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.delenv(VISIBLE, raising=False)


def test_each_agent_gets_a_gpu_of_its_own(two_gpus: None) -> None:
    assert gpus_of_agents("cuda", AGENTS[:2]) == {"agent-0": 0, "agent-1": 1}
    assert gpus_of_agents("cuda:1", AGENTS[:1]) == {"agent-0": 1}
    assert gpus_of_agents("cpu", AGENTS) == {}
    with pytest.raises(InputError, match="3 agents need as many GPUs, and there are 2: give --agents 2"):
        gpus_of_agents("cuda", AGENTS)
    with pytest.raises(InputError, match="cuda:1 is one GPU"):
        gpus_of_agents("cuda:1", AGENTS[:2])


def test_a_process_sees_its_own_gpu_of_those_that_this_one_sees(
    two_gpus: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert [visible_to(number) for number in range(2)] == [{VISIBLE: "0"}, {VISIBLE: "1"}]
    monkeypatch.setenv(VISIBLE, "5, GPU-abc")
    assert [visible_to(number)[VISIBLE] for number in range(2)] == ["5", "GPU-abc"]
    settings = {"config": {"device": "cuda", "dtype": None}, "threads": 1}
    assert _on_gpu(settings, 1) == {"config": {"device": "cuda:1", "dtype": None}, "threads": 1}
    assert _on_gpu(settings, None) is settings


def test_devices_that_are_not_there_are_named(two_gpus: None, monkeypatch: pytest.MonkeyPatch) -> None:
    for device in ("cuda", "cuda:1"):
        check_device(device)
    for device, words in (("cuda:2", "numbered from 0 to 1"), ("cuda:x", "it is cpu, cuda or cuda:N")):
        with pytest.raises(InputError, match=words):
            check_device(device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"'cuda' cannot be used: (this torch is built without|torch finds no)"):
        check_cuda("cuda")


def test_the_page_pool_gets_what_the_weights_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    assert share_of_device(80 * GIB, 79 * GIB, 0.9, 14 * GIB) == 72 * GIB - GIB - 14 * GIB - WORK_SPACE
    with pytest.raises(NotServable, match=r"has 16.0 GiB .* take 21.0 GiB: .*--agent-weights"):
        share_of_device(40 * GIB, 20 * GIB, 0.9, 20 * GIB)
    entered = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (79 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: entered.append(str(device)))
    assert pool_bytes(EngineConfig(device="cuda:1", gpu_memory_utilization=0.5)) == 39 * GIB - WORK_SPACE
    assert entered == ["cuda:1"]
    assert pool_bytes(EngineConfig(device="cuda:1", kv_cache_memory_bytes=GIB)) == GIB
    assert pool_bytes(EngineConfig(kv_cache_memory_bytes=GIB, gpu_memory_utilization=0.5)) == GIB, "a CPU has no share"


def test_the_options() -> None:
    on_gpu = gather(None, {"device": "cuda", "gpu_memory_utilization": 0.5, "block_size": 32}).engine()
    assert (on_gpu.gpu_memory_utilization, on_gpu.page_tokens) == (0.5, 32)
    assert ServeOptions(device="cuda").engine().gpu_memory_utilization == 0.9
    sized = gather(None, {"device": "cuda", "kv_cache_memory_bytes": "2GiB"}).engine()
    assert (sized.gpu_memory_utilization, sized.kv_cache_memory_bytes) == (0.0, 2 * GIB)
    assert (ServeOptions().engine().gpu_memory_utilization, ServeOptions().engine().kv_cache_memory_bytes) == (0.0, GIB)
    for given, words in (
        ({"gpu_memory_utilization": 0.5}, "on a CPU: give --device cuda"),
        ({"gpu_memory_utilization": 0.5, "device": "cuda", "kv_cache_memory_bytes": GIB}, "leave one of them out"),
        ({"gpu_memory_utilization": 1.5, "device": "cuda"}, "a share of the GPU's memory"),
        ({"block_size": -1}, "--block-size is a number of tokens"),
    ):
        with pytest.raises(InputError, match=words):
            gather(None, given)


def test_weights_for_which_room_is_left() -> None:
    assert weights_on_device(ServeOptions(), 10 * GIB, GIB) == 13 * GIB
    assert weights_on_device(ServeOptions(dtype="float32"), 20 * GIB, GIB) == 23 * GIB
    assert weights_on_device(ServeOptions(agent_weights="4GiB"), 10 * GIB, GIB) == 4 * GIB
