"""`--agent-kv-bytes`: a page pool of its own for each agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cli.serving.cluster import start_cluster
from cli.serving.memory import agent_pools
from cli.serving.models import Chosen
from cli.serving.options import ServeOptions, gather
from runtime.types import SamplingParams, SequenceRequest
from zoo.api import Zoo
from zoo.errors import InputError

OPTIONS = ServeOptions(agents=2, placement="replicate", kernels="stock", max_model_len=256)


def options(sizes: str, agents: int = 2, **given: Any) -> ServeOptions:
    made: ServeOptions = gather(None, {"agents": agents, "agent_kv_bytes": sizes, **given})
    return made


def test_one_size_for_each_agent_or_one_for_all() -> None:
    assert agent_pools(options("1MiB, 2MiB,3MiB", agents=3)) == (1 << 20, 2 << 20, 3 << 20)
    assert agent_pools(options("1MiB", agents=3)) == (1 << 20,) * 3
    assert options("4MiB,2MiB").engine().kv_cache_memory_bytes == 2 << 20
    assert agent_pools(ServeOptions(agents=2)) == ()


@pytest.mark.parametrize(
    ("sizes", "given", "why"),
    [
        ("1MiB,2MiB,3MiB", {}, "--agent-kv-bytes has 3 sizes for 2 agents"),
        ("1MiB,0", {}, "every agent needs a KV cache"),
        ("1MiB,much", {}, "much"),
        ("1MiB", {"agents": 1}, "--agent-kv-bytes has no effect on one device"),
        ("1MiB", {"kv_cache_memory_bytes": "1MiB"}, "leave out --kv-cache-memory-bytes"),
        ("1MiB", {"device_memory": "1GiB"}, "limit weights by --agent-weights"),
    ],
)
def test_what_cannot_be_is_refused(sizes: str, given: dict[str, Any], why: str) -> None:
    with pytest.raises(InputError, match=why):
        options(sizes, **{"agents": 2, **given})


@pytest.mark.parametrize("backend", ["threads", "processes"])
def test_each_agent_has_its_pool(store: Path, backend: str) -> None:
    threads = torch.get_num_threads()
    chosen = replace(OPTIONS, backend=backend, agent_kv_bytes="1MiB,3MiB")
    try:
        with Zoo(store) as zoo, start_cluster(zoo, chosen, Chosen(("org/base",), ()), None, None) as driver:
            made = list(driver.run([SequenceRequest("a", "a", "org/base", (5, 6, 7), SamplingParams(4))]))
            picture: Any = driver.snapshot()
    finally:
        torch.set_num_threads(threads)
    small, large = (each["pages"] for each in picture["devices"])
    assert made and small > 0 and abs(large - 3 * small) <= 3, "but for pages of the engine's own"
