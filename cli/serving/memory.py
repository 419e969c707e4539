"""How the memory of one device is divided between weights and KV cache, by the options of `zoo serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cli.shared.sizes import size_of
from zoo.errors import InputError

if TYPE_CHECKING:
    from cli.serving.options import ServeOptions

#: Default size of the KV cache on a CPU.
_POOL = 1 << 30


def weights_limit(options: ServeOptions) -> int:
    """Return the bytes of weights that one device holds at most, 0 for no limit. Raises InputError for a wrong size."""
    memory = size_of(options.device_memory)
    return memory - pool_bytes(options) if memory else size_of(options.agent_weights)


def shared_memory(options: ServeOptions) -> int:
    """Return the bytes of one device of which the KV cache gets what weights leave; 0: it has a fixed share.

    It has a fixed one where its size is given, on a GPU, and where weights do not come on demand or K and V do not lie
    in pages. Raises InputError for a wrong size.
    """
    swaps = options.residency == "swap" and options.speculation == "off" and options.executor != "dense"
    sized = options.kv_cache_memory_bytes is not None or options.agent_kv_bytes
    shared = swaps and not sized and options.device == "cpu"
    return size_of(options.device_memory) if shared else 0


def pool_bytes(options: ServeOptions) -> int:
    """Return the bytes of the KV cache, where a GPU's share does not decide; with shared memory what it has at least.

    The smallest one where agents have different ones. Raises InputError for a wrong size.
    """
    if options.agent_kv_bytes:
        return min(agent_pools(options))
    shared = shared_memory(options)
    if shared:
        return min(_POOL, max(shared // 2, 1))
    return _POOL if options.kv_cache_memory_bytes is None else size_of(options.kv_cache_memory_bytes)


def agent_pools(options: ServeOptions) -> tuple[int, ...]:
    """Return the bytes of the KV cache of each agent, in their order; none where all have what one option says.

    One size is that of every agent. Raises InputError for a wrong size, or another number of sizes than agents.
    """
    if not options.agent_kv_bytes:
        return ()
    sizes = [size_of(size.strip()) for size in str(options.agent_kv_bytes).split(",")]
    if len(sizes) not in (1, options.agents):
        raise InputError(f"--agent-kv-bytes has {len(sizes)} sizes for {options.agents} agents: give one for each")
    if min(sizes) < 1:
        raise InputError("--agent-kv-bytes: every agent needs a KV cache, also one that only runs prompts")
    return tuple(sizes * options.agents if len(sizes) == 1 else sizes)
