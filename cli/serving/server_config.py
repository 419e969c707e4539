"""What the HTTP server and the dispatch of adaptive requests get of the options."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

from runtime.config import Durability, ServerConfig
from runtime.policy.routing.variants import DispatchLimits

if TYPE_CHECKING:
    from cli.serving.options import ServeOptions


def adaptation_of(options: ServeOptions) -> DispatchLimits:
    """Return how adaptive requests are dispatched."""
    prefer: Literal["latency", "accuracy"] = "accuracy" if options.adaptive == "accuracy" else "latency"
    limit = options.adaptive_ms / 1000 if options.adaptive_ms else None
    return DispatchLimits(prefer, options.min_equivalence, options.min_stitched, limit=limit)


def server_config(options: ServeOptions) -> ServerConfig:
    """Return the server's configuration."""
    return ServerConfig(
        host=options.host, port=options.port, api_key=options.api_key, max_queued=options.max_queued,
        max_num_seqs=options.max_num_seqs, drain_seconds=options.drain_seconds, early_exit=options.early_exit,
        durable=cast(Durability, options.durable), retention_hours=options.retention_hours, batches=options.batches,
        broker=options.broker, client_keys=options.client_keys,
    )  # fmt: skip
