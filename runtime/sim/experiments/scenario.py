"""Scenarios as data: a cluster, applications, requests, and the policies that are compared; read from files or presets.

A scenario file is TOML or JSON; every value is optional, unknown names are refused:

    [cluster]   gpu = "A100-80GB"   servers = [2, 2, 4, 4]   net = "100gbps"   inside = "nvlink3"
                weights = 0.6   usable = 0.9   host_cache = 100_000_000_000   loads = "stop" | "beside"
                hops = "new" | "context"   pages = "fixed" | "rest"
    [apps]      count = 20   foundations = ["llama-7b", "llama-13b", "chatglm-6b"]
                or: ladder, accuracy, step_ms
    [asked]     kind = "blockllm"   count = 400   seconds = 1200   faster = 1.0
                prompts = "uniform:8-512"   answers = "uniform:8-512"
    [classes.NAME]   share = 0.1   slo_ms = 8000 | ttft_slo_ms = 2000   priority = 0   within = 1.0   prompts, answers
    [pace]      tick, report
    [policies.NAME]   provision = "blocks" | "pm" | "ps", and values of family.Cutting, config.ClusterConfig and
                      config.AgentConfig; roles = ["prefill", "decode", …], one for each device; tables control,
                      speculation, order, stand_ins and engines in it have values of config.ControlConfig,
                      config.SpeculationConfig, config.OrderConfig, stand_ins.StandIns and engine.EngineSettings

What a policy does not name is as `zoo serve` ships it on so many GPUs (`runtime.shipped`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import cycle
from pathlib import Path
from typing import Any, Literal

from runtime.bench.lengths import parse_lengths
from runtime.bench.popularity import Popularity
from runtime.bench.traces import TraceFormat, read_trace
from runtime.sim.cost.hardware import ClusterHardware, Gpu, ServerSpec, gpu_named, link_named
from runtime.sim.experiments.policy import Policy, policy_of
from runtime.sim.experiments.tables import settings_of, table_of
from runtime.sim.models.family import App
from runtime.sim.run.clock import Streams
from runtime.sim.run.network import Hops
from runtime.sim.run.node import Periods
from runtime.sim.workload.classes import ClassSettings, classed
from runtime.sim.workload.generators import (
    Asked,
    blockllm_demand,
    paper_apps,
    poisson_demand,
    trace_demand,
    twitter_demand,
)
from runtime.sim.workload.requests import Demand, read_demand
from zoo.errors import InputError

AskedKind = Literal["blockllm", "twitter", "poisson", "trace", "file"]
#: Limits of a simulated cluster, by the memory of the machine that simulates it.
_MOST_DEVICES = 65_536
_MOST_APPS = 10_000


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The cluster.

    Fields:
        gpu: Kind of the devices.
        gpus: Kinds by server, where they differ: those of the first servers, then again from the first one on.
        servers: Devices of each server.
        net, inside, host, disk: Kinds of links.
        usable: Share of a device's memory for weights and pages together.
        weights: Most of that for weights, as a share; K and V get what the weights of all models leave, and at least
            the rest.
        host_cache: Bytes of a server's memory per device that keep what was read from its disk.
        loads: Whether a device runs no steps while it loads a stage (`stop`, as engines on GPUs do), or loads beside
            its steps (`beside`, as engines on CPUs do).
        hops: What a row carries from one device to another (`sim.run.network`).
        pages: Whether K and V have the same share all the time (`fixed`), or what the loaded weights leave (`rest`, as
            with `zoo serve --device-memory` on CPUs).
        control_us: Latency of a message between a device and the scheduler.
    """

    gpu: str = "A100-80GB"
    gpus: tuple[str, ...] = ()
    servers: tuple[int, ...] = (2, 2, 4, 4)
    net: str = "100gbps"
    inside: str = "nvlink3"
    host: str = "pcie4"
    disk: str = "nvme"
    usable: float = 0.9
    weights: float = 0.6
    host_cache: int = 100_000_000_000
    loads: Literal["stop", "beside"] = "stop"
    hops: Hops = "new"
    pages: Literal["fixed", "rest"] = "fixed"
    control_us: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < sum(self.servers) <= _MOST_DEVICES or min(self.servers) < 1:
            raise InputError(f"a cluster has servers with devices, and at most {_MOST_DEVICES:,} of these together")
        if self.host_cache < 0:
            raise InputError("host_cache is a number of bytes")
        if not 0 < self.usable <= 1 or not 0 < self.weights < 1 or not 0 <= self.control_us < 1e6:
            raise InputError("usable and weights are shares of a device's memory, control_us is a time below a second")

    def cluster(self) -> ClusterHardware:
        """Return the hardware. Raises InputError for unknown names."""
        kinds = [gpu_named(name) for name in self.gpus or (self.gpu,)]
        links = [link_named(name) for name in (self.inside, self.host, self.disk)]
        return ClusterHardware(
            tuple(ServerSpec(gpu, count, *links) for gpu, count in zip(cycle(kinds), self.servers, strict=False)),
            link_named(self.net),
            round(self.control_us * 1000),
        )

    def usable_bytes(self, gpu: Gpu) -> int:
        """Return the bytes of a device for weights and pages together."""
        return int(gpu.memory * self.usable)

    def weight_bytes(self, gpu: Gpu, needed: int) -> int:
        """Return the bytes of weights that a device holds at most, where all models together have `needed` bytes."""
        return min(needed, int(self.usable_bytes(gpu) * self.weights))


