"""Layers of a step are written when the engine says that they are, and later ones are not (TI-15)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from runtime.chains import Array, StageResult
from runtime.types import SequenceRequest, StepPlan
from tests.runtime.engine.drive import Limits, PagedDevice, drive
from tests.runtime.engine.executors.test_stage import CONFIG, MODELS, NATIVE, SAMPLING, family  # noqa: F401
from tests.runtime.engine.test_equality import prompts

LENGTHS = (3, 9, 17)


class WatchedDevice(PagedDevice):
    """An engine that compares pages between its layers with the same pages behind the step.

    `seen`: by table, how many layers it was said to have passed.
    """

    looks = 0

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        if not hasattr(self, "tables"):
            self.tables: dict[str, list[tuple[int, ...]]] = {}
            self.seen: dict[str, set[int]] = {}
        for row in plan.rows:
            self.tables.setdefault(row.seq, []).extend(row.new_pages)
        self.plan, self.early = plan, list[tuple[str, int, int, bytes]]()
        result = super().run(plan, inputs)
        for seq, layer, passed, before in self.early:
            assert (self.pages(seq, layer) == before) == (layer < passed), (seq, layer, passed)
        return result

    def look(self, passed: Callable[[], Mapping[str, int]]) -> None:
        now, self.looks = passed(), self.looks + 1
        assert any(len(row.tokens) > 1 for row in self.plan.rows)
        assert now.keys() <= {row.seq for row in self.plan.rows}
        for row in self.plan.rows:
            layers = now.get(row.seq, 0)
            self.seen.setdefault(row.seq, set()).add(layers)
            for layer in range(len(self.tables[row.seq][0])):
                self.early.append((row.seq, layer, layers, self.pages(row.seq, layer)))

    def pages(self, seq: str, layer: int) -> bytes:
        """Return the content of the pages that the step writes in a layer."""
        row = next(row for row in self.plan.rows if row.seq == seq)
        width = self._registry.models[row.model].spec.page_tokens
        groups = self.tables[seq][row.start // width : -(-(row.start + len(row.tokens)) // width)]
        return bytes(self.read_pages([group[layer] for group in groups]).data)


@pytest.mark.parametrize("kernels", ["stock", NATIVE])
def test_layers_are_written_when_they_are_said_to_be(family, kernels: str) -> None:  # noqa: F811
    """All models together: shared layers run once, at different depths, adapters and virtual tokens included."""
    config = replace(CONFIG, kernels=kernels)
    asked: dict[int, list[SequenceRequest]] = {}
    for number, name in enumerate(MODELS):
        for at, prompt in enumerate(prompts(number + 1, LENGTHS)):
            asked.setdefault(at, []).append(SequenceRequest(f"{name}-{at}", "r", name, prompt, SAMPLING))
    engine = WatchedDevice(family.store, config, MODELS)
    assert engine.watch_layers(engine.look)
    watched, plain = (
        drive(engine, asked, Limits(40)),
        drive(PagedDevice(family.store, config, MODELS), asked, Limits(40)),
    )
    for ones in asked.values():
        for one in ones:
            assert watched.tokens(one.seq) == plain.tokens(one.seq)
    for key, seen in engine.seen.items():
        layers = len(engine.tables[key][0])
        assert seen <= set(range(layers + 1)) and layers in seen, key


def test_steps_of_decodes_alone_are_not_watched(family) -> None:  # noqa: F811
    engine = WatchedDevice(family.store, CONFIG, ["llama"])
    assert engine.watch_layers(engine.look)
    drive(engine, {0: [SequenceRequest("a", "a", "llama", prompts(1, (5,))[0], SAMPLING)]}, Limits(8))
    assert engine.looks == len(engine.tables["a#1@0"][0])


def test_a_device_whose_steps_are_only_queued_shows_no_layers(family) -> None:  # noqa: F811
    engine = WatchedDevice(family.store, replace(CONFIG, async_scheduling="on"), ["llama"])
    assert not engine.watch_layers(engine.look)
