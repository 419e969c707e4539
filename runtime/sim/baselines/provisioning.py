"""Decide where engines start and which ones stop: models are scaled along with demand (BlockLLM, section 7.1).

    engine_for(group)   the engine with the fewest requests
    plan_start(...)     the device of another engine, and the idle engines that stop for it, or None
    to_drain(...)       an engine that takes no more requests, so that one of a group that waits can start

No request moves from one engine to another. Pure functions over the engines and devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from runtime.sim.baselines.engine import ModelEngine


@dataclass(frozen=True, slots=True)
class EngineStart:
    """A device for an engine. `stops`: idle engines there that stop first."""

    device: str
    stops: tuple[ModelEngine, ...] = ()


def engine_for(engines: Iterable[ModelEngine], group: str) -> ModelEngine | None:
    """Return the engine of a group that takes the next request; None if it has none that takes requests."""
    able = [each for each in engines if each.group == group and not each.draining]
    return min(able, key=lambda each: each.load, default=None)


def plan_start(
    engines: Sequence[ModelEngine], memory: Mapping[str, int], nbytes: int, now: int, idle_ns: int
) -> EngineStart | None:
    """Return where an engine of so many bytes starts; None if there is no room for it now.

    A device with free memory comes first, the one with the fewest engines; else the one on which the engines that have
    to stop were idle for the longest time.

    Args:
        memory: Bytes of each device.
        idle_ns: An engine stops only if it was idle for this long.
    """
    here: dict[str, list[ModelEngine]] = {name: [] for name in memory}
    for each in engines:
        here[each.device].append(each)
    free = {name: memory[name] - sum(each.nbytes for each in here[name]) for name in memory}
    able = [name for name in memory if free[name] >= nbytes]
    if able:
        return EngineStart(min(able, key=lambda name: len(here[name])))
    found: list[tuple[int, str, tuple[ModelEngine, ...]]] = []
    for name, some in here.items():
        stops: list[ModelEngine] = []
        room = free[name]
        idle = sorted((each for each in some if each.idle and now - each.since >= idle_ns), key=lambda each: each.since)
        for each in idle:
            if room < nbytes:
                stops.append(each)
                room += each.nbytes
        if room >= nbytes:
            found.append((max(each.since for each in stops), name, tuple(stops)))
    if not found:
        return None
    _, device, gone = min(found, key=lambda each: each[:2])
    return EngineStart(device, gone)


def to_drain(engines: Sequence[ModelEngine], memory: Mapping[str, int], nbytes: int) -> tuple[ModelEngine, ...]:
    """Return the engines of one device that stop when their requests have ended; none if some drain already.

    The device is the one where they have the fewest requests.
    """
    if any(each.draining or not each.up for each in engines):
        return ()
    best: tuple[int, str, tuple[ModelEngine, ...]] | None = None
    for name in memory:
        some = sorted((each for each in engines if each.device == name), key=lambda each: each.load)
        room, chosen = memory[name] - sum(each.nbytes for each in some), list[ModelEngine]()
        for each in some:
            if room < nbytes:
                chosen.append(each)
                room += each.nbytes
        if chosen and room >= nbytes:
            found = sum(each.load for each in chosen), name, tuple(chosen)
            best = found if best is None or found[:2] < best[:2] else best
    return () if best is None else best[2]
