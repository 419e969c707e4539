"""Steps of a program over lent pages, all layers in one native call: the bits of one device; what it leaves (IL-27)."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.cluster.thin_layers import HIDDEN, ThinLayers
from runtime.engine.attention.away import AwayLayers
from runtime.engine.kernels import away_calls
from runtime.engine.kernels.bindings import Kernels
from runtime.engine.kernels.paged_attention import NativeAttention, native_attention
from runtime.engine.layers.operations import NativeOperations
from runtime.engine.step.context import PagedMetadata
from runtime.types import LoanLost
from tests.runtime.cluster.agent_process.lent_rows import (
    HEADS,
    KV_HEADS,
    LAYERS,
    LENGTH,
    PAGE,
    WIDTH,
    Cluster,
    Rows,
    kernels,
)
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels
#: The program's layers, by their numbers in the pages.
NUMBERS = [0, 1, 2, 1, 0, 2]


class Steps:
    """Steps with some pages at creditors, and on one device. `left`: the halves of which native calls left the rest."""

    def __init__(self, folder: Path, rows: Rows, native: str = "client server") -> None:
        self.rows, self.cluster = rows, Cluster(folder, rows, native)
        self._layers = ThinLayers(kernels(), NUMBERS, (HEADS, KV_HEADS, WIDTH), getattr(torch, rows.dtype))
        self._make, self._merge = native_attention(kernels()), NativeOperations(kernels()).merge
        self.left = list[int | None]()

    def hidden(self, seed: int) -> Tensor:
        return torch.randn(1, self.rows.rows, HIDDEN, generator=torch.Generator().manual_seed(seed))

    def alone(self, seed: int, order: int = 1) -> Tensor:
        return self._layers.run(self.hidden(seed), self._make(self._paging(False, order)), LENGTH - 1)

    def shared(self, seed: int, order: int = 1) -> Tensor:
        backend = AwayLayers(self._make, self._paging(True, order), self.cluster.debtor.reached, self._merge)
        return self._layers.run(self.hidden(seed), backend, LENGTH - 1)

    def are_equal(self, *seeds: int, order: int = 1) -> bool:
        return all(torch.equal(self.shared(seed, order), self.alone(seed, order)) for seed in seeds)

    def _paging(self, away: bool, order: int) -> PagedMetadata:
        """Return the paging of the rows. `order`: 1, or -1 for the last one first."""
        made = self.rows.paging(away)
        if order == 1:
            return made
        gone = tuple(replace(one, row=self.rows.rows - 1 - one.row) for one in reversed(made.away))
        return replace(made, tables=made.tables.flip(0), token_pages=made.token_pages.flip(1), away=gone)

    def asked(self) -> dict[str, int]:
        """Return how often Python attended for each creditor."""
        return {name: each.calls for name, each in self.cluster.held.items()}


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Steps]]:
    made, run = list[Steps](), Kernels.layers_

    def counted(self: Kernels, *given: Any, **how: bool) -> int | None:
        left = run(self, *given, **how)
        made[-1].left.append(left)
        return left

    def one(*given: Any) -> Steps:
        made.append(Steps(tmp_path, *given))
        return made[-1]

    monkeypatch.setattr(Kernels, "layers_", counted)
    monkeypatch.setattr(away_calls, "_LOOK_MS", 10_000)  # no answer is late, however slow the machine
    yield one
    for each in made:
        each.cluster.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lent", [
    ("d1 d2",), ("d1 d2", "d1 d2"), ("d1 d2", "d2", "d1"), ("d1", "d2"), ("", "d1 d2", ""), ("d2", "", "d1 d2", "d1"),
], ids=str)  # fmt: skip
def test_a_step_has_the_bits_of_one_device(make: Callable[..., Steps], lent: tuple[str, ...], dtype: str) -> None:
    """Whatever rows are lent to whom; beside them rows with all pages here."""
    steps = make(Rows(len(lent), dtype, lent))
    assert steps.are_equal(0)
    names = sorted({name for each in lent for name in each.split()})
    assert steps.left == [0, None, None], "the first question makes the connection; one device's step"
    asked = steps.asked()
    assert all(asked[name] == LAYERS for name in names), "creditors learn the questions of each layer"
    steps.left.clear()
    for seed in range(1, 6):
        assert steps.are_equal(seed)
    assert steps.left == [None] * 10
    assert steps.asked() == asked, "nothing more is asked of Python"


def test_the_call_goes_on_behind_an_answer_that_is_late(
    make: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make(Rows(3, "float32", ("d1 d2", "", "d2")), "client")
    assert steps.are_equal(0, 1)
    held = steps.cluster.held["d2"]
    before = held.calls
    held.answer_late(4, 0.5)
    monkeypatch.setattr(away_calls, "_LOOK_MS", 100)
    steps.left.clear()
    attended, decode = list[int](), NativeAttention.decode

    def seen(self: NativeAttention, layer: int, *given: Any) -> None:
        if threading.current_thread() is threading.main_thread():  # creditors have threads of their own here
            attended.append(layer)
        decode(self, layer, *given)

    with monkeypatch.context() as patched:
        patched.setattr(NativeAttention, "decode", seen)
        assert steps.are_equal(2)
    assert not attended, "rows with all pages here have been attended to"
    assert steps.left == [3, None, None]
    assert steps.are_equal(3, 4)
    assert held.calls == before + 3 * len(NUMBERS), "none is asked twice"


def test_a_creditor_that_is_gone_behind_the_last_question_costs_nothing(
    make: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make(Rows(2, "float32", ("d1 d2", "d2")), "client")
    assert steps.are_equal(0, 1)
    held, peers = steps.cluster.held["d2"], steps.cluster.peers
    known = {name: peers.get(name) for name in ("d1", "d2")}
    held.answer_late(len(NUMBERS), 0.5)
    monkeypatch.setattr(away_calls, "_LOOK_MS", 100)
    steps.cluster.debtor.link.look = lambda: peers.update({"d2": known["d2"]})  # type: ignore[dict-item]
    steps.left.clear()
    assert steps.are_equal(2)
    assert steps.left == [len(NUMBERS) - 1, None, None] and peers.get("d1") is None
    with pytest.raises(LoanLost, match="d1"):
        steps.shared(3)


def test_a_step_that_is_given_up_leaves_nothing_behind(
    make: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its late answers are not taken for those of the next one."""
    steps = make(Rows(2, "float32", ("d1 d2", "d2")), "client")
    assert steps.are_equal(0, 1)
    held = steps.cluster.held["d2"]
    held.answer_late(3, None)
    monkeypatch.setattr(away_calls, "_LOOK_MS", 100)
    with pytest.raises(LoanLost, match="d2 did not answer"):
        steps.shared(2)
    held.free.set()
    assert steps.are_equal(3, 4, 5)
    steps.left.clear()
    assert steps.are_equal(6, 7)
    assert steps.left == [None] * 4


