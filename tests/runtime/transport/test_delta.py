"""What is said in short is heard in full: the very messages that were sent, whatever came between; and nothing goes on
from nothing.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from runtime.chains import Array
from runtime.messages import CloseSequences, ForwardRows, Message, RowsDone, RunRows
from runtime.transport.delta import DeltaDecoder, DeltaEncoder, ForwardRowsDelta, RowsDoneDelta, RunRowsDelta
from runtime.transport.send_queue import SendQueue
from runtime.transport.validate import WireError
from runtime.transport.wire import decode
from runtime.types import Logprob, Sampled

SEQS = ("a", "b")


def step(at: int) -> tuple[ForwardRows, RunRows, RowsDone]:
    """A decode step of two sequences, of which the second has run for longer."""
    ones, starts, generated = (1, 1), (at, at + 7), (at, at + 4)
    return (
        ForwardRows(SEQS, (1, 3), (1, 2), starts, ones, (True, True), generated),
        RunRows(SEQS, (1, 3), starts, ones, (at + 5, 2 * at), (True, True), generated, ones),
        RowsDone("x", SEQS, (1, 3), ones, (Sampled("a", at), Sampled("b", 3 * at))),
    )


#: Ways in which a message is not the last one going on.
CHANGES = [
    {"seqs": ("a", "c")},
    {"epochs": (1, 4)},
    {"counts": (1, 2), "tokens": (1, 2, 3)},
    {"hops": (1, 1)},
    {"starts": (1, 9)},
    {"generated": (1, 9)},
    {"sample": (True, False)},
    {"steps": (1, 2)},
    {"attempts": (2, 0), "speculate": (True, False)},
    {"sampled": (Sampled("a", 1), None)},
    {"sampled": (Sampled("a", 1, -0.5), Sampled("b", 1))},
    {"sampled": (Sampled("a", 1, None, (Logprob(1, -0.5),)), Sampled("b", 1))},
    {"device": "y"},
]


def changed(message: Message, change: dict[str, object]) -> Message:
    return structs.replace(
        message, **{name: value for name, value in change.items() if name in message.__struct_fields__}
    )


moves = st.lists(
    st.tuples(st.integers(0, 2), st.integers(0, 6), st.sampled_from([{}, {}, {}, {}, *CHANGES])), max_size=30
)


@given(moves)
def test_what_is_heard_is_what_was_said(moves: list[tuple[int, int, dict[str, object]]]) -> None:
    said, heard = DeltaEncoder(), DeltaDecoder()
    for kind, at, change in moves:
        message = changed(step(at)[kind], change)
        short = said.short(message)
        said.mark_sent(message)
        assert heard.full(short) == message


def test_a_decode_step_is_short() -> None:
    said = DeltaEncoder()
    for message in step(4):
        assert said.short(message) is message
        said.mark_sent(message)
    assert [said.short(message) for message in step(5)] == [
        ForwardRowsDelta(),
        RunRowsDelta((10, 10)),
        RowsDoneDelta((5, 15)),
    ]
    assert [said.short(message) for message in step(6)[:2]] == list(step(6)[:2]), "one was left out"
    for message in step(5):
        for change in CHANGES:
            other = changed(message, change)
            assert other == message or said.short(other) is other, change


def test_nothing_goes_on_from_nothing() -> None:
    for short in (ForwardRowsDelta(), RunRowsDelta((1, 2)), RowsDoneDelta((1, 2))):
        assert DeltaDecoder().full(short) is None
    heard = DeltaDecoder()
    for message in step(1):
        heard.full(message)
    assert heard.full(RunRowsDelta((1,))) is None and heard.full(RowsDoneDelta((1, 2, 3))) is None
    attempts = structs.replace(step(1)[0], attempts=(2, 4), speculate=(True, True))
    heard.full(attempts)
    assert heard.full(ForwardRowsDelta()) is None


def test_what_could_not_be_sent_is_not_gone_on_from() -> None:
    """A message that is refused on its way out was never said: the next one does not go on from it."""
    went: list[Message] = []

    def put(frames: list[object]) -> bool:
        went.append(decode([memoryview(bytes(frame)) for frame in frames]).message)  # type: ignore[arg-type]
        return True

    outbox, array = SendQueue(put, 1 << 20), Array("float32", (2, 1), bytes(8))  # type: ignore[arg-type]
    outbox.send(step(1)[0], (array,))
    for wrong in ((), (Array("float32", (1, 1), bytes(4)),)):
        try:
            outbox.send(step(2)[0], wrong)
        except WireError:
            continue
        raise AssertionError("rows went out without what they are")
    outbox.send(CloseSequences(("a",), (1,)))
    outbox.send(step(2)[0], (array,))
    assert went == [step(1)[0], CloseSequences(("a",), (1,)), ForwardRowsDelta()]
