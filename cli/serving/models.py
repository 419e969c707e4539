"""Select the models to serve, and make their engine.

torch is imported only when needed, by the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cli.serving.executor_choice import dense_is_faster
from cli.shared.output import human_bytes, say
from runtime.frontend.served_models import StoredModel
from zoo.errors import DamagedObject, InputError, NotServable
from zoo.manifest import PARTS
from zoo.views.exits import exit_of, is_exit

if TYPE_CHECKING:
    from runtime.chains import StageEngine
    from runtime.config import EngineConfig
    from runtime.engine.models.servable import Executor
    from zoo.api import Zoo
    from zoo.catalog import ModelConfig

_NONE = "the store holds no model that can be served; put one in with `zoo ingest`"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The result of `choose`.

    Fields:
        names: Full names of the models to serve.
        skipped: Why each remaining model of the store is not served.
        executor: The executor that runs them.
        on_demand: Models that are served once a request names them.
        measured: Models that sizes of pages and blocks are taken from.
    """

    names: tuple[str, ...]
    skipped: tuple[NotServable, ...]
    executor: Executor = "paged"
    on_demand: tuple[StoredModel, ...] = ()
    measured: tuple[str, ...] = ()


def choose(
    zoo: Zoo, wanted: Sequence[str], dtype: str | None = None, executor: str = "auto", device: str = "cpu"
) -> Chosen:
    """Return the wanted models, or all that can be served. `dtype` is the data type the engine casts weights to.

    `executor` is `paged`, `dense` or `auto`. `auto` means paged, unless a wanted model (or every model of the store)
    needs dense, or dense runs all of them and was measured to be faster on a device like this one (`zoo profile
    --executors`).

    Raises NotFound, AmbiguousName; NotServable for a wanted model that the executor cannot run; InputError if no model
    is left.
    """
    if executor == "auto":
        try:
            paged = _chosen(zoo, wanted, dtype, "paged")
        except (NotServable, InputError) as refusal:
            try:
                return _chosen(zoo, wanted, dtype, "dense")
            except InputError:
                raise refusal from None
        if not dense_is_faster(zoo, paged.names, device):
            return paged
        dense = _chosen(zoo, wanted, dtype, "dense")
        return dense if set(dense.names) >= set(paged.names) else paged
    return _chosen(zoo, wanted, dtype, "dense" if executor == "dense" else "paged")


def all_on_demand(zoo: Zoo, dtype: str | None = None) -> Chosen:
    """Return all models of the store, none of them served before a request names it.

    Reads one manifest per config of a foundation, so that a start takes about as long for thousands of models as for
    one. Any other model that is damaged or cannot be served gives its error once a request names it.

    Raises InputError if the store has no foundation that the paged executor can run, DamagedObject if damage is why.
    """
    with zoo.store.catalog.reading() as reader:
        known = [entry for entry in reader.entries() if entry.kind not in PARTS]
        configs = reader.configs()
    measured: dict[ModelConfig, str] = {}
    damage: DamagedObject | None = None
    for entry in known:
        config = configs[entry.name]
        if entry.base is not None or config in measured:
            continue
        try:
            _check(zoo, entry.name, dtype, "paged")
        except InputError:
            continue
        except DamagedObject as error:
            damage = error
            continue
        measured[config] = entry.name
    if not measured:
        raise damage or InputError(_NONE)
    stored = tuple(StoredModel(each.name, each.base, int(each.created.timestamp())) for each in known)
    return Chosen((), (), on_demand=stored, measured=tuple(measured.values()))


def _chosen(zoo: Zoo, wanted: Sequence[str], dtype: str | None, executor: Executor) -> Chosen:
    if wanted:
        full = tuple(dict.fromkeys(zoo.model(name).name for name in wanted))
        for name in full:
            _check(zoo, name, dtype, executor)
        return Chosen(full, (), executor)
    names: list[str] = []
    skipped: list[NotServable] = []
    for entry in zoo.entries():
        if entry.kind in PARTS:  # stored under a name of its own
            continue
        try:
            _check(zoo, entry.name, dtype, executor)
            names.append(entry.name)
        except NotServable as error:
            skipped.append(error)
    if not names:
        raise InputError(_NONE)
    return Chosen(tuple(names), tuple(skipped), executor)


def with_exits(zoo: Zoo, wanted: Sequence[str]) -> tuple[str, ...]:
    """Return these models and all their exits in the store (`zoo exits`). Raises NotFound, AmbiguousName."""
    models = {model.name: model.manifest for model in map(zoo.model, wanted)}
    found: list[str] = []
    for entry in zoo.entries():
        named = exit_of(entry.name)
        if named is None or named[0] not in models:
            continue
        if is_exit(models[named[0]], zoo.model(entry.name).manifest):
            found.append(entry.name)
        else:
            say(
                f"warning: left out: {entry.name} is no exit of {named[0]} as it is now; make it again with `zoo exits`"
            )
    return (*models, *found)


def check_device(device: str) -> None:
    """Raise InputError for a device that torch does not support or cannot reach."""
    import torch

    from cli.serving.gpus import check_cuda

    if device.startswith("cuda"):
        check_cuda(device)
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"device {device!r} cannot be used: {reason}") from None


def start_engine(zoo: Zoo, config: EngineConfig, half_page: int, executor: Executor = "paged") -> StageEngine:
    """Return an engine without models. `half_page` is the bytes of K in a page.

    Raises InputError if its pool does not fit the device.
    """
    from runtime.engine.dense.executor import DenseEngine
    from runtime.engine.executors.stage import StagedEngine

    check_device(config.device)
    with within_memory(config):
        return (DenseEngine if executor == "dense" else StagedEngine)(zoo.store, config, half_page)


@contextmanager
def within_memory(config: EngineConfig) -> Iterator[None]:
    """Turn an out-of-memory error of the block, which makes an engine, into InputError."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if "memory" not in str(error).lower() and not isinstance(error, MemoryError):
            raise
        raise InputError(
            f"the models and their page pool do not fit the memory of {config.device}; lower --gpu-memory-utilization"
            if config.gpu_memory_utilization
            else f"{human_bytes(config.device_memory_bytes)} of memory cannot be had on {config.device}; lower "
            "--device-memory"
            if config.device_memory_bytes
            else f"the models and a page pool of {human_bytes(config.kv_cache_memory_bytes)} do not fit the memory of "
            f"{config.device}; lower --kv-cache-memory-bytes"
        ) from error


def _check(zoo: Zoo, name: str, dtype: str | None, executor: Executor) -> None:
    """Raise NotServable if the executor cannot run the model. Reads the model's settings only."""
    from runtime.engine.models.registry import dtype_named
    from runtime.engine.models.servable import servable

    servable(zoo.store, zoo.model(name).manifest, None if dtype is None else dtype_named(dtype), executor)
