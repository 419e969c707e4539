"""Rows of one message stay one array from engine to engine; it is cut only where a row goes another way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.agent.agent import Agent
from runtime.agent.steps.inbound import parts_of
from runtime.chains import Array, Hop, Slice, Stacked, Stage, StageResult, cut, own, stacked
from runtime.config import AgentConfig
from runtime.control.agent_io import Send, StageLoaded
from runtime.engine.fakes.integer_model import counting_model
from runtime.messages import CloseSequences, ForwardRows, LoadStages, OpenSequences
from runtime.types import SamplingParams, SequenceRequest, StepResult

MODEL = counting_model("m", "1 2* 3 4* 5* 6", max_model_len=64, page_tokens=4)
STAGE = Stage("m", 2, 4)
PATHS = {"y": (Hop("x", 0, 2, (0, 1)), Hop("d", 2, 4, (1, 2)), Hop("y", 4, 6, (2, 3)))}
PATHS["z"] = (*PATHS["y"][:2], Hop("z", 4, 6, (2, 3)))


def states(*values: int) -> Array:
    return Array("uint8", (len(values), 2), bytes(byte for value in values for byte in (value, value)))


def agent(**to: str) -> Agent:
    """Return the agent in the middle of these sequences' paths, by the device of their last hop."""
    made = Agent("d", 64, AgentConfig())
    made.handle(LoadStages((STAGE,), (("b",),)), (), 0)
    made.handle(StageLoaded(STAGE, replace(MODEL.spec, name=STAGE.id, kv_layers=1), 0), (), 0)
    for seq, last in to.items():
        open_(made, seq, last)
    return made


def open_(made: Agent, seq: str, last: str, epoch: int = 1) -> None:
    request = SequenceRequest(seq, seq, "m", (1, 2), SamplingParams(8))
    made.handle(OpenSequences((epoch,), (request,), ((),), (PATHS[last],), (False,), (0,), (None,)), (), 0)


def come(seqs: str, counts: tuple[int, ...]) -> ForwardRows:
    ones = (1,) * len(counts)
    return ForwardRows(tuple(seqs), ones, ones, (0,) * len(counts), counts, (True,) * len(counts), (0,) * len(counts))


def ran(made: Agent, values: dict[str, tuple[int, ...]]) -> list[Send]:
    """Run a step in which the rows of each sequence give these values; return what is sent."""
    step = made.next_step(0)
    assert step is not None
    names = [row.seq for row in step.plan.rows]
    given = [values[name.partition("#")[0]] for name in names]
    outputs = Stacked(names, states(*(value for one in given for value in one)), [len(one) for one in given])
    return [
        each
        for each in made.finish_step(StageResult(StepResult(step.plan.step, ()), outputs), 0)
        if isinstance(each, Send)
    ]


def rows_in(sends: list[Send]) -> dict[str, dict[str, bytes]]:
    """Return, by device, each sequence's bytes."""
    return {
        send.to: {
            seq: bytes(own(part).data)
            for seq, part in zip(send.message.seqs, parts_of(send.message.counts, send.arrays), strict=True)
        }
        for send in sends
        if isinstance(send.message, ForwardRows)
    }


def test_rows_of_one_message_are_one_input_and_go_on_as_one_array() -> None:
    made = agent(a="y", b="y", c="y")
    made.handle(come("abc", (2, 1, 1)), (states(1, 2, 3, 4),), 0)
    step = made.next_step(0)
    assert step is not None and isinstance(step.inputs, Stacked)
    assert step.inputs.counts == (2, 1, 1) and bytes(step.inputs.whole.data) == bytes(states(1, 2, 3, 4).data)
    assert [bytes(step.inputs[row.seq].data) for row in step.plan.rows] == [
        bytes(states(*each).data) for each in ((1, 2), (3,), (4,))
    ]
    outputs = Stacked([row.seq for row in step.plan.rows], states(5, 6, 7, 8), (2, 1, 1))
    (send,) = made.finish_step(StageResult(StepResult(step.plan.step, ()), outputs), 0)
    assert isinstance(send, Send) and (send.to, send.message) == ("y", replace_hops(come("abc", (2, 1, 1))))
    assert send.arrays == (outputs.whole,)
    made.check()


