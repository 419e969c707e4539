"""Choose the GPU of each agent, without taking memory on any: the scheduler's process uses none of them itself.

`cuda` with N agents means one GPU for each agent. A process sees its own GPU only, as under Ray; threads of one process
are told their numbers.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from zoo.errors import InputError

VISIBLE = "CUDA_VISIBLE_DEVICES"
_NAME = re.compile(r"cuda(:([0-9]{1,3}))?$")


def check_cuda(device: str) -> None:
    """Raise InputError unless `device` (cuda, cuda:N) names a GPU of this machine that torch can use."""
    import torch

    named = _NAME.match(device)
    if named is None:
        raise InputError(f"device {device!r} cannot be used: it is cpu, cuda or cuda:N")
    if not torch.cuda.is_available():
        why = "this torch is built without CUDA" if torch.version.cuda is None else "torch finds no GPU or no driver"
        raise InputError(f"device {device!r} cannot be used: {why}")
    count = torch.cuda.device_count()
    if named[2] is not None and int(named[2]) >= count:
        raise InputError(f"device {device!r} cannot be used: the GPUs are numbered from 0 to {count - 1}")


def gpus_of_agents(device: str, agents: Sequence[str]) -> dict[str, int]:
    """Return the number of each agent's GPU; empty on CPUs.

    Raises InputError where there are fewer GPUs than agents, or one GPU is named for several agents.
    """
    if not device.startswith("cuda"):
        return {}
    import torch

    check_cuda(device)
    if device != "cuda":
        if len(agents) > 1:
            raise InputError(f"{device} is one GPU, for one agent: give --device cuda for one GPU per agent")
        return {agents[0]: int(device.removeprefix("cuda:"))}
    count = torch.cuda.device_count()
    if len(agents) > count:
        raise InputError(
            f"{len(agents)} agents need as many GPUs, and there are {count}: give --agents {count}; one agent serves "
            "all models of a GPU"
        )
    return {agent: number for number, agent in enumerate(agents)}


def visible_to(number: int) -> dict[str, str]:
    """Return the environment of a process that sees only GPU `number` of those that this process sees."""
    seen = [each.strip() for each in os.environ.get(VISIBLE, "").split(",") if each.strip()]
    return {VISIBLE: seen[number] if number < len(seen) else str(number)}
