"""Requests for pages that are not written yet: which are answered when, and which are refused (TI-15)."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from runtime.agent.migration.by_layer import PagesByLayer
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.chains import Hop
from runtime.control.agent_io import AgentCommand, ReadPages, Send
from runtime.messages import PageData, PageRequest
from runtime.types import ModelSpec, SamplingParams, SequenceRequest

WIDTH, SECOND = 4, 1_000_000_000
REQUEST = SequenceRequest("s", "r", "m", tuple(range(13)), SamplingParams(4))
#: The device has layers 2 to 5 of the chain, and the destination gets 3 and 4 of them.
HOP, LAYERS = Hop("d0", 3, 9, (2, 6)), (3, 5)
WANT = PageRequest(7, "s", 1, LAYERS, 8, 13, "d1", as_written=True)


class LayerSource:
    """A source with a sequence of which 8 tokens are written, and 13 have pages."""

    def __init__(self, page_bytes: int = 64, opened: bool = True) -> None:
        self.tables, self.sequences = SequencePageTables(64), dict[str, AgentSequence]()
        self.key = self.tables.open("s", 3, ModelSpec("m", 4, WIDTH, 64, 97))
        assert self.tables.grow(self.key, 13)
        self.tables.fill(self.key, 8)
        self.pages = PagesByLayer("d0", self.tables, self.sequences, page_bytes)
        if opened:
            self.open()

    def open(self, epoch: int = 1) -> None:
        self.sequences["s"] = AgentSequence(REQUEST, epoch, (HOP,), (), {3: self.key})

    def run(self, layers: int, tokens: int = 5, **changes: Any) -> list[AgentCommand]:
        """Say that a row has passed so many of its device's layers."""
        row = QueuedRow(self.sequences["s"], 1, 0, self.key, "m", 8, tokens, None, None, True, 0, 1, 0, True)
        return self.pages.send_layers([structs.replace(row, **changes)], {self.key: layers})

    def sent(self, layers: int) -> tuple[int, ...]:
        """Return the pages of tokens from 8 on in one of the chain's layers."""
        return self.tables.pages(self.key, 8, 13, slice(layers - 2, layers - 1))


def layers_of(commands: list[AgentCommand]) -> list[tuple[int, int]]:
    found = []
    for command in commands:
        assert isinstance(command, ReadPages) and isinstance(command.message, PageData) and command.to == "d1"
        assert (command.message.move, command.message.lo, command.message.hi) == (7, 8, 13)
        found.append(command.message.layers)
    return found


def refusal(commands: list[AgentCommand]) -> str:
    (command,) = commands
    assert isinstance(command, Send) and isinstance(command.message, PageData) and command.to == "d1"
    return command.message.error


def test_each_layer_goes_when_it_is_written_and_no_other() -> None:
    source = LayerSource()
    assert source.pages.add(WANT, 0) == [] and len(source.pages.waiting) == 1
    assert source.run(0) == source.run(1) == []  # the device's first layer stays here
    (command,) = source.run(2)
    assert layers_of([command]) == [(3, 4)] and isinstance(command, ReadPages)
    assert command.pages == source.sent(3)
    assert source.run(2) == []
    (command,) = source.run(4)
    assert layers_of([command]) == [(4, 5)] and isinstance(command, ReadPages)
    assert command.pages == source.sent(4)
    assert len(source.pages.waiting) == 0 and source.pages.settle() == []


def test_what_is_left_goes_behind_the_step() -> None:
    source = LayerSource()
    source.pages.add(WANT, 0)
    assert layers_of(source.run(2)) == [(3, 4)]
    assert source.pages.settle() == []
    source.tables.fill(source.key, 5)
    assert layers_of(source.pages.settle()) == [(4, 5)] and len(source.pages.waiting) == 0


def test_pages_that_are_written_go_at_once() -> None:
    source = LayerSource()
    source.tables.fill(source.key, 5)
    assert layers_of(source.pages.add(WANT, 0)) == [LAYERS] and len(source.pages.waiting) == 0


