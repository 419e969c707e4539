"""Loads in the simulator: one disk per server, a memory that forgets, and only bytes that are not on the device."""

from __future__ import annotations

import pytest

from runtime.chains import Stage
from runtime.sim.cost.hardware import GPUS, ServerSpec
from runtime.sim.models.family import App, Cutting, family_of
from runtime.sim.run.engine import SimEngine
from runtime.sim.run.loading import FinishedLoad, Host, Loader

GPU = GPUS["A100-80GB"]
APPS = (App("base", "llama-7b", "foundation"), App("lora", "llama-7b", "lora"), App("vicuna", "llama-7b", "full"))
FAMILY = family_of(APPS, Cutting(parts=2))
END, CUT = FAMILY.chain("base").length, FAMILY.chain("base").uses[0].hi
WEIGHTS = 2 * 6_738_149_376
DISK, LINK = WEIGHTS / 3, WEIGHTS / (0.8 * 32)  # ns of a whole model
ROOM = 10**12


def loader(host: Host, name: str = "s0g0") -> Loader:
    return Loader(SimEngine(name, GPU, FAMILY, 1000), host)


def loaded(one: Loader, stage: Stage, begin: int) -> tuple[int, FinishedLoad]:
    """Load a stage that is alone; return when it was there."""
    assert one.submit(stage)
    now: int | FinishedLoad = begin
    at = begin
    while isinstance(now := one.advance(at), int):
        at = now
    return at, now


def test_a_server_reads_its_disk_once_and_each_device_copies():
    host = Host(ServerSpec(GPU, 2), ROOM)
    cold, load = loaded(loader(host), Stage("base", 0, END), 0)
    warm, _ = loaded(loader(host, "s0g1"), Stage("base", 0, END), cold)
    assert (load.nbytes, load.ns, load.error) == (WEIGHTS, cold, "")
    assert cold == pytest.approx(DISK + LINK, rel=1e-3)
    assert warm - cold == pytest.approx(LINK, rel=1e-3)
    assert host.disk_bytes == WEIGHTS


def test_only_what_is_missing_comes():
    one = loader(Host(ServerSpec(GPU, 2), ROOM))
    at, _ = loaded(one, Stage("base", 0, END), 0)
    again, part = loaded(one, Stage("base", 0, CUT), at)
    assert (again, part.nbytes) == (at, 0)
    _, adapters = loaded(one, Stage("lora", 0, END), at)
    assert adapters.nbytes == sum(use.adapter_bytes for use in FAMILY.chain("lora").uses)


def test_memory_forgets_what_was_used_least_recently():
    host = Host(ServerSpec(GPU, 2), int(1.1 * WEIGHTS))
    at, _ = loaded(loader(host), Stage("base", 0, END), 0)
    at, _ = loaded(loader(host), Stage("vicuna", 0, END), at)
    again, _ = loaded(loader(host), Stage("base", 0, END), at)
    assert again - at == pytest.approx(DISK + LINK, rel=1e-3)
    kept, _ = loaded(loader(host), Stage("base", 0, END), again)
    assert kept - again == pytest.approx(LINK, rel=1e-3)
    nothing = Host(ServerSpec(GPU, 2), 0)
    loaded(loader(nothing), Stage("base", 0, END), 0)
    loaded(loader(nothing), Stage("base", 0, END), ROOM)
    assert nothing.disk_bytes == 2 * WEIGHTS


def test_devices_share_one_disk():
    """Two devices that load different models at once take twice as long; of the same model they wait for one read."""
    host = Host(ServerSpec(GPU, 2), ROOM)
    first, second = loader(host), loader(host, "s0g1")
    first.submit(Stage("base", 0, CUT))
    second.submit(Stage("vicuna", 0, CUT))
    ends = [first.advance(0), second.advance(0)]
    assert ends[1] > 1.8 * ends[0]  # type: ignore[operator]
    third = loader(host, "s0g2")
    third.submit(Stage("base", 0, CUT))
    assert third.advance(0) == ends[0]


def test_a_stage_that_is_none_is_told_and_the_next_one_loads():
    one = loader(Host(ServerSpec(GPU, 2), ROOM))
    one.submit(Stage("base", 0, CUT - 1))
    one.submit(Stage("base", 0, CUT))
    failed = one.advance(0)
    assert isinstance(failed, FinishedLoad) and failed.spec is None and "no run of blocks" in failed.error
    assert isinstance(one.advance(0), int)


def test_host_memory_reads_ahead_while_nothing_is_loaded() -> None:
    """A load that comes meanwhile goes first, after the piece that is under way."""
    host = Host(ServerSpec(GPU, 2), ROOM)
    one = loader(host)
    one.read_ahead([Stage("vicuna", 0, END)])
    first = one.read_next(0)
    assert first is not None and one.read_next(0) is None, "one piece at a time"
    at, load = loaded(one, Stage("base", 0, CUT), 0)
    assert load.disk == load.nbytes > 0 and at > first
    now: int | None = at
    while now is not None and (then := one.read_next(now)) is not None:
        now = then
    assert not one._ahead
    _, warm = loaded(one, Stage("vicuna", 0, END), now or at)
    assert warm.disk == 0 < warm.host
