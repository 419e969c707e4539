"""The device of an engine: which GPU its threads work on, and the memory that its page pool gets.

On a CPU there is nothing to choose.
"""

from __future__ import annotations

import torch

from runtime.config import EngineConfig
from zoo.errors import NotServable

#: Bytes of a GPU that stay free for activations, logits, recorded steps and library handles.
WORK_SPACE = 1 << 30


def enter_device(device: torch.device) -> None:
    """Make a GPU the calling thread's current one; otherwise libraries would also take memory on the first GPU."""
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)


def pool_bytes(config: EngineConfig) -> int:
    """Return the bytes of K and V together that an engine allocates on its device.

    Raises NotServable if a GPU has no room beside the weights.
    """
    device = torch.device(config.device)
    if device.type != "cuda" or not config.gpu_memory_utilization:
        return config.device_memory_bytes or config.kv_cache_memory_bytes
    enter_device(device)
    free, total = torch.cuda.mem_get_info(device)
    return share_of_device(total, free, config.gpu_memory_utilization, config.weights_bytes)


def share_of_device(total: int, free: int, utilization: float, weights: int) -> int:
    """Return what is left for K and V of a GPU with `total` bytes, of which `free` are not in use by any process.

    The engine may take `utilization` of the total, less what is in use already; weights and `WORK_SPACE` come first.

    Raises NotServable if nothing is left.
    """
    room = int(total * utilization) - (total - free)
    if room - weights - WORK_SPACE <= 0:
        have, need = max(room, 0) / 2**30, (weights + WORK_SPACE) / 2**30
        raise NotServable(
            f"the GPU has {have:.1f} GiB for the engine (gpu_memory_utilization {utilization:g}), and weights and work "
            f"space take {need:.1f} GiB: serve fewer models, limit the weights of an agent (--agent-weights), or give "
            "--kv-cache-memory-bytes"
        )
    return room - weights - WORK_SPACE