def test_a_row_that_ends_before_the_last_token_shows_nothing() -> None:
    source = LayerSource()
    source.pages.add(WANT, 0)
    assert source.run(4, tokens=4) == source.run(4, shadow=True) == []


def test_large_pages_go_in_several_messages() -> None:
    source = LayerSource(page_bytes=2 << 20)  # two page sets: 4 MiB by layer
    source.pages.add(WANT, 0)
    assert layers_of(source.run(4)) == [(3, 4)]  # one at a time while the step runs
    assert layers_of(source.run(4)) == [(4, 5)]
    source.pages.add(WANT, 0)
    source.tables.fill(source.key, 5)
    assert layers_of(source.pages.settle()) == [(3, 4), (4, 5)]


def test_a_request_that_overtakes_its_sequence_waits_for_it() -> None:
    source = LayerSource(opened=False)
    assert source.pages.add(WANT, 0) == source.pages.settle() == source.pages.expire(29 * SECOND) == []
    source.open()
    assert layers_of(source.run(4)) == [LAYERS]


def test_a_sequence_that_does_not_come_is_refused_in_the_end() -> None:
    source = LayerSource(opened=False)
    source.pages.add(WANT, 0)
    assert "not here" in refusal(source.pages.expire(31 * SECOND)) and len(source.pages.waiting) == 0
    source.open()
    source.pages.add(WANT, 0)
    assert source.pages.expire(100 * SECOND) == []


def test_requests_of_another_time_are_refused_or_dropped() -> None:
    source = LayerSource()
    source.open(epoch=2)
    assert "another way" in refusal(source.pages.add(WANT, 0))
    source.open()
    source.pages.add(WANT, 0)
    source.pages.close("s", 0)
    assert len(source.pages.waiting) == 1
    source.pages.close("s", 1)
    assert len(source.pages.waiting) == 0
    source.pages.add(WANT, 0)
    source.pages.remove_device("d2")
    assert len(source.pages.waiting) == 1
    source.pages.remove_device("d1")
    assert len(source.pages.waiting) == 0


def test_a_step_that_fails_refuses_what_was_sent_in_part() -> None:
    source = LayerSource()
    source.pages.add(WANT, 0)
    assert source.pages.fail({source.key}) == []  # nothing was sent: the row may run again
    source.run(2)
    assert source.pages.fail({"other"}) == []
    assert "failed" in refusal(source.pages.fail({source.key})) and len(source.pages.waiting) == 0
    source.pages.add(WANT, 0)
    assert layers_of(source.run(4)) == [LAYERS]


def test_a_later_request_for_the_same_pages_begins_with_the_first_layer() -> None:
    source = LayerSource()
    source.pages.add(WANT, 0)
    source.run(2)
    source.pages.add(WANT, 1)
    assert len(source.pages.waiting) == 1 and layers_of(source.run(4)) == [LAYERS]


@pytest.mark.parametrize(("lo", "hi"), [(6, 13), (8, 8), (12, 8), (-4, 13)])
def test_spans_that_are_none_are_refused(lo: int, hi: int) -> None:
    source = LayerSource()
    source.tables.fill(source.key, 5)
    assert "page sets" in refusal(source.pages.add(structs.replace(WANT, lo=lo, hi=hi), 0))
    assert len(source.pages.waiting) == 0


def test_requests_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("runtime.agent.migration.by_layer._MOST_OPEN", 2)
    source = LayerSource(opened=False)
    for move in range(2):
        assert source.pages.add(structs.replace(WANT, move=move), 0) == []
    assert "too many" in refusal(source.pages.add(WANT, 0))


def test_layers_that_are_not_here_are_waited_for_and_given_up() -> None:
    source = LayerSource()
    assert source.pages.add(structs.replace(WANT, layers=(5, 7)), 0) == []
    assert "not here" in refusal(source.pages.expire(31 * SECOND))
