"""Deaths and aborts in each phase of a sequence with prompt and decoding apart: nothing is lost, doubled or altered.

`BLOCKZOO_FAULTS=100` runs as many of each kind in each phase; by default four. `BLOCKZOO_GRAIN=layer` hands off by
layer in all of them.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping

import pytest

from runtime.decode_config import DecodeConfig
from runtime.role_config import RoleChangeConfig
from runtime.scheduler.sequences.sequence import ScheduledSequence
from tests.runtime.scheduler.handoff.apart import Apart
from tests.runtime.scheduler.test_scheduler import some
from tests.runtime.scheduler.virtual_cluster import MS
from tests.runtime.virtual import request

COUNT = int(os.environ.get("BLOCKZOO_FAULTS", "4"))
#: Every page is free again so long after an abort.
SOON = 2000 * MS


def moving(cluster: Apart, one: ScheduledSequence) -> bool:
    return any(move.sequence is one and move.purpose == "handoff" for move in cluster.scheduler.migrations)


def ends(one: ScheduledSequence) -> bool:
    """Return whether the last row of a sequence's context is under way."""
    return one.flying and one.computed + one.issued == one.tokens


#: Whether a sequence is in a phase.
PHASES: Mapping[str, Callable[[Apart, ScheduledSequence], bool]] = {
    "raw": lambda cluster, one: not one.path,
    "scheduled": lambda cluster, one: one.seq in cluster.scheduler._state.queued,
    "chunk": lambda cluster, one: one.phase == "prefill" and one.flying and one.computed > 0,
    "layers": lambda cluster, one: moving(cluster, one) and one.phase != "decode" and ends(one),
    "ahead": lambda cluster, one: moving(cluster, one) and not one.waits.handoff,
    "transfer": lambda cluster, one: moving(cluster, one) and one.waits.handoff,
    "held": lambda cluster, one: one.waits.handoff and not one.waits.move,
    "decode": lambda cluster, one: one.phase == "decode" and not one.waits.handoff and one.flying,
    "flip": lambda cluster, one: bool(cluster.scheduler.devices.roles.leaving) and bool(one.path),
}  # fmt: skip
FAULTS = ("kill of its device", "kill of the other side", "abort")


def made(phase: str, seed: int) -> Apart:
    """Return a busy cluster in which the sequence x comes into this phase, in most seeds."""
    rng = random.Random(f"{phase} {seed}")
    grain = {"ahead": "chunk", "layers": "layer"}.get(phase) or rng.choice(("request", "chunk"))
    if seed % 3 == 2 or os.environ.get("BLOCKZOO_GRAIN") == "layer":
        grain = "layer"
    settings = {
        "decode": DecodeConfig(grain=grain),  # type: ignore[arg-type]
        "prefill_chunk": 8,
        "prefill_order": "sjf" if phase == "scheduled" else rng.choice(("off", "sjf")),
        "prefix_caching": rng.choice(("off", "active", "cached")),
        "max_num_seqs": 3 if phase in ("raw", "held") else 256,
        "role_changes": RoleChangeConfig(rng.choice(("off", "spare")), window_ms=100),
    }
    cluster = Apart(
        "prefill", "decode", "decode" if rng.random() < 0.5 else "prefill", settings=settings,
        pages=rng.choice((120, 400)), page_bytes_per_ms=rng.choice((30.0, 100.0)), restart=20 * MS,
    )  # fmt: skip
    cluster.ticks(2 * MS, 400 * MS)
    for one in some(10, seed):
        cluster.ask(one, at=0 if phase == "raw" else rng.randrange(10 * MS))
    cluster.ask(request("x", [rng.randrange(97) for _ in range(30)], "m", max_tokens=20), at=2 * MS)
    if phase == "flip":
        cluster.at(rng.randrange(4, 40) * MS, lambda: leave(cluster))
    return cluster


def leave(cluster: Apart) -> None:
    """Let a device leave its role, of which there is another one."""
    roles = cluster.scheduler.devices.roles
    names = [roles[f"d{at}"].name for at in range(3)]
    at = next(at for at in (2, 1, 0) if names.count(names[at]) > 1)
    roles.leaving[f"d{at}"] = "prefill" if names[at] == "decode" else "decode"


def reached(cluster: Apart, phase: str) -> bool:
    """Run until x is in the phase; return False if it never is."""
    while cluster._heap:
        cluster.run_one()
        one = cluster.scheduler.sequences.get("x")
        if one is not None and PHASES[phase](cluster, one):
            return True
    return False


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
def test_a_fault_in_each_phase(phase: str, fault: str) -> None:
    done = 0
    for seed in range(8 * COUNT):
        cluster = made(phase, seed)
        if not reached(cluster, phase):
            continue
        here = {hop.device for hop in cluster.scheduler.sequences["x"].path} or {"d0"}
        if fault == "abort":
            cluster.abort("x", cluster.now)
            del cluster.requests["x"]
            begun = cluster.now
            cluster.run(until=begun + SOON)
            assert "x" not in cluster.scheduler.sequences
        else:
            others = {"d0", "d1", "d2"} - here
            cluster.kill(min(here if fault == FAULTS[0] else others))
        cluster.run()
        cluster.expect()
        done += 1
        if done == COUNT:
            return
    raise AssertionError(f"only {done} of {COUNT} sequences came into the phase {phase}")