def test_a_creditor_that_has_lost_its_pages_ends_the_step(make: Callable[..., Steps]) -> None:
    steps = make(Rows(2, "float32", ("d1 d2", "d2")))
    assert steps.are_equal(0, 1)
    held = steps.cluster.held["d1"]
    held.lent.drop_loan(0)
    with pytest.raises(LoanLost, match="d1"):
        steps.shared(2)
    held.lent.hold_loan(0, steps.rows.tables[0, :, : 64 // PAGE].t().tolist(), 64, "d0")
    assert steps.are_equal(3, 4, 5)


def test_steps_may_change_what_travels_and_where_pages_are(make: Callable[..., Steps]) -> None:
    """Numbers of messages go on from native calls to Python and back; halves keep nothing of a step."""
    steps = make(Rows(2, "float32", ("d1 d2", "d1")))
    assert steps.are_equal(0, 1)
    for how in ("pages", "query", "pages", "query"):
        steps.cluster.debtor.ship(how)
        steps.left.clear()
        assert steps.are_equal(2, 3)
        cut = [*range(len(NUMBERS)), None, None] * 2
        assert steps.left == (cut if how == "pages" else [None] * 4)


def test_questions_follow_rows_that_change_places(make: Callable[..., Steps]) -> None:
    """What creditors are asked stays the same then, but not of which rows."""
    steps = make(Rows(3, "float32", ("d1", "d2", "")))
    assert steps.are_equal(0, 1)
    steps.left.clear()
    for order in (-1, 1, -1):
        assert steps.are_equal(2, 3, order=order)
    assert steps.left == [None] * 12


def test_python_asks_while_packets_must_not_pass_it_by(
    make: Callable[..., Steps], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = make(Rows(2, "float32", ("d1 d2", "d1")))
    assert steps.are_equal(0, 1)
    steps.left.clear()
    with monkeypatch.context() as patched:
        patched.setattr(steps.cluster.debtor.link, "find_places", lambda creditors: None)
        assert steps.are_equal(2)
    assert steps.left == [*range(len(NUMBERS)), None, None]
    assert steps.are_equal(3)
    assert steps.left[-2:] == [None, None]


def test_answers_are_awaited_layer_by_layer_without_native_packets(make: Callable[..., Steps]) -> None:
    """The baseline: packets are read in Python."""
    steps = make(Rows(2, "float32", ("d1 d2", "d1")), "")
    assert steps.are_equal(0, 1)
    assert steps.left == [*range(len(NUMBERS)), None, None] * 2
