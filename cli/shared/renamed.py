"""Renamed options. An old name is refused with the new one, in this version only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from zoo.errors import InputError

#: Old option -> new option, for every command that has the new one.
RENAMED = {
    "--token-budget": "--max-num-batched-tokens",
    "--max-sequences": "--max-num-seqs",
    "--kv-bytes": "--kv-cache-memory-bytes",
    "--sharing": "--prefix-caching",
    "--placing": "--placement",
    "--paths": "--routing",
    "--linger-us": "--batch-wait-us",
    "--balancing": "--rebalance",
    "--tensors": "--tensor-transport",
    "--block-rows": "--max-batch-per-block",
    "--boundary-bytes": "--activation-cache-bytes",
    "--otel": "--otlp-traces-endpoint",
    "--log": "--scheduler-log",
    "--deltas": "--serve-deltas",
    "--equivalent": "--min-equivalence",
    "--stitched": "--min-stitched",
}


def refuse_renamed(arguments: Sequence[str], known: Collection[str]) -> None:
    """Raise InputError for the first old name among a command's arguments. `known` are the command's options."""
    for argument in arguments:
        if argument == "--":
            return
        old = argument.partition("=")[0]
        new = RENAMED.get(old)
        if new is not None and old not in known and new in known:
            raise InputError(f"{old} is now {new}")


def refuse_renamed_key(source: str, key: str, known: Collection[str]) -> None:
    """Raise InputError for a renamed key of a configuration file."""
    new = RENAMED.get("--" + key.replace("_", "-"), "").removeprefix("--").replace("-", "_")
    if new in known:
        raise InputError(f"{source}: {key} is now {new}")
