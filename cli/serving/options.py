"""The settings of `zoo serve`: defaults, then a TOML or JSON file, then the command line. Unknown keys and wrong types
are refused.

Knows nothing of serving; it turns text into three frozen configurations.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from cli.serving.effects import require_effects
from runtime.config import (
    AgentConfig,
    BatchingConfig,
    ClusterConfig,
    ControlConfig,
    DenseConfig,
    EngineConfig,
    ServerConfig,
    SpeculationConfig,
)
from runtime.policy.routing.variants import DispatchLimits
from zoo.errors import InputError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
#: An agent alone divides prompts over steps by itself, and is told of so many steps' worth at once: few of them are
#: then left half full.
_STEPS = 4

C = TypeVar("C")


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """One field per option. Sizes are numbers of bytes, or text such as `4GiB`."""

    host: str = "127.0.0.1"
    port: int = 8000
    models: tuple[str, ...] = ()
    api_key: str | None = None
    trace: str | None = None
    otel: str | None = None
    log: str | None = None
    device: str = "cpu"
    dtype: str | None = None
    layers: str = "fused"
    weights: str = "auto"
    kernels: str = "auto"
    graphs: str = "auto"
    async_scheduling: str = "auto"
    executor: str = "auto"
    dense_mode: str = "baton-pd"
    dense_slots: int = 16
    dense_padding: str = "skipped"
    kv_bytes: int | str = 1 << 30
    max_model_len: int | None = None
    token_budget: int = 512
    max_sequences: int = 256
    max_queued: int = 4096
    drain_seconds: float = 30.0
    agents: int = 1
    backend: str = "auto"
    placing: str = "auto"
    speculation: str = "off"
    speculation_lane: str = "own"
    sharing: str = "running"
    balancing: str = "strict"
    dispatch: str = "placed"
    tensors: str = "host"
    block_rows: int = 0
    paths: str = "loads"
    linger_us: int = 2000
    agent_weights: int | str = 0
    boundary_bytes: int | str = 0
    deltas: bool = False
    early_exit: bool = False
    adaptive: str = "latency"
    adaptive_ms: float = 0.0
    equivalent: float = 0.98
    stitched: float = 0.95

    @property
    def clustered(self) -> bool:
        """Whether it was said that agents run the models. (`process` is another word for `processes`.)"""
        return self.agents > 1 or self.backend not in ("auto", "local")

    def alone_because(self, executor: str) -> str | None:
        """Why one device has a driver of its own where nothing else is said; None where the scheduler serves it."""
        if executor == "dense":
            return "the dense executor plans its own batches"
        if self.async_scheduling == "on" or (self.async_scheduling == "auto" and self.device.split(":")[0] != "cpu"):
            return "steps are planned ahead"
        return None

    def settled(self, executor: str) -> ServeOptions:
        """With the backend that runs what this executor does."""
        if self.backend != "auto":
            return self
        if self.agents > 1:
            return replace(self, backend="processes")
        return replace(self, backend="inline" if self.alone_because(executor) is None else "local")

    def engine(self) -> EngineConfig:
        """Raises InputError."""
        if self.dtype not in (None, "float32", "bfloat16", "float16"):
            raise InputError(f"dtype must be float32, bfloat16 or float16, not {self.dtype!r}")
        return _built(
            EngineConfig,
            device=self.device,
            dtype=self.dtype,
            layers=self.layers,
            weights=self.weights,
            kernels=self.kernels,
            graphs=self.graphs,
            async_scheduling=self.async_scheduling,
            kv_bytes=size_of(self.kv_bytes),
            max_model_len=self.max_model_len,
            trace_segments=self.trace is not None,
            dense=_built(DenseConfig, mode=self.dense_mode, slots=self.dense_slots, padding=self.dense_padding),
        )

    def batching(self) -> BatchingConfig:
        """Raises InputError."""
        return _built(BatchingConfig, token_budget=self.token_budget, max_sequences=self.max_sequences)

    def cluster(self) -> ClusterConfig:
        """Raises InputError."""
        inline = self.backend == "inline"
        control = _built(ControlConfig, balancing=self.balancing)
        return _built(
            ClusterConfig,
            devices=self.agents,
            placing=self.placing,
            max_running=self.max_sequences,
            chunk=_STEPS * self.token_budget if inline else min(self.token_budget, 256),
            speculation=_built(SpeculationConfig, mode=self.speculation, lane=self.speculation_lane),
            sharing=self.sharing,
            block_rows=self.block_rows,
            paths=self.paths,
            control=ControlConfig.off() if inline else control,
            dispatch=self.dispatch,
        )

    def adaptation(self) -> DispatchLimits:
        """How adaptive requests are dispatched over agents."""
        prefer: Literal["latency", "accuracy"] = "accuracy" if self.adaptive == "accuracy" else "latency"
        limit = self.adaptive_ms / 1000 if self.adaptive_ms else None
        return DispatchLimits(prefer, self.equivalent, self.stitched, limit=limit)

    def relay(self) -> AgentConfig:
        """Raises InputError."""
        kept = size_of(self.boundary_bytes)
        return _built(
            AgentConfig,
            token_budget=self.token_budget,
            max_rows=self.max_sequences,
            linger_us=self.linger_us,
            boundary_bytes=kept,
            divide=self.backend == "inline",
        )

    def server(self) -> ServerConfig:
        return ServerConfig(
            host=self.host,
            port=self.port,
            api_key=self.api_key,
            max_queued=self.max_queued,
            drain_seconds=self.drain_seconds,
            trace=self.trace,
            early_exit=self.early_exit,
        )


def gather(file: Path | None, given: Mapping[str, Any]) -> ServeOptions:
    """Options from a file overlaid by those given on the command line (None: not given). Raises InputError."""
    options = ServeOptions()
    for source, values in ((str(file), _read(file) if file else {}), ("command line", given)):
        options = replace(
            options, **_checked(source, {key: value for key, value in values.items() if value is not None})
        )
    _check(options)
    return options


def size_of(text: int | str) -> int:
    """`1024`, `512MB` (decimal) or `4GiB` (binary) in bytes. Raises InputError."""
    match = re.fullmatch(r"\s*(\d{1,15})\s*([kmgt]i?)?b?\s*", str(text), re.IGNORECASE)
    if match is None:
        raise InputError(f"{text!r} is no size in bytes; write a number, 512MB or 4GiB")
    return int(match[1]) * _UNITS[(match[2] or "").lower()]


def _read(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise InputError(f"{path} is neither TOML nor JSON: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no table of options")
    return {key.replace("-", "_"): value for key, value in values.items()}


def _checked(source: str, values: dict[str, Any]) -> dict[str, Any]:
    types = get_type_hints(ServeOptions)
    unknown = sorted(set(values) - set(types))
    if unknown:
        raise InputError(
            f"{source}: unknown option {unknown[0]!r}; known are "
            f"{', '.join(field.name for field in fields(ServeOptions))}"
        )
    return {key: _typed(source, key, types[key], value) for key, value in values.items()}


def _typed(source: str, key: str, kind: Any, value: Any) -> Any:
    if get_origin(kind) is tuple:
        if isinstance(value, list | tuple) and all(isinstance(item, str) for item in value):
            return tuple(value)
        raise InputError(f"{source}: {key} must be a list of names")
    allowed = (
        tuple(one for one in get_args(kind) if one is not type(None)) if get_origin(kind) in (UnionType,) else (kind,)
    )
    if float in allowed:
        allowed += (int,)
    if isinstance(value, bool) != (kind is bool) or not isinstance(value, allowed):
        raise InputError(f"{source}: {key} must be {' or '.join(one.__name__ for one in allowed)}, not {value!r}")
    return value


def _check(options: ServeOptions) -> None:
    if options.backend not in ("auto", "local", "inline", "threads", "process", "processes", "ray"):
        raise InputError(f"backend must be auto, inline, local, threads, processes or ray, not {options.backend!r}")
    if options.backend == "inline" and options.agents != 1:
        raise InputError("an inline agent is the only one: leave --agents 1, or take another --backend")
    if options.otel is not None and not options.otel.startswith(("http://", "https://")):
        raise InputError(f"otel must be an address such as http://host:4318/v1/traces, not {options.otel!r}")
    if options.backend == "local" and options.agents != 1:
        raise InputError("the local driver is of one device: leave --agents 1, or take another --backend")
    if options.log is not None and options.backend == "local":
        raise InputError("--log is of a scheduler, which --backend local has not: give --trace instead")
    if not 1 <= options.agents <= 256:
        raise InputError(f"{options.agents} agents: there must be at least 1, and at most 256")
    if options.tensors not in ("host", "direct", "network"):
        raise InputError(f"tensors must be host, direct or network, not {options.tensors!r}")
    if options.tensors == "network" and options.backend != "ray":
        raise InputError("agents of one machine have no network between them: give --tensors direct, or --backend ray")
    if options.clustered and options.executor == "dense":
        raise InputError("the dense executor runs on one device only: leave --agents 1 and --backend local")
    if options.executor not in ("auto", "paged", "dense"):
        raise InputError(f"executor must be auto, paged or dense, not {options.executor!r}")
    _check_adaptive(options)
    options.batching()  # refuses limits that no step can have, whoever plans it
    require_effects(options)
    if options.api_key == "" or os.environ.get("ZOO_API_KEY") == "":
        raise InputError("the API key is empty; leave it out to serve without one")
    if not 0 <= options.port <= 65535:
        raise InputError(f"{options.port} is no port")
    if options.max_queued < 1 or not 0 < options.drain_seconds < 86400:
        raise InputError("max_queued and drain_seconds must be positive")


def _check_adaptive(options: ServeOptions) -> None:
    if options.adaptive not in ("latency", "accuracy"):
        raise InputError(f"adaptive must be latency or accuracy, not {options.adaptive!r}")
    if options.adaptive == "accuracy" and not (options.deltas and options.backend != "local"):
        raise InputError(
            "accuracy first is how a scheduler serves adaptive requests: give --deltas, and no --backend local"
        )
    if options.adaptive_ms and options.adaptive != "accuracy":
        raise InputError("adaptive_ms is the time up to which accuracy comes first: give --adaptive accuracy")
    if not (0.0 <= options.equivalent <= 1.0 and 0.0 <= options.stitched <= 1.0 and 0.0 <= options.adaptive_ms < 1e9):
        raise InputError("equivalent and stitched must be from 0 to 1, adaptive_ms at least 0")


def _built(kind: type[C], **values: Any) -> C:
    try:
        return kind(**values)
    except ValueError as error:
        raise InputError(str(error)) from None
