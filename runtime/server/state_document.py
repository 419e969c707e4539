"""The document of `/zoo/state`: agents with their block instances and pages, models, and counts of sequences.

A driver of one device without agents is shown as one agent. A cluster has one agent per device, and the scheduler's
whole snapshot under `cluster`. `counters` and `memory` are totals. Reads only; it may wait for the driver's lock, so
call it on a worker thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from runtime.control.counters import AgentState
from runtime.server.context import Service
from runtime.types import PageCounts


def state_document(service: Service) -> dict[str, Any]:
    """Return the state as a JSON-ready dictionary."""
    driver = service.driver
    state, cluster = driver.state(), driver.snapshot()
    totals = {"counters": asdict(state.counters), "memory": asdict(driver.memory())}
    specs = {model.name: model.spec for model in service.models.all()}
    return {
        "agents": [_alone(service, state) | totals] if cluster is None else _agents(cluster, totals),
        "models": [_model(load, specs.get(load["model"])) for load in map(asdict, state.models)],
        "running": state.running,
        "waiting": state.waiting,
        "draining": service.gate.closed,
        **totals,
        **({} if cluster is None else {"cluster": {key: cluster[key] for key in cluster.keys() - {"queue", "pool"}}}),
        **_queue(service, None if cluster is None else cluster.get("queue")),
    }


def ledger_document(service: Service) -> dict[str, Any]:
    """Return, for each device, its free pages and those that it lends and borrows (IL-11).

    `instances` is the scheduler's account; `pool` is what each manager of the pool knows, with its age, where there are
    managers.
    """
    cluster = service.driver.snapshot()
    devices = [] if cluster is None else cluster["devices"]
    return {
        "instances": [
            {
                "id": each["device"],
                "capacity": each["pages"],
                "free": each["pages"] - each["pages_used"],
                "lent": dict(each["lent"]),
                "borrowed": dict(each["borrowed"]),
            }
            for each in devices
        ],
        **({"pool": [_manager(each) for each in cluster["pool"]]} if cluster is not None and "pool" in cluster else {}),
    }


def _manager(known: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a manager of the pool knows."""
    instances = known["instances"]
    sorted_age = known["sorted_age"]
    return {
        "manager": known["manager"],
        "sorted_age_ms": None if sorted_age is None else sorted_age // 1_000_000,
        "instances": [
            {
                "id": each["id"],
                "capacity": each["capacity"],
                "free": each["free"],
                "room": each["room"],
                "lent": dict(each["lent"]),
                "borrowed": {one["id"]: one["lent"][each["id"]] for one in instances if each["id"] in one["lent"]},
                "age_ms": each["age"] // 1_000_000,
                "paused": each["paused"],
            }
            for each in instances
        ],
    }


def _queue(service: Service, planned: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what waits: in the scheduler by group (`--plan`), and in the store (`--queue`); nothing without both."""
    parts: list[Mapping[str, Any]] = [] if planned is None else [planned]
    if service.durable is not None:
        parts.append(service.durable.store.counts())
    merged = {key: each for part in parts for key, each in part.items()}
    return {"queue": {**merged, "waiting": sum(part["waiting"] for part in parts)}} if parts else {}


def _alone(service: Service, state: AgentState) -> dict[str, Any]:
    return {
        "id": "0",
        "role": "both",
        "pid": os.getpid(),
        "device": service.driver.device,
        "alive": service.driver.alive,
        "instances": [asdict(instance) for instance in state.instances],
        "pages": asdict(state.pages),
    }


def _agents(cluster: Mapping[str, Any], totals: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one entry per device. `pid` is null while no agent runs there.

    The totals are added to the entry only if there is a single device.
    """
    by_device: dict[str, list[dict[str, Any]]] = {}
    for each in cluster["instances"]:
        load = {
            "block": each["block"],
            "queue": each["queue"],
            "batch": each["sequences"],
            "batch_limit": each["batch_limit"],
        }
        by_device.setdefault(each["device"], []).append(load)
    only = totals if len(cluster["devices"]) == 1 else {}
    return [
        {
            **only,
            "id": each["device"],
            "role": each["role"],
            "pid": each["pid"] or None,
            "device": each["device"],
            "alive": each["alive"],
            **({"links": each["links"]} if each["links"] else {}),
            "instances": by_device.get(each["device"], []),
            "pages": asdict(_pages(each)),
        }
        for each in cluster["devices"]
    ]


def _pages(device: Mapping[str, Any]) -> PageCounts:
    used, lent = device["pages_used"], sum(device["lent"].values())
    return PageCounts(device["pages"], device["pages"] - used, used - lent, lent)


def _model(load: Mapping[str, Any], spec: Any) -> dict[str, Any]:
    known = (
        {}
        if spec is None
        else {"kind": spec.kind, "base": spec.base, "blocks": list(spec.blocks), "max_model_len": spec.max_model_len}
    )
    return {"name": load["model"], "running": load["running"], "waiting": load["waiting"], **known}
