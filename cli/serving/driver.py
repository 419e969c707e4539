"""Which driver runs the models of `zoo serve`, `zoo generate` and `zoo bench`, and how it is brought up.

    one device, pages        the scheduler over one agent in its own thread (`inline`)
    one device, dense        the driver of one device (`local`): batches of Baton's are its agent's to plan
    one device, looks ahead  likewise: the scheduler's next row stands on the token before
    several                  the scheduler over agents in processes, threads, or Ray

Imports torch and transformers only when called.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from cli.serving.models import Chosen, start_engine
from cli.serving.needs import require_effects
from cli.serving.options import ServeOptions
from runtime.tracing.sink import TraceSink
from zoo.errors import InputError

if TYPE_CHECKING:
    from runtime.cluster.driver.driver import ClusterDriver
    from runtime.cluster.local import LocalDriver
    from zoo.api import Zoo


def start_driver(
    zoo: Zoo, options: ServeOptions, chosen: Chosen, database: str | None = None, trace: TraceSink | None = None,
    log: Callable[[bytes], object] | None = None,
) -> LocalDriver | ClusterDriver:  # fmt: skip
    """A running driver with these models, to be shut down. Raises InputError, Unavailable, and as loading does."""
    options = options.settled(chosen.executor)
    if options.backend == "local":
        require_effects(options, chosen.executor)
        if log is not None:
            raise InputError(
                "--scheduler-log needs a scheduler, and there is none: "
                f"{options.alone_because(chosen.executor) or '--backend local'}"
            )
        from runtime.cluster.local import LocalDriver

        return LocalDriver(
            start_engine(zoo, options.engine(), chosen.names, chosen.executor), options.batching(), trace
        )
    from cli.serving.cluster import start_cluster

    return start_cluster(zoo, options, chosen.names, database, trace, log)
