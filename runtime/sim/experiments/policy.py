"""Policies as data: one way of provisioning and scheduling, and what it changes of the shipped settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from runtime.config import AgentConfig, ClusterConfig
from runtime.policy.roles.role import PHASES, ROLES
from runtime.shipped import SHIPPED_AGENT, SHIPPED_CLUSTER, Serving, agent_config, cluster_config
from runtime.sim.baselines.engine import EngineSettings
from runtime.sim.experiments.tables import Settings, settings_of
from runtime.sim.models.family import Cutting
from runtime.sim.models.stand_ins import StandIns
from runtime.sim.workload.predictions import PredictedLengths
from zoo.errors import InputError


@dataclass(frozen=True, slots=True)
class Policy:
    """One way of provisioning and scheduling.

    Fields:
        engines: Instead of this project's scheduler, engines that are deployed apart (the paper's baselines).
        strides: Whether a device decodes all the tokens of its credit in one simulated step: fewer events, but rows
            that come meanwhile wait for its end.
        roles: What each device runs, in the order of the servers (TI-04); none: everything.
        lengths: What the scheduler knows of the lengths of answers.
    """

    cutting: Cutting = field(default_factory=Cutting)
    scheduler: ClusterConfig = field(default_factory=ClusterConfig)
    agent: AgentConfig = field(default_factory=AgentConfig)
    stand_ins: StandIns = field(default_factory=StandIns)
    strides: bool = False
    engines: EngineSettings | None = None
    roles: tuple[str, ...] = ()
    lengths: PredictedLengths = PredictedLengths()

    @property
    def adaptive(self) -> bool:
        """Whether requests allow more than the model they name."""
        return self.cutting.equivalents or self.scheduler.speculation.mode == "similarity"

    def scheduler_of(self, devices: Sequence[str]) -> ClusterConfig:
        """Return the scheduler's settings with the roles of these devices. Raises InputError for wrong ones."""
        if not self.roles:
            return self.scheduler
        if len(self.roles) != len(devices):
            raise InputError(f"policies.roles names {len(self.roles)} roles for {len(devices)} devices: one for each")
        if unknown := [name for name in self.roles if name not in ROLES]:
            raise InputError(f"policies.roles: {unknown[0]!r} is no role; they are {', '.join(ROLES)}")
        named = tuple((device, ROLES[name].name) for device, name in zip(devices, self.roles, strict=True))
        if not all(any(ROLES[name].admits(phase) for name in self.roles) for phase in PHASES):
            raise InputError("policies.roles: prompts and decoding both need a device")
        try:
            return replace(self.scheduler, residency="fixed", roles=named)
        except ValueError as error:
            raise InputError(str(error)) from None


def policy_of(values: Mapping[str, Any], devices: int) -> Policy:
    """Make a policy from one flat table: each value goes to every setting of its name.

    The scheduler places blocks once all `devices` are up.
    """
    given = dict(values)
    stand_ins = settings_of(StandIns, given.pop("stand_ins", {}), "stand_ins")
    lengths = settings_of(PredictedLengths, given.pop("lengths", {}), "lengths")
    strides, engines, roles = given.pop("strides", False), given.pop("engines", None), given.pop("roles", ())
    if not isinstance(roles, list | tuple) or not all(isinstance(name, str) for name in roles):
        raise InputError("policies.roles: a list of roles, one for each device")
    if not isinstance(strides, bool):
        raise InputError("policies.strides: true or false")
    if strides and lengths.hidden:
        raise InputError("policies.strides: with hidden lengths each token is a step")
    unknown = given.keys() - {each.name for kind in (Cutting, ClusterConfig, AgentConfig) for each in fields(kind)}
    if unknown:
        raise InputError(f"a policy has no {min(unknown)!r}")
    scheduler, agent = shipped(devices)
    lending = _named(scheduler, given).lending
    if lending.mode == "negotiated":
        raise InputError("policies.lending.mode: simulated clusters have no managers of the pool; take planned")
    if lending.shape == "layers":
        raise InputError("policies.lending.shape: a simulated page has all layers; take tokens")
    if lending.mode != "off":
        scheduler, agent = shipped(devices, launches_ahead=False)
        if strides:
            raise InputError("policies.strides: with loans each token is a step")
    apart = None if engines is None else settings_of(EngineSettings, engines, "engines")
    return Policy(
        _named(Cutting(), given),
        _named(scheduler, given),
        _named(agent, given),
        stand_ins,
        strides,
        apart,
        tuple(roles),
        lengths,
    )


def shipped(devices: int, launches_ahead: bool = True) -> tuple[ClusterConfig, AgentConfig]:
    """Return what `zoo serve --device cuda --agents DEVICES` gives the scheduler and the agents.

    Engines that lend launch no steps ahead.
    """
    serving = Serving(devices, launches_ahead=launches_ahead)
    scheduler = cluster_config(serving, SHIPPED_CLUSTER, SHIPPED_AGENT.max_num_batched_tokens)
    return scheduler, agent_config(serving, SHIPPED_AGENT)


def _named(base: Settings, values: Mapping[str, Any]) -> Settings:
    """Return settings with the values of a table that have their names."""
    kind = type(base)
    names = [each.name for each in fields(kind) if each.name in values]  # type: ignore[arg-type]
    return settings_of(kind, {name: values[name] for name in names}, "policies", base)
