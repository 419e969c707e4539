"""Weights and pages of a real engine share the memory of a device: their sum stays within it at every moment."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from cli.serving.driver import start_driver
from cli.serving.models import choose
from cli.serving.options import ServeOptions
from runtime.engine.catalog.held_bytes import HeldBytes, form_of
from runtime.types import SamplingParams, SequenceRequest
from tests.chains import manifest_of
from tests.runtime.kv.test_pool import resident
from zoo.api import Zoo

NAMES = ("one", "two", "three")


@pytest.fixture(scope="module")
def models(bench) -> Any:
    for seed, name in enumerate(NAMES):
        bench.family("llama", name, seed=seed, hidden_size=128, intermediate_size=256, num_hidden_layers=3,
                     num_attention_heads=4, num_key_value_heads=4, head_dim=32)  # fmt: skip
    return bench


def weights_of(models, name: str) -> int:
    manifest = manifest_of(models.store, name)
    return HeldBytes(manifest, form_of(ServeOptions().engine())).weights([p.component for p in manifest.components])


class Watched:
    """An engine whose memory is measured around every load, unload and step."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.most, self.pages, self.returned = engine, 0, 0, 0
        for name in ("load", "unload", "run", "return_pages"):
            setattr(engine, name, self._measured(name, getattr(engine, name)))

    def _measured(self, name: str, method: Any) -> Any:
        def measured(*given: Any) -> Any:
            if name == "return_pages":
                self.returned += len(given[0])
            made = method(*given)
            pages = resident(self.engine._pool)
            self.pages = max(self.pages, pages)
            self.most = max(self.most, pages + self.engine.memory().weights)
            return made

        return measured


@contextmanager
def served(models, **options: Any) -> Iterator[tuple[Any, list[Watched]]]:
    engines: list[Watched] = []
    with (
        Zoo(models.store.root) as zoo,
        start_driver(
            zoo, ServeOptions(max_model_len=64, **options), choose(zoo, NAMES),
            made=lambda engine: engines.append(Watched(engine)),
        ) as driver,
    ):  # fmt: skip
        yield driver, engines


def answers(driver: Any, requests: list[SequenceRequest]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {one.seq: [] for one in requests}
    for event in driver.run(requests):
        assert event.error is None
        if event.token is not None:
            found[event.seq].append(event.token)
    return found


def asked(count: int, seed: int, names: tuple[str, ...] = NAMES) -> list[SequenceRequest]:
    rng = random.Random(seed)
    found = []
    for at in range(count):
        prompt = tuple(rng.randrange(3, 90) for _ in range(rng.randrange(2, 30)))
        params = SamplingParams(max_tokens=rng.randrange(2, 30), ignore_eos=True)
        found.append(SequenceRequest(f"{seed}.{at}", f"{seed}.{at}", rng.choice(names), prompt, params))
    return found


def test_answers_are_the_same_and_memory_stays_within_the_budget(models) -> None:
    """Room for two models and some pages: pages get the memory of idle models, and give it back for the next load."""
    one = max(weights_of(models, name) for name in NAMES)
    budget = int(2.7 * one)
    waves = [asked(40, 1, ("one",)), asked(4, 2), asked(40, 3, ("two",)), asked(6, 4), asked(40, 5, ("three",))]
    with served(models, kv_cache_memory_bytes="8MiB") as (driver, _):
        expected = [answers(driver, wave) for wave in waves]
    with served(models, device_memory=budget) as (driver, engines):
        assert [answers(driver, wave) for wave in waves] == expected
        assert driver._scheduler.residency.counts.unloads > 0
        (device,) = driver._scheduler.devices
        spare = 2 * device.pages.page_bytes  # pads the tables
        loaded = sum(weights_of(models, stage.key.model) for stage in device.stages.loaded)
        assert device.pages.capacity == (budget - spare - loaded) // device.pages.page_bytes
        assert device.pages.assured < device.pages.capacity < device.pages.most
    (engine,) = engines
    assert engine.most <= budget
    assert engine.returned > 0, "no load took memory that pages had"
    assert engine.pages > budget - 2 * one, "pages never had more than what two models leave"


def test_a_size_of_the_kv_cache_keeps_its_share_fixed(models) -> None:
    one = weights_of(models, "one")
    with served(models, device_memory=2 * one + (1 << 20), kv_cache_memory_bytes="1MiB") as (driver, engines):
        answers(driver, asked(8, 6))
        (device,) = driver._scheduler.devices
        assert device.pages.capacity * device.pages.page_bytes == 1 << 20 and not device.pages.budget
    assert engines[0].returned == 0


def test_agents_apart_from_the_scheduler_share_their_memory_too(models) -> None:
    one = max(weights_of(models, name) for name in NAMES)
    wave = asked(12, 7)
    with served(models, kv_cache_memory_bytes="8MiB") as (driver, _):
        expected = answers(driver, wave)
    with served(models, device_memory=int(1.7 * one), agents=2, backend="threads") as (driver, _):
        assert answers(driver, wave) == expected
        for device in driver._scheduler.devices:
            pages = device.pages
            assert pages.least < pages.capacity <= pages.most and pages.budget < int(1.7 * one)


@pytest.mark.parametrize(
    ("options", "shared"),
    [
        ({}, 1 << 30),
        ({"kv_cache_memory_bytes": "64MiB"}, 0),
        ({"residency": "fixed"}, 0),
        ({"executor": "dense"}, 0),
        ({"device": "cuda"}, 0),
        ({"speculation": "exact", "agents": 2}, 0),
    ],
)
def test_where_pages_have_what_weights_leave(options, shared: int) -> None:
    chosen = ServeOptions(**{"device_memory": "1GiB", **options})
    assert chosen.shared_memory == chosen.engine().device_memory_bytes == shared