@dataclass(frozen=True, slots=True)
class AppSettings:
    """The applications.

    Fields:
        ladder: Instead of applications, plain foundations that stand in for each other. The first is requested; later
            ones are taken where a step would take longer than `step_ms`.
        accuracy: Of each model of the ladder.
    """

    count: int = 20
    foundations: tuple[str, ...] = ("llama-7b", "llama-13b", "chatglm-6b")
    ladder: tuple[str, ...] = ()
    accuracy: tuple[float, ...] = ()
    step_ms: float = 40.0

    def __post_init__(self) -> None:
        if not 1 <= self.count <= _MOST_APPS:
            raise InputError(f"apps.count is from 1 to {_MOST_APPS:,}")
        if (
            len(self.ladder) != len(self.accuracy)
            or not all(0 < each <= 1 for each in self.accuracy)
            or not self.step_ms > 0
        ):
            raise InputError("a ladder has an accuracy in (0, 1] for each of its models, and a step's limit above 0")

    def apps(self) -> tuple[App, ...]:
        """Return the applications. Raises InputError for unknown foundations."""
        if self.ladder:
            return tuple(App(name, name, "foundation") for name in self.ladder)
        return paper_apps(self.count, self.foundations)


@dataclass(frozen=True, slots=True)
class AskedSettings:
    """The requests.

    Fields:
        longest: Tokens of prompt and answer together, at most.
        after: Seconds before the first request, in which models are loaded.
        faster: Factor by which the same requests arrive in less time.
        path, format: Of a trace, or of a file that names the models itself.
    """

    kind: AskedKind = "blockllm"
    count: int = 400
    seconds: float = 1200.0
    prompts: str = "uniform:8-512"
    answers: str = "uniform:8-512"
    longest: int = 1024
    after: float = 0.0
    popularity: Popularity = "uniform"
    faster: float = 1.0
    path: str = ""
    format: TraceFormat = "azure"

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.after < 1e6:
            raise InputError("asked.count is at least 1, and asked.after a time in seconds")

    def demand(self, models: tuple[str, ...], streams: Streams) -> Demand:
        """Generate or read the requests. Raises InputError."""
        asked = Asked(self.count, self.seconds, parse_lengths(self.prompts), parse_lengths(self.answers), self.longest)
        if self.kind == "file":
            made = read_demand(Path(self.path))
        elif self.kind == "trace":
            made = trace_demand(
                models, read_trace(Path(self.path), self.format, self.count), asked, streams, self.popularity
            )
        elif self.kind == "twitter":
            made = twitter_demand(models, asked, streams, popularity=self.popularity)
        elif self.kind == "poisson":
            made = poisson_demand(models, asked, streams, self.popularity)
        else:
            made = blockllm_demand(models, asked, streams)
        return made.faster(self.faster).later(self.after)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, applications and requests, with the policies to compare.

    Fields:
        classes: Of requests, by name; none where all are alike.
    """

    name: str
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    apps: AppSettings = field(default_factory=AppSettings)
    asked: AskedSettings = field(default_factory=AskedSettings)
    pace: Periods = field(default_factory=Periods)
    classes: Mapping[str, ClassSettings] = field(default_factory=dict)
    policies: Mapping[str, Policy] = field(default_factory=lambda: {"blocks": Policy()})

    def models(self) -> tuple[str, ...]:
        """Return the models that are requested."""
        return self.apps.ladder[:1] or tuple(app.name for app in self.apps.apps())

    def demand(self, seed: int) -> Demand:
        streams = Streams(seed)
        return classed(self.asked.demand(self.models(), streams), self.classes, self.asked.longest, streams)

    def resized(self, requests: int | None, devices: int | None) -> Scenario:
        """Return the scenario with so many requests at the same rate, and so many devices.

        The devices are in servers like the last one.
        """
        made = self
        if requests is not None:
            seconds = self.asked.seconds * requests / self.asked.count
            made = replace(made, asked=replace(made.asked, count=requests, seconds=seconds))
        if devices is not None:
            whole, rest = divmod(devices, self.cluster.servers[-1])
            servers = (self.cluster.servers[-1],) * whole + ((rest,) if rest else ())
            # The scheduler places blocks once all its devices are up; waiting for more than exist would never end.
            policies = {
                title: replace(policy, scheduler=replace(policy.scheduler, devices=sum(servers)))
                for title, policy in made.policies.items()
            }
            made = replace(made, cluster=replace(made.cluster, servers=servers), policies=policies)
        return made


def read_scenario(path: Path) -> Scenario:
    """Read a scenario's file. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from None
    if not isinstance(values, dict):
        raise InputError(f"{path} holds no table")
    return scenario_of(path.stem, values)


def scenario_of(name: str, values: Mapping[str, Any]) -> Scenario:
    """Make a scenario from tables as shown at the top of the file. Raises InputError."""
    known = {"cluster", "apps", "asked", "classes", "pace", "policies"}
    if unknown := set(values) - known:
        raise InputError(f"a scenario has no {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    policies = table_of(values.get("policies", {"blocks": {}}), "policies")
    if not policies:
        raise InputError("a scenario has at least one policy")
    cluster = settings_of(ClusterSettings, values.get("cluster", {}), "cluster")
    devices = sum(cluster.servers)
    return Scenario(
        name,
        cluster,
        settings_of(AppSettings, values.get("apps", {}), "apps"),
        settings_of(AskedSettings, values.get("asked", {}), "asked"),
        settings_of(Periods, values.get("pace", {}), "pace"),
        {
            str(name): settings_of(ClassSettings, each, f"classes.{name}")
            for name, each in table_of(values.get("classes", {}), "classes").items()
        },
        {str(title): policy_of(table_of(policy, f"policies.{title}"), devices) for title, policy in policies.items()},
    )
