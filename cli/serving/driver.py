"""Start the driver for the models of `zoo serve`, `zoo generate` and `zoo bench`: the scheduler and its agents.

- One device: one agent in the scheduler's own thread (`inline`), with either executor.
- Several devices: agents in processes, threads or Ray actors.

torch and transformers are imported only when needed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from cli.serving.chunk_choice import with_measured_chunk
from cli.serving.models import Chosen
from cli.serving.needs import require_effects
from cli.serving.options import ServeOptions
from runtime.tracing.sink import TraceSink
from zoo.errors import InputError

if TYPE_CHECKING:
    from runtime.chains import StageEngine
    from runtime.cluster.driver.driver import ClusterDriver
    from runtime.cluster.driver.length_thread import LengthMode
    from zoo.api import Zoo


def start_driver(
    zoo: Zoo, options: ServeOptions, chosen: Chosen, database: str | None = None, trace: TraceSink | None = None,
    log: Callable[[bytes], object] | None = None, made: Callable[[StageEngine], object] | None = None,
) -> ClusterDriver:  # fmt: skip
    """Return a running driver with these models; the caller shuts it down.

    `made` is called with each engine of an inline agent before it is used.

    Raises InputError, Unavailable and the errors of loading.
    """
    from cli.serving.cluster import start_cluster

    options = options.settled()
    require_effects(options, chosen.executor)
    options = with_measured_chunk(zoo, options, chosen)
    if options.lengths == "probe":
        _require_probe(zoo, chosen)
    driver = start_cluster(zoo, options, chosen, database, trace, log, made)
    try:
        _predict_lengths(zoo, options, chosen, driver)
    except BaseException:
        driver.shutdown()
        raise
    return driver


def _require_probe(zoo: Zoo, chosen: Chosen) -> None:
    """Raise InputError if models are named and none of them has a length probe. Raises as `stored_probe`."""
    from surrogates.lengths.probe_storing import stored_probe

    if chosen.names and not any([stored_probe(zoo.store, name) for name in chosen.names]):  # noqa: C419
        raise InputError(
            f"--lengths probe: no served model has one: `zoo lengths {chosen.names[0]} --kind probe` makes one"
        )


def _predict_lengths(zoo: Zoo, options: ServeOptions, chosen: Chosen, driver: ClusterDriver) -> None:
    """Let a driver predict lengths of answers if that is asked for. Raises as `StoredPredictors`."""
    if options.lengths in ("off", "probe"):  # agents run probes
        return
    from runtime.engine.catalog.length_predictors import StoredPredictors

    driver.predict_lengths(StoredPredictors(zoo.store, chosen.names).forecasts, cast("LengthMode", options.lengths))
