"""Scenarios as data: a cluster, applications, requests, and the policies that are compared; read from files or presets.

A scenario file is TOML or JSON; every value is optional, unknown names are refused:

    [cluster]   gpu = "A100-80GB"   servers = [2, 2, 4, 4]   net = "100gbps"   inside = "nvlink3"
                weights = 0.6   usable = 0.9
    [apps]      count = 20   foundations = ["llama-7b", "llama-13b", "chatglm-6b"]
                or: ladder, accuracy, step_ms
    [asked]     kind = "blockllm"   count = 400   seconds = 1200   faster = 1.0
                prompts = "uniform:8-512"   answers = "uniform:8-512"
    [pace]      tick, report
    [policies.NAME]   provision = "blocks" | "pm" | "ps", and values of family.Cutting, config.ClusterConfig and
                      config.AgentConfig; tables control, speculation and stand_ins in it have values of
                      config.ControlConfig, config.SpeculationConfig and stand_ins.StandIns
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from math import isnan
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_type_hints

import msgspec

from runtime.bench.lengths import parse_lengths
from runtime.bench.popularity import Popularity
from runtime.bench.traces import TraceFormat, read_trace
from runtime.config import AgentConfig, ClusterConfig, ControlConfig, SpeculationConfig
from runtime.sim.cost.hardware import ClusterHardware, ServerSpec, gpu_named, link_named
from runtime.sim.models.family import App, Cutting
from runtime.sim.models.stand_ins import StandIns
from runtime.sim.run.clock import Streams
from runtime.sim.run.node import Periods
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
_Settings = TypeVar("_Settings")
#: Limits of a simulated cluster, by the memory of the machine that simulates it.
_MOST_DEVICES = 65_536
_MOST_APPS = 10_000
#: Tables inside a policy.
_PARTS: Mapping[str, type] = {"control": ControlConfig, "speculation": SpeculationConfig}


@dataclass(frozen=True, slots=True)
class ClusterSettings:
    """The cluster.

    Fields:
        gpu: Kind of the devices.
        servers: Devices of each server.
        net, inside, host, disk: Kinds of links.
        usable: Share of a device's memory for weights and pages together.
        weights: Share of that for weights.
        control_us: Latency of a message between a device and the scheduler.
    """

    gpu: str = "A100-80GB"
    servers: tuple[int, ...] = (2, 2, 4, 4)
    net: str = "100gbps"
    inside: str = "nvlink3"
    host: str = "pcie4"
    disk: str = "nvme"
    usable: float = 0.9
    weights: float = 0.6
    control_us: float = 50.0

    def __post_init__(self) -> None:
        if not 0 < sum(self.servers) <= _MOST_DEVICES or min(self.servers) < 1:
            raise InputError(f"a cluster has servers with devices, and at most {_MOST_DEVICES:,} of these together")
        if not 0 < self.usable <= 1 or not 0 < self.weights < 1 or not 0 <= self.control_us < 1e6:
            raise InputError("usable and weights are shares of a device's memory, control_us is a time below a second")

    def cluster(self) -> ClusterHardware:
        """Return the hardware. Raises InputError for unknown names."""
        gpu, links = gpu_named(self.gpu), [link_named(name) for name in (self.inside, self.host, self.disk)]
        return ClusterHardware(
            tuple(ServerSpec(gpu, count, *links) for count in self.servers),
            link_named(self.net),
            round(self.control_us * 1000),
        )

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a device holds at most."""
        return int(gpu_named(self.gpu).memory * self.usable * self.weights)

    @property
    def page_bytes(self) -> int:
        """Bytes of all pages of a device."""
        return int(gpu_named(self.gpu).memory * self.usable * (1 - self.weights))


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
        faster: Factor by which the same requests arrive in less time.
        path, format: Of a trace, or of a file that names the models itself.
    """

    kind: AskedKind = "blockllm"
    count: int = 400
    seconds: float = 1200.0
    prompts: str = "uniform:8-512"
    answers: str = "uniform:8-512"
    longest: int = 1024
    popularity: Popularity = "uniform"
    faster: float = 1.0
    path: str = ""
    format: TraceFormat = "azure"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError("asked.count is at least 1")

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
        return made.faster(self.faster)


@dataclass(frozen=True, slots=True)
class Policy:
    """One way of provisioning and scheduling."""

    cutting: Cutting = field(default_factory=Cutting)
    scheduler: ClusterConfig = field(default_factory=ClusterConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    stand_ins: StandIns = field(default_factory=StandIns)

    @property
    def adaptive(self) -> bool:
        """Whether requests allow more than the model they name."""
        return self.cutting.equivalents or self.scheduler.speculation.mode == "similarity"


@dataclass(frozen=True, slots=True)
class Scenario:
    """A cluster, applications and requests, with the policies to compare."""

    name: str
    cluster: ClusterSettings = field(default_factory=ClusterSettings)
    apps: AppSettings = field(default_factory=AppSettings)
    asked: AskedSettings = field(default_factory=AskedSettings)
    pace: Periods = field(default_factory=Periods)
    policies: Mapping[str, Policy] = field(default_factory=lambda: {"blocks": Policy()})

    def models(self) -> tuple[str, ...]:
        """Return the models that are requested."""
        return self.apps.ladder[:1] or tuple(app.name for app in self.apps.apps())

    def demand(self, seed: int) -> Demand:
        return self.asked.demand(self.models(), Streams(seed))

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
    known = {"cluster", "apps", "asked", "pace", "policies"}
    if unknown := set(values) - known:
        raise InputError(f"a scenario has no {sorted(unknown)[0]!r}; it has {', '.join(sorted(known))}")
    policies = _table(values.get("policies", {"blocks": {}}), "policies")
    if not policies:
        raise InputError("a scenario has at least one policy")
    cluster = _settings(ClusterSettings, values.get("cluster", {}), "cluster")
    devices = sum(cluster.servers)
    return Scenario(
        name,
        cluster,
        _settings(AppSettings, values.get("apps", {}), "apps"),
        _settings(AskedSettings, values.get("asked", {}), "asked"),
        _settings(Periods, values.get("pace", {}), "pace"),
        {str(title): policy_of(_table(policy, f"policies.{title}"), devices) for title, policy in policies.items()},
    )


def policy_of(values: Mapping[str, Any], devices: int) -> Policy:
    """Make a policy from one flat table: each value goes to every setting of its name.

    The scheduler places blocks once all `devices` are up.
    """
    given = {"devices": devices, **values}
    stand_ins = _settings(StandIns, given.pop("stand_ins", {}), "stand_ins")
    unknown = given.keys() - {each.name for kind in (Cutting, ClusterConfig, AgentConfig) for each in fields(kind)}
    if unknown:
        raise InputError(f"a policy has no {min(unknown)!r}")
    return Policy(_named(Cutting, given), _named(ClusterConfig, given), _named(AgentConfig, given), stand_ins)


def _named(kind: type[_Settings], values: Mapping[str, Any]) -> _Settings:
    """Make settings from the values of a table that have their names."""
    names = [each.name for each in fields(kind) if each.name in values]  # type: ignore[arg-type]
    return _settings(kind, {name: values[name] for name in names}, "policies")


def _settings(kind: type[_Settings], values: Any, where: str) -> _Settings:
    """Make a dataclass from a table. Raises InputError for unknown names and wrong values."""
    table = _table(values, where)
    names = {each.name for each in fields(kind)}  # type: ignore[arg-type]
    if unknown := set(table) - names:
        raise InputError(f"{where} has no {sorted(unknown)[0]!r}; it has {', '.join(sorted(names))}")
    plain = {name: _settings(_PARTS[name], value, name) if name in _PARTS else value for name, value in table.items()}
    if bad := [name for name, value in plain.items() if isinstance(value, float) and isnan(value)]:
        raise InputError(f"{where}: {bad[0]} is no number")
    try:
        return msgspec.convert(plain, kind)
    except ValueError as error:
        raise InputError(_worded(error, kind, where)) from None


def _worded(error: ValueError, kind: type, where: str) -> str:
    """Reword a msgspec error: `asked.kind: Invalid enum value 'x'; it is one of …`."""
    text, _, place = str(error).partition(" - at `$")
    name = place.strip(".`")
    known = get_args(get_type_hints(kind).get(name)) if text.startswith("Invalid enum") else ()
    return f"{where}{'.' if name else ''}{name}: {text}" + (f"; it is one of {', '.join(known)}" if known else "")


def _table(values: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(values, Mapping):
        raise InputError(f"{where} is a table")
    return values
