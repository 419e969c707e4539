"""Check the values of options, alone and in combination."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

from cli.serving.memory import agent_pools
from cli.shared.declared import check_choices
from cli.shared.sizes import size_of
from runtime.policy.roles.role import ROLES
from runtime.role_config import RoleName
from zoo.errors import InputError

if TYPE_CHECKING:
    from cli.serving.options import ServeOptions


def check_values(options: ServeOptions) -> None:
    """Raise InputError for the first invalid value."""
    check_choices(options)
    _check_memory(options)
    _check_agents(options)
    _check_roles(options)
    _check_pool(options)
    _check_chunks(options)
    _check_adaptive(options)
    _check_server(options)


def _check_memory(options: ServeOptions) -> None:
    if options.agent_kv_bytes is not None:
        if options.kv_cache_memory_bytes is not None or size_of(options.device_memory):
            raise InputError(
                "--agent-kv-bytes sizes every KV cache: leave out --kv-cache-memory-bytes and --device-memory (limit "
                "weights by --agent-weights)"
            )
        agent_pools(options)
    if size_of(options.device_memory) and size_of(options.agent_weights):
        raise InputError("--device-memory and --agent-weights both limit the weights of a device: give one of them")
    if size_of(options.device_memory) and options.weights_limit < 1:
        raise InputError(
            "--device-memory leaves nothing for weights beside the KV cache: raise it, or lower --kv-cache-memory-bytes"
        )


def _check_agents(options: ServeOptions) -> None:
    if not 1 <= options.agents <= 256:
        raise InputError(f"{options.agents} agents: there must be at least 1, and at most 256")
    if options.backend in ("inline", "local") and options.agents != 1:
        raise InputError("an inline agent is the only one: leave --agents 1, or give another --backend")
    if not 0 <= options.decode_credit <= 1024:
        raise InputError("decode_credit is a number of tokens up to 1024, 0 for what suits the device")
    if options.tensor_transport == "network" and options.backend != "ray":
        raise InputError(
            "agents of one machine have no network between them: give --tensor-transport direct, or --backend ray"
        )
    if options.clustered and options.executor == "dense":
        raise InputError(
            "the dense executor runs whole chains, whose K and V stay on one device: leave --agents 1 and --backend "
            "inline"
        )


def roles_of(options: ServeOptions) -> tuple[tuple[str, RoleName], ...]:
    """Return the role of each agent by its name; none where every agent runs everything."""
    names = _role_names(options)
    return tuple((f"agent-{number}", cast(RoleName, name)) for number, name in enumerate(names))


def _check_roles(options: ServeOptions) -> None:
    """Raise InputError for roles that are none, that are not one per agent, or that leave a phase out."""
    names = _role_names(options)
    if not names or options.agents == 1:  # one device: the option is refused because it would have no effect
        return
    if unknown := [name for name in names if name not in ROLES]:
        raise InputError(f"--roles: {unknown[0]!r} is no role; they are {', '.join(ROLES)}")
    if len(names) != options.agents:
        raise InputError(f"--roles names {len(names)} roles for {options.agents} agents: give one for each")
    if not any(ROLES[name].prompts for name in names):
        raise InputError("--roles leaves no agent for prompts: give one prefill, or both")
    if not any(ROLES[name].decodes for name in names):
        raise InputError("--roles leaves no agent that decodes: give one decode, or both")


def _role_names(options: ServeOptions) -> list[str]:
    return [name.strip() for name in options.roles.split(",")] if options.roles else []


def _check_pool(options: ServeOptions) -> None:
    if not 0.0 < options.gpu_memory_utilization <= 1.0:
        raise InputError("--gpu-memory-utilization is a share of the GPU's memory above 0 and up to 1")
    if not 0 <= options.block_size <= 1 << 16:
        raise InputError(f"--block-size is a number of tokens up to {1 << 16}, 0 for what suits the device")


def _check_chunks(options: ServeOptions) -> None:
    chunk, step = options.long_prefill_token_threshold, options.max_num_batched_tokens
    if not 0 <= chunk <= 1 << 20:
        raise InputError(
            f"--long-prefill-token-threshold is a number of tokens up to {1 << 20}, 0 for the measured one"
        )
    if step is not None and chunk > step > 0:
        raise InputError(
            f"--long-prefill-token-threshold {chunk} is more than a step's {step} tokens: raise "
            "--max-num-batched-tokens"
        )


def _check_adaptive(options: ServeOptions) -> None:
    if options.adaptive_ms and options.adaptive != "accuracy":
        raise InputError("--adaptive-ms bounds the steps of the most accurate variant: give --adaptive accuracy")
    shares = (options.min_equivalence, options.min_stitched)
    if not all(0.0 <= share <= 1.0 for share in shares) or not 0.0 <= options.adaptive_ms < 1e9:
        raise InputError("--min-equivalence and --min-stitched must be from 0 to 1, --adaptive-ms at least 0")


def _check_server(options: ServeOptions) -> None:
    endpoint = options.otlp_traces_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise InputError(
            f"--otlp-traces-endpoint must be an address such as http://host:4318/v1/traces, not {endpoint!r}"
        )
    if options.api_key == "" or os.environ.get("ZOO_API_KEY") == "":
        raise InputError("the API key is empty; leave it out to serve without one")
    if options.client_keys and options.api_key is None:
        raise InputError("--client-keys needs --api-key: without one every client may do everything")
    if not 0 <= options.port <= 65535:
        raise InputError(f"{options.port} is no port")
    if options.max_queued < 1 or not 0 < options.drain_seconds < 86400:
        raise InputError("max_queued and drain_seconds must be positive")
    if options.broker is not None and not options.broker.startswith(("amqp://", "amqps://")):
        raise InputError("--broker must be an address such as amqp://user:password@host:5672/")
    if not 1 <= options.lease_seconds <= 3600:
        raise InputError("lease_seconds is from 1 to 3600: shorter ones end while a server is only slow")
    if not options.queue:
        raise InputError("--queue is a folder, postgresql://…, or off")
    if not 0 < options.retention_hours < 1e6:
        raise InputError("--retention-hours must be positive")
