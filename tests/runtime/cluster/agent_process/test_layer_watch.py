"""Page requests that an agent answers while it steps, over real links (TI-15)."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence

from runtime.chains import Array, LayerWatch, Stage, StageResult
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import expected
from runtime.messages import (
    CloseSequences,
    FinishMigration,
    MigrationReady,
    RowsDone,
    RunRows,
    StartMigration,
)
from runtime.types import SequenceRequest, StepPlan
from tests.runtime.cluster.agent_process.test_loop import GREEDY, LENGTH, decode, hop, opened, provide, request
from tests.runtime.cluster.agent_programs import LIMIT, MODEL, End, threads

HERE, THERE = (hop("a", 0, LENGTH),), (hop("b", 0, LENGTH),)
PROMPT = request("s", *range(1, 30))
LAYERS = MODEL.spec.kv_layers


class SlowEngine(IntegerEngine):
    """An engine that takes until `over` for steps with prompts; meanwhile they have passed `passed` layers."""

    def __init__(self) -> None:
        super().__init__([MODEL], 200)
        self.passed, self.began, self.over, self.writes = 0, threading.Event(), threading.Event(), 0
        self.watch: LayerWatch | None = None

    def watch_layers(self, watch: LayerWatch) -> bool:
        self.watch = watch
        return True

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        result, end = super().run(plan, inputs), time.monotonic() + LIMIT
        chunks = [row.seq for row in plan.rows if len(row.tokens) > 1]
        if chunks:
            self.began.set()
        while chunks and not self.over.wait(0.002) and time.monotonic() < end:
            if self.watch is not None:
                self.watch(lambda: dict.fromkeys(chunks, self.passed))
        return result

    def write_pages(self, pages: Sequence[int], data: Array) -> None:
        super().write_pages(pages, data)
        self.writes += 1


def run_prompt(end: End, one: SequenceRequest) -> None:
    end.messenger.send("a", RunRows((one.seq,), (1,), (0,), (len(one.prompt),), one.prompt, (True,), (0,), (1,)))


def send_ahead(end: End, one: SequenceRequest) -> None:
    """Ask for the pages of a prompt while its row is under way."""
    stage, upto = Stage(MODEL.spec.name, 0, LENGTH), len(one.prompt)
    end.messenger.send(
        "b",
        StartMigration(
            1, one.seq, 1, stage, (0, LAYERS), MODEL.spec.page_tokens, "a", upto, (), True, one, as_written=True
        ),
    )


def came(end: End, kind: type) -> bool:
    end.pump()
    return any(isinstance(item.message, kind) for item in end.envelope)


def test_pages_of_each_layer_go_while_the_step_runs() -> None:
    source, target = SlowEngine(), SlowEngine()
    target.over.set()
    with threads("a", "b", engines=[source, target], watch_layers=True) as (end, _):
        end.welcome("a", "b")
        provide(end, HERE)
        provide(end, THERE)
        opened(end, PROMPT, HERE)
        run_prompt(end, PROMPT)
        send_ahead(end, PROMPT)
        for layer in range(1, LAYERS + 1):
            assert target.writes == layer - 1
            source.passed = layer
            end.until(lambda layer=layer: target.writes == layer)
        moved = end.next(MigrationReady)
        assert moved.copied == ((0, len(PROMPT.prompt)),) and not came(end, RowsDone)
        source.over.set()
        first = end.next(RowsDone).sampled[0]
        assert first is not None and target.writes == LAYERS
        tokens = [*PROMPT.prompt, first.token]
        end.messenger.send("b", FinishMigration(1, "s", 2, True))
        opened(end, PROMPT, THERE, 2, (first.token,), keep=True, computed=len(PROMPT.prompt))
        end.messenger.send("a", CloseSequences(("s",), (1,)))
        decode(end, PROMPT, THERE, 7, tokens, 2)
        assert tokens[len(PROMPT.prompt) :] == expected(MODEL, PROMPT.prompt, GREEDY)


def test_without_it_they_go_behind_the_step() -> None:
    source = SlowEngine()
    source.passed = LAYERS
    with threads("a", "b", engines=[source, IntegerEngine([MODEL], 200)]) as (end, _):
        end.welcome("a", "b")
        provide(end, HERE)
        provide(end, THERE)
        opened(end, PROMPT, HERE)
        run_prompt(end, PROMPT)
        send_ahead(end, PROMPT)
        begun = time.monotonic()
        end.until(lambda: time.monotonic() > begun + 0.2 and not came(end, MigrationReady))
        assert source.watch is None
        source.over.set()
        end.next(RowsDone)
        assert end.next(MigrationReady).copied == ((0, len(PROMPT.prompt)),)


def test_other_messages_wait_for_the_end_of_the_step_in_their_order() -> None:
    source = SlowEngine()
    other = request("t", 4, 5)
    with threads("a", "b", engines=[source, IntegerEngine([MODEL], 200)], watch_layers=True) as (end, _):
        end.welcome("a", "b")
        provide(end, HERE)
        provide(end, THERE)
        opened(end, PROMPT, HERE)
        run_prompt(end, PROMPT)
        send_ahead(end, PROMPT)
        source.passed = 1
        assert source.began.wait(LIMIT)
        end.messenger.send("a", CloseSequences(("s",), (1,)))
        opened(end, other, HERE)
        begun = time.monotonic()
        end.until(lambda: time.monotonic() > begun + 0.1)
        source.over.set()
        end.messenger.send("b", FinishMigration(1, "s", 1, False))
        end.messenger.send("a", CloseSequences(("t",), (1,)))
        end.until(lambda: all(name in end.reports and end.reports[name].pages_free == 200 for name in ("a", "b")))
        assert end.next(RowsDone).seqs == ("s",) and not end.cuts  # it was closed behind its row
