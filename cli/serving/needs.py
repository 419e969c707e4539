"""Conditions without which an option of `zoo serve` has no effect, by the names in the options' `needs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.shared.declared import changed_options, declared, flag_of
from zoo.errors import InputError

if TYPE_CHECKING:
    from cli.serving.options import ServeOptions


@dataclass(frozen=True, slots=True)
class Need:
    """One condition.

    Fields:
        said: The condition in words, for help texts.
        lacks: Returns, for the options and the executor, why dependent options have no effect, or None.
    """

    said: str
    lacks: Callable[[ServeOptions, str], str | None]


def _several_devices(options: ServeOptions, executor: str) -> str | None:
    return "on one device: give --agents" if options.agents == 1 else None


def _one_device(options: ServeOptions, executor: str) -> str | None:
    if options.agents > 1:
        return "over several devices: leave --agents 1"
    return "without shared prefixes: leave out --prefix-caching off" if options.prefix_caching == "off" else None


def _due_rows(options: ServeOptions, executor: str) -> str | None:
    return "on the only agent, which never waits: give --agents" if options.settled().backend == "inline" else None


def _dense(options: ServeOptions, executor: str) -> str | None:
    if options.clustered or options.executor == "paged":
        return "without the dense executor, which is for one device: give --executor dense"
    return None


def _paged(options: ServeOptions, executor: str) -> str | None:
    return "with the dense executor, which decides with its batches at hand" if executor == "dense" else None


def _deadlines(options: ServeOptions, executor: str) -> str | None:
    return None if options.plan in ("edf", "qlm") else "without an order by deadline: give --plan edf or qlm"


def _deltas(options: ServeOptions, executor: str) -> str | None:
    return None if options.serve_deltas else "without stand-ins: give --serve-deltas"


def _speculation(options: ServeOptions, executor: str) -> str | None:
    return "where no hop is predicted: give --speculation" if options.speculation == "off" else None


def _memory_limit(options: ServeOptions, executor: str) -> str | None:
    return None if options.weights_limit else "without a limit of memory: give --device-memory"


def _host_memory(options: ServeOptions, executor: str) -> str | None:
    return None if options.host_memory else "without host memory: give --host-memory"


def _share_of_gpu(options: ServeOptions, executor: str) -> str | None:
    if not options.device.startswith("cuda"):
        return "on a CPU: give --device cuda"
    sized = options.kv_cache_memory_bytes is not None or options.agent_kv_bytes or options.device_memory
    return "beside another size of the KV cache or --device-memory: leave one of them out" if sized else None


def _native(options: ServeOptions, executor: str) -> str | None:
    if options.device != "cpu" or options.kernels == "stock" or options.weights == "plain":
        return "without native kernels over packed weights, which are for CPUs"
    return None


def _prefill_order(options: ServeOptions, executor: str) -> str | None:
    return "without an order of prompts: give --prefill-order" if options.prefill_order == "off" else None


def _role_watch(options: ServeOptions, executor: str) -> str | None:
    return "while roles stay as they are: give --role-changes" if options.role_changes == "off" else None


def _roles(options: ServeOptions, executor: str) -> str | None:
    return None if options.roles else "without roles: give --roles"


def _prefixes(options: ServeOptions, executor: str) -> str | None:
    return "without shared prefixes: leave out --prefix-caching off" if options.prefix_caching == "off" else None


def _lending(options: ServeOptions, executor: str) -> str | None:
    return "where nothing is lent: give --lending" if options.lending == "off" else None


def _expected_lengths(options: ServeOptions, executor: str) -> str | None:
    if options.decode_admission == "greedy" and options.decode_choice == "load":
        return "where nothing depends on it: give --decode-admission or --decode-choice"
    return None


def _queue(options: ServeOptions, executor: str) -> str | None:
    return "without a queue: give --queue" if options.queue == "off" else None


def _shared_queue(options: ServeOptions, executor: str) -> str | None:
    return None if "://" in options.queue else "without a queue of several servers: give --queue postgresql://…"


NEEDS: Mapping[str, Need] = {
    "several devices": Need("--agents above 1", _several_devices),
    "one device": Need("--agents 1 and --prefix-caching", _one_device),
    "due rows": Need("agents apart from the scheduler (--agents or --backend)", _due_rows),
    "native kernels": Need("native kernels on a CPU", _native),
    "dense": Need("the dense executor", _dense),
    "paged": Need("the paged executor", _paged),
    "deadlines": Need("--plan edf or qlm", _deadlines),
    "deltas": Need("--serve-deltas", _deltas),
    "memory limit": Need("--device-memory or --agent-weights", _memory_limit),
    "host memory": Need("--host-memory", _host_memory),
    "a GPU's share": Need("--device cuda without --kv-cache-memory-bytes", _share_of_gpu),
    "prefill order": Need("--prefill-order", _prefill_order),
    "roles": Need("--roles", _roles),
    "prefixes": Need("--prefix-caching", _prefixes),
    "role watch": Need("--role-changes", _role_watch),
    "lending": Need("--lending", _lending),
    "expected lengths": Need("--decode-admission or --decode-choice", _expected_lengths),
    "queue": Need("--queue", _queue),
    "shared queue": Need("--queue postgresql://…", _shared_queue),
    "speculation": Need("--speculation", _speculation),
}
#: The conditions in words, for help texts.
SAID = {name: need.said for name, need in NEEDS.items()}


def require_effects(options: ServeOptions, executor: str | None = None) -> None:
    """Raise InputError for the first changed option without effect.

    `executor` is the chosen one, once it is decided.
    """
    for each in changed_options(options):
        for name in declared(each).needs:
            lacking = NEEDS[name].lacks(options, executor or options.executor)
            if lacking is not None:
                name_of = f"[{each.name}]" if declared(each).table else flag_of(each.name)
                raise InputError(f"{name_of} has no effect {lacking}")
