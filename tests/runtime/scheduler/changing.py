"""A virtual cluster whose models are updated and withdrawn while it runs.

It records the answer to each update, and the version that each sequence was given on arrival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from runtime.chains import Block, Chain, Variant
from runtime.control.scheduler_io import AddRequest, ModelUpdated, ServeModel
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import IntegerModel, expected
from tests.runtime.scheduler.virtual_cluster import VirtualCluster


def as_version(model: IntegerModel, of: str, *cuts: int) -> Chain:
    """Return a counting model's chain as a version of the model `of`; engines load it under the model's own name."""
    return replace(model.chain(*cuts), spec=replace(model.spec, name=of), source=model.spec.name)


def serve(
    model: IntegerModel, of: str, *cuts: int, variants: tuple[Variant, ...] = (), blocks: Sequence[Block] = ()
) -> ServeModel:
    """Return the event that serves a counting model as a version of the model `of`."""
    return ServeModel(as_version(model, of, *cuts), (*model.blocks(*cuts), *blocks), variants)


@dataclass
class Changing(VirtualCluster):
    """A virtual cluster that checks each sequence against the version it was given.

    Fields:
        known: All models that the engines can load.
        given: By sequence: the name its version is loaded under.
        updated: Answers to updates, in order.
        every: Page accounting is checked after every so many events.
    """

    known: Sequence[IntegerModel] = ()
    given: dict[str, str] = field(default_factory=dict)
    updated: list[ModelUpdated] = field(default_factory=list)
    every: int = 1
    _events: int = 0

    def __post_init__(self) -> None:
        if self.make_engine is None:
            self.make_engine = lambda name: IntegerEngine(self.known, self.pages, device=name)
        super().__post_init__()

    def check(self) -> None:
        self._events += 1
        if self._events % self.every == 0:
            super().check()

    def tell(self, event: Any) -> None:
        super().tell(event)
        if isinstance(event, AddRequest) and (sequence := self.scheduler.sequences.get(event.request.seq)) is not None:
            self.given[event.request.seq] = sequence.chain.loaded_as

    def carry_out(self, commands: Any) -> None:
        commands = list(commands)
        self.updated += [command for command in commands if isinstance(command, ModelUpdated)]
        super().carry_out(commands)

    def expect(self) -> None:
        """Assert that every sequence has the tokens of the version it was given, and nothing is left on any device."""
        models = {model.spec.name: model for model in self.known}
        for seq, request in self.requests.items():
            told = self.told[seq]
            assert told.last.finish in ("stop", "length"), (seq, told.last)
            assert told.tokens == expected(models[self.given[seq]], request.prompt, request.sampling), seq
        self.expect_empty()

    def loaded(self) -> set[str]:
        """Return the models of which the scheduler records a loaded stage on any device."""
        return {stage.model for device in self.scheduler.devices for stage in device.stages.loaded}

    def expect_only(self, *models: tuple[IntegerModel, Sequence[int]]) -> None:
        """Assert that devices hold blocks and stages of these models only, and that engines and scheduler agree."""
        blocks = {block.id for model, cut in models for block in model.blocks(*cut)}
        assert (
            {block for device in self.scheduler.devices for block in device.plan.blocks}
            == blocks
            == set(self.scheduler.block_map.instances)
        )
        assert self.loaded() <= {model.spec.name for model, _ in models}
        for node in self.living():
            held = set(node.engine._stages.values())  # type: ignore[attr-defined]
            assert held == set(self.scheduler.devices[node.name].stages.loaded), node.name
