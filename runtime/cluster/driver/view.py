"""Read the state of a running cluster, under the driver's lock: agents, models, migrations, memory. Changes nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from runtime.chains import Chain
from runtime.cluster.agents.lifecycle import AgentFacts
from runtime.cluster.agents.pool import AgentPool
from runtime.cluster.driver.unavailable_models import UnavailableModels
from runtime.control.counters import AgentState
from runtime.messages import AgentStats
from runtime.scheduler.devices.devices import Device
from runtime.scheduler.migration.migration import MigrationCounts
from runtime.scheduler.observe.snapshot import picture_of
from runtime.scheduler.order.forecasts import ForecastOutcome
from runtime.scheduler.scheduler import Scheduler
from runtime.scheduler.speculation.speculation import SpeculationCounts
from runtime.types import EngineMemory, ModelSpec


class ClusterView:
    """Read-only view of a cluster. Every method may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        remote_agents: AgentPool,
        unavailable_models: UnavailableModels,
        changed: threading.Condition,
    ) -> None:
        self._scheduler, self._remote_agents, self._unavailable_models, self._changed = (
            scheduler,
            remote_agents,
            unavailable_models,
            changed,
        )

    def models(self) -> tuple[ModelSpec, ...]:
        """Return the served models; `max_model_len` is limited by the pages of all living devices together."""
        with self._changed:
            specs, pages = (
                self._scheduler.models(),
                sum(device.pages.assured for device in self._scheduler.devices if device.alive),
            )
        return tuple(_capped(spec, pages) for spec in specs)

    def chain(self, model: str) -> Chain | None:
        """Return the chain that new sequences of a model get; None if it is not served."""
        with self._changed:
            return next((chain for chain in self._scheduler.chains() if chain.model == model), None)

    def state(self) -> AgentState:
        with self._changed:
            state, work = self._scheduler.state(), self._remote_agents.work()
        done = replace(state.counters, steps=work.steps, busy=work.busy, segments=work.segments, idle_tokens=work.idle)
        return replace(state, counters=done)

    def leaving(self, model: str) -> bool:
        """Return whether a version of a model that new sequences do not get still runs or is still on devices."""
        with self._changed:
            return self._scheduler.uses(model)

    def refused(self) -> Mapping[str, str]:
        """Return the stages that devices could not load at the latest attempt, with the reason."""
        with self._changed:
            return {
                stage.id: refusal.why
                for device in self._scheduler.devices
                for stage, refusal in device.stages.refusals.items()
            }

    def split(self) -> Mapping[str, str]:
        """Return the models that devices with roles cannot hold for both phases, with the reason."""
        with self._changed:
            scheduler = self._scheduler
            apart, chains = scheduler.devices.roles.apart, scheduler.chains()
            reasons = {chain.model: scheduler.block_map.why_not(chain) for chain in chains if apart}
        return {model: why for model, why in reasons.items() if why is not None}

    def snapshot(self) -> Mapping[str, Any]:
        """Return devices, instances, chains and migrations (`scheduler.observe.snapshot`)."""
        with self._changed:
            snapshot = picture_of(self._scheduler)
        return snapshot.document()  # without the lock: building the document takes longer

    def agents(self) -> tuple[AgentFacts, ...]:
        with self._changed:
            return self._remote_agents.lifecycles.facts()

    def reports(self) -> Mapping[str, AgentStats]:
        """Return the latest AgentStats of each agent that is up."""
        with self._changed:
            return dict(self._remote_agents.reports)

    def moving(self) -> int:
        """Return the number of migrations in progress."""
        with self._changed:
            return len(self._scheduler.migrations)

    def moves(self) -> MigrationCounts:
        """Return the counts of migrations so far."""
        with self._changed:
            return self._scheduler.migrations.counts()

    def speculation(self) -> SpeculationCounts:
        """Return the counts of predicted hops so far (BL-25)."""
        with self._changed:
            return self._scheduler.speculation.counts()

    def forecasts(self) -> tuple[ForecastOutcome, ...]:
        """Return the latest forecasts of requests with their outcomes; none where the order is by arrival."""
        with self._changed:
            order = self._scheduler.order
            return () if order is None else tuple(order.forecasts.outcomes)

    def health(self) -> Mapping[str, Any]:
        """Return the document for `/health`.

        `degraded` while an agent is down; requests are accepted all the same, and wait if they must.
        """
        facts, stranded = self.agents(), self._unavailable_models.reasons()
        degraded = bool(stranded) or any(each.phase != "up" for each in facts)
        unavailable = {"unavailable": stranded} if stranded else {}
        with self._changed:
            plans = self._scheduler.plans
            wanted = {} if plans is None else {"scale_up_wanted": plans.scale_up_wanted}
        status = "degraded" if degraded else "ok"
        return {"status": status, "agents": [asdict(each) for each in facts], **unavailable, **wanted}

    def scale_up_wanted(self) -> bool:
        """Return whether late requests remain in the best order known (QL-23)."""
        with self._changed:
            return self._scheduler.plans is not None and self._scheduler.plans.scale_up_wanted

    def memory(self) -> EngineMemory:
        """Return the bytes of all living devices, as of their latest loads.

        `weights_unshared`: the same if each stage of each model had its own weights.
        """
        with self._changed:
            alive = [device for device in self._scheduler.devices if device.alive]
            unshared = sum(map(self._stages_bytes, alive))
            pages = sum(device.pages.capacity for device in alive)
            return EngineMemory(
                sum(device.stages.nbytes for device in alive),
                unshared,
                pages * self._remote_agents.page_bytes,
                sum(device.host[0] for device in alive),
                sum(device.host[1] for device in alive),
            )

    def _stages_bytes(self, device: Device) -> int:
        """Return the bytes of the blocks of all loaded stages, without sharing."""
        block, wanted = self._scheduler.block_map.block, device.stages.wanted
        return sum(block(each).nbytes for stage in device.stages.loaded if stage in wanted for each in wanted[stage])


def _capped(spec: ModelSpec, pages: int) -> ModelSpec:
    """Limit a model's context to what so many pages can hold; unchanged without pages, when no device is up yet."""
    fits = (
        pages // spec.kv_layers * spec.page_tokens - spec.virtual_tokens
        if pages and spec.kv_layers
        else spec.max_model_len
    )
    return spec if fits >= spec.max_model_len else replace(spec, max_model_len=max(fits, 1))
