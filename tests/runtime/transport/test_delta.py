"""Messages sent as deltas arrive as the full messages, whatever came between; no delta applies to a missing message."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from runtime.chains import Array
from runtime.messages import CloseSequences, ForwardRows, Message, RowsDone, RunRows
from runtime.transport.delta import DeltaDecoder, DeltaEncoder, ForwardRowsDelta, RowsDoneDelta, RunRowsDelta
from runtime.transport.send_queue import SendQueue
from runtime.transport.validate import WireError
from runtime.transport.wire import decode, encode
from runtime.types import Logprob, Sampled

SEQS = ("a", "b")


def step(at: int, batch: int = 1, seqs: tuple[str, ...] = SEQS) -> tuple[ForwardRows, RunRows, RowsDone]:
    """Return the messages of a decode step of two sequences, of which the second has run longer."""
    ones, starts, generated = (1, 1), (at, at + 7), (at, at + 4)
    return (
        ForwardRows(seqs, (1, 3), (1, 2), starts, ones, (True, True), generated, batch=batch),
        RunRows(seqs, (1, 3), starts, ones, (at + 5, 2 * at), (True, True), generated, ones, batch=batch),
        RowsDone("x", seqs, (1, 3), ones, (Sampled(seqs[0], at), Sampled(seqs[1], 3 * at)), batch=batch),
    )


#: Changes after which a message cannot be sent as a delta.
CHANGES: list[dict[str, object]] = [
    {"batch": 0},
    {"batch": 9},
    {"seqs": ("a", "c")},
    {"epochs": (1, 4)},
    {"hops": (1, 1)},
    {"starts": (1, 9)},
    {"sampled": (Sampled("a", 1), None)},
    {"sampled": (Sampled("a", 1, -0.5), Sampled("b", 1))},
    {"sampled": (Sampled("a", 1, None, (Logprob(1, -0.5),)), Sampled("b", 1))},
]
moves = st.lists(st.tuples(st.integers(0, 2), st.integers(1, 12), st.booleans()), max_size=60)


def changed(message: Message, change: dict[str, object]) -> Message:
    return structs.replace(
        message, **{name: value for name, value in change.items() if name in message.__struct_fields__}
    )


def sent(encoder: DeltaEncoder, message: Message) -> Message:
    short = encoder.short(message)
    encoder.mark_sent(message, short)
    return short


@given(moves)
def test_what_arrives_is_what_was_sent(moves: list[tuple[int, int, bool]]) -> None:
    """Twelve batches, more than there are slots, take steps in any order, some with other sequences."""
    encoder, decoder, at = DeltaEncoder(), DeltaDecoder(), dict.fromkeys(range(1, 13), 0)
    for kind, batch, part in moves:
        at[batch] += 1
        message = step(at[batch], batch, ("c", "d") if part else SEQS)[kind]
        if kind == 0:
            decoder.prepare()
        assert decoder.full(sent(encoder, message)) == message


def test_a_decode_step_is_short() -> None:
    encoder = DeltaEncoder()
    for message in step(4):
        assert sent(encoder, message) is message
    expected = [ForwardRowsDelta(0), RunRowsDelta(0, (10, 10)), RowsDoneDelta(0, (5, 15))]
    assert [encoder.short(message) for message in step(5)] == expected
    assert [encoder.short(message) for message in step(6)[:2]] == list(step(6)[:2]), "one was left out"
    for message in step(5):
        for change in CHANGES:
            other = changed(message, change)
            assert other == message or encoder.short(other) is other, change


def test_the_time_of_a_step_goes_with_it_and_not_with_the_next() -> None:
    encoder, decoder = DeltaEncoder(), DeltaDecoder()
    came, array = [], Array("float32", (2, 1), bytes(8))
    for at, left in ((4, 70), (5, 0), (6, 90), (7, 0)):
        message = structs.replace(step(at)[0], sent=left)
        outbox = encode(0, message, (array,), None if (short := encoder.short(message)) is message else short)
        encoder.mark_sent(message, short)
        decoder.prepare()
        full = decoder.full(decode([memoryview(bytes(frame)) for frame in outbox]).message)
        assert full == message
        came.append(len(outbox[0]))
    assert came[1] == came[3] and max(came[1:]) < came[0], "all but the first go in short"


def test_nothing_continues_what_never_came() -> None:
    for short in (ForwardRowsDelta(0), RunRowsDelta(0, (1, 2)), RowsDoneDelta(0, (1, 2))):
        assert DeltaDecoder().full(short) is None
    decoder = DeltaDecoder()
    for message in step(1):
        decoder.full(message)
    assert decoder.full(RunRowsDelta(0, (1,))) is None and decoder.full(RowsDoneDelta(0, (1, 2, 3))) is None
    for slot in (-1, 1, 99):
        assert decoder.full(ForwardRowsDelta(slot)) is None
    assert decoder.full(ForwardRowsDelta(0)) == step(2)[0]


def test_what_could_not_be_sent_is_not_continued() -> None:
    """A message that is refused on its way out was not sent, so the next delta does not apply to it."""
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
    assert went == [step(1)[0], CloseSequences(("a",), (1,)), ForwardRowsDelta(0)]
