"""Drive an engine without scheduler and server: prompts in one step, then decode steps over all sequences.

Needs nothing but the engine and the store.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from runtime.config import EngineConfig
from runtime.engine.catalog.describe import describe_chain
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.layers.linear import SharedLinear
from runtime.engine.models.registry import half_page
from runtime.kv.pages import PageBook, pages_for
from runtime.types import ModelSpec, Opened, Row, Sampled, SamplingParams, SequenceRequest, StepPlan
from zoo.store import Store

_WHOLE = 1 << 62


@dataclass(slots=True)
class _Running:
    """A sequence: its request, the tokens produced, and the number of tokens with K and V."""

    request: SequenceRequest
    spec: ModelSpec
    sampled: list[Sampled] = field(default_factory=list)
    computed: int = 0


class Stepper:
    """An engine with whole models, and its sequences."""

    def __init__(self, store: Store, config: EngineConfig, names: Sequence[str]) -> None:
        half = half_page(store, config, names)
        self.engine = StagedEngine(store, config, half)
        self.specs: dict[str, ModelSpec] = {}
        for name in names:
            chain = describe_chain(store, name, config, half, _WHOLE).chain
            self.specs[name] = self.engine.load(chain.stage(0, chain.length))
        self._book = PageBook(self.engine.page_capacity)
        self._running: dict[str, _Running] = {}
        self._released: list[str] = []
        self._step = 0

    def start(self, prompts: Mapping[str, tuple[str, Sequence[int]]], sampling: SamplingParams, chunk: int) -> float:
        """Run prompts by sequence name, (model, tokens), in steps of at most `chunk` tokens; return the seconds.

        Each sequence has one token afterwards.
        """
        begin = time.perf_counter()
        opened: list[Opened] = []
        rows: list[Row] = []
        for seq, (name, prompt) in prompts.items():
            request = SequenceRequest(seq, seq, self.specs[name].name, tuple(prompt), sampling)
            self._running[seq] = _Running(request, self.specs[name])
            self._book.open(seq, self.specs[name])
            opened.append(Opened(request))
            for lo in range(0, len(prompt), chunk):
                part = request.prompt[lo : lo + chunk]
                if sum(len(row.tokens) for row in rows) + len(part) > chunk or any(row.seq == seq for row in rows):
                    self._run(rows, opened)
                    rows, opened = [], []
                rows.append(self._row(seq, part, lo + len(part) == len(prompt)))
        self._run(rows, opened)
        return time.perf_counter() - begin

    def decode(self, steps: int) -> list[float]:
        """Run decode steps over all sequences, each read before the next; return the seconds of each."""
        took = []
        for _ in range(steps):
            begin = time.perf_counter()
            self._run([self._row(seq, (one.sampled[-1].token,), True) for seq, one in self._running.items()], [])
            took.append(time.perf_counter() - begin)
        return took

    def decode_ahead(self, steps: int) -> float:
        """Run decode steps, each launched before the last one's tokens are read; return the median of the seconds."""
        launched, took, last = None, [], time.perf_counter()
        for step in range(steps):
            rows = [
                self._row(seq, (one.sampled[-1].token if not step else 0,), True, ahead=step > 0)
                for seq, one in self._running.items()
            ]
            following = self.engine.launch(self._plan(rows, []), {})
            if launched is not None:
                self._note(launched.result().result.sampled)
            launched = following
            now = time.perf_counter()
            took.append(now - last)
            last = now
        if launched is not None:
            self._note(launched.result().result.sampled)
        return statistics.median(took[2:] or took)

    def tokens_of(self, seq: str) -> list[Sampled]:
        """Return what a sequence has produced."""
        return self._running[seq].sampled

    def context_tokens(self) -> int:
        """Return the tokens with K and V of all sequences together."""
        return sum(one.computed for one in self._running.values())

    @property
    def device(self) -> str:
        return self.engine.device

    def has_room(self, name: str, rows: int, tokens: int) -> bool:
        """Return whether the free pages hold so many sequences of so many tokens."""
        return rows * pages_for(self.specs[name], tokens) <= self._book.free

    def floor_bytes(self, names: Sequence[str]) -> int:
        """Return the bytes that a decode step over all sequences of these models reads, each use of a block once.

        These are the weights without the embedding table, the models' adapters, and K and V. The models share a chain.
        """
        models = [self.engine._registry.models[self.specs[name].name] for name in names]
        units = [unit for unit in models[0].units if unit.kind != "embedding"]
        weights = sum(part.numel() * part.element_size() for unit in units for part in unit.module.parameters())
        keys = {key for model in models for key in model.adapters if key is not None}
        layers = [target for unit in units for target in unit.targets.values() if isinstance(target, SharedLinear)]
        adapters = sum(layer.adapters[key].nbytes for layer in layers for key in keys & layer.adapters.keys())
        spec = self.specs[names[0]]
        return weights + adapters + self.context_tokens() * spec.kv_layers * self.engine.page_bytes // spec.page_tokens

    def release(self) -> None:
        """End all sequences."""
        for seq in self._running:
            self._book.release(seq)
            self._released.append(seq)
        self._running.clear()

    def _row(self, seq: str, tokens: Sequence[int], sample: bool, ahead: bool = False) -> Row:
        one = self._running[seq]
        start = one.computed
        pages = self._book.extend(seq, len(tokens))
        self._book.fill(seq, len(tokens))
        one.computed += len(tokens)
        generated = len(one.sampled) + ahead
        return Row(seq, one.spec.name, tuple(tokens), start, pages, sample, generated, awaits=ahead)

    def _plan(self, rows: Sequence[Row], opened: Sequence[Opened]) -> StepPlan:
        self._step += 1
        released, self._released = tuple(self._released), []
        return StepPlan(self._step, tuple(rows), tuple(opened), released)

    def _run(self, rows: Sequence[Row], opened: Sequence[Opened]) -> None:
        self._note(self.engine.run(self._plan(rows, opened), {}).result.sampled)

    def _note(self, sampled: Sequence[Sampled]) -> None:
        for one in sampled:
            self._running[one.seq].sampled.append(one)