def replace_hops(rows: ForwardRows) -> ForwardRows:
    return ForwardRows(
        rows.seqs, rows.epochs, (2,) * len(rows.seqs), rows.starts, rows.counts, rows.sample, rows.generated
    )


def test_rows_that_part_take_their_own() -> None:
    made = agent(a="y", b="z", c="y")
    made.handle(come("abc", (1, 2, 1)), (states(1, 2, 3, 4),), 0)
    sends = ran(made, {"a": (5,), "b": (6, 7), "c": (8,)})
    assert rows_in(sends) == {"y": {"a": bytes((5, 5)), "c": bytes((8, 8))}, "z": {"b": bytes((6, 6, 7, 7))}}


@pytest.mark.parametrize("again", [False, True])
def test_who_is_gone_does_not_go_on_with_the_others(again: bool) -> None:
    """The sequence is closed, or opened again under another epoch, while the step runs."""
    made = agent(a="y", b="y")
    made.handle(come("ab", (1, 1)), (states(1, 2),), 0)
    step = made.next_step(0)
    assert step is not None
    if again:
        open_(made, "a", "y", 2)
    else:
        made.handle(CloseSequences(("a",), (1,)), (), 0)
    outputs = Stacked([row.seq for row in step.plan.rows], states(5, 6))
    sends = [
        each
        for each in made.finish_step(StageResult(StepResult(step.plan.step, ()), outputs), 0)
        if isinstance(each, Send)
    ]
    assert rows_in(sends) == {"y": {"b": bytes((6, 6))}}
    made.check()


def test_rows_that_come_early_keep_their_own() -> None:
    made = agent(a="y")
    made.handle(come("ab", (1, 2)), (states(1, 2, 3),), 0)
    open_(made, "b", "y")
    step = made.next_step(0)
    assert step is not None
    assert {row.seq[0]: bytes(step.inputs[row.seq].data) for row in step.plan.rows} == {
        "a": bytes((1, 1)),
        "b": bytes((2, 2, 3, 3)),
    }


def test_arrays_that_do_not_come_out_even_are_dropped() -> None:
    made = agent(a="y", b="y")
    for arrays in (
        (states(1, 2),),
        (states(1, 2, 3, 4),),
        (states(1, 2), states(3)),
        (),
        (states(1), states(2), states(3)),
    ):
        made.handle(come("ab", (1, 2)), arrays, 0)
        assert made.next_step(0) is None
    made.handle(come("ab", (1, 2)), (states(1), states(2, 3)), 0)
    assert made.next_step(0) is not None


def test_pieces_of_one_array_are_put_together_again() -> None:
    whole = states(1, 2, 3, 4)
    parts = [Slice(whole, 0, 1), Slice(whole, 1, 3), Slice(whole, 3, 4)]
    made = stacked("abc", parts)
    assert isinstance(made, Stacked) and made.whole is whole and len(made) == 3 and list(made) == ["a", "b", "c"]
    part = stacked("bc", parts[1:])
    assert isinstance(part, Stacked) and bytes(part.whole.data) == bytes(states(2, 3, 4).data)
    for other in (
        [parts[1], parts[0]],
        [parts[0], parts[2]],
        [parts[0], states(2, 3)],
        [parts[0], Slice(states(1, 2, 3, 4), 1, 3)],
    ):
        apart = stacked("ab", other)
        assert not isinstance(apart, Stacked) and [bytes(each.data) for each in apart.values()] == [
            bytes(own(each).data) for each in other
        ]
    with pytest.raises(ValueError, match="3 tokens"):
        Stacked("ab", cut(whole, 0, 3))
    with pytest.raises(KeyError):
        made["d"]
