"""The wire format: messages come back as they were, and invalid input raises `WireError` and nothing else."""

from __future__ import annotations

import struct

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from runtime.chains import Array, Hop, RunAhead, Stage
from runtime.loans import LoanQuery
from runtime.messages import (
    PROTOCOL,
    AgentHello,
    AgentStats,
    AttendLoans,
    Bid,
    CloseSequences,
    ForwardRows,
    Heartbeat,
    HopAssigned,
    HostWeights,
    LengthsProbed,
    LinkClosed,
    LoadStages,
    LostLayers,
    MendPages,
    Message,
    MigrationReady,
    Offer,
    OpenSequences,
    PageData,
    PageRequest,
    PeerList,
    PoolBeat,
    ReadAhead,
    RendezvousKey,
    Retract,
    RowsDone,
    RowsLost,
    RunRows,
    SendAway,
    SpeculationResult,
    StageReady,
    StartMigration,
)  # fmt: skip
from runtime.messages.to_agent import AHEAD_STAGES
from runtime.messages.to_scheduler import HOST_CHANGES
from runtime.transport import wire
from runtime.transport.delta import ForwardRowsDelta
from runtime.transport.validate import WireError
from runtime.transport.wire import Frame, OtherProtocol, decode, encode
from runtime.types import LengthMasses, Logprob, ModelSpec, PromptLogprobs, Sampled, SamplingParams, SequenceRequest
from tests.runtime.virtual import request

SPEC = ModelSpec("m[0:3]", 1, 4, 64, 100)
ROWS = ForwardRows(("a", "b"), (1, 2), (1, 1), (0, 7), (3, 1), (False, True), (0, 4))
TURNS = ForwardRows(("a", "b"), (1, 2), (1, 1), (0, 7), (3, 1), (False, True), (0, 4), (4, 5), (True, False))
PAIR = ForwardRows(("a", "b"), (1, 1), (1, 1), (0, 0), (1, 1), (True, True), (0, 0))
MEND = MendPages(3, "a", 1, (("y", 2),), (LostLayers(1, (0, 2)),), 16, (7, 8))
STATES = (Array("float32", (3, 2), bytes(range(24))), Array("float32", (1, 2), bytes(range(8))))
REQUEST = SequenceRequest(
    "a", "r", "org/m", (1, 2, 3), SamplingParams(4, logit_bias=((3, -1.5),), stop_token_ids=(7,)), slo_ms=50
)
MESSAGES: list[tuple[Message, tuple[Array, ...]]] = [
    (
        OpenSequences(
            (1,), (REQUEST,), ((5, 6),), ((Hop("x", 0, 3), Hop("y", 3, 9, (0, 2))),), (False,), (0,), (("b", 4),)
        ),
        (),
    ),
    (CloseSequences(("a",), (3,)), ()),
    (RunRows(("a", "b"), (1, 1), (0, 4), (2, 1), (8, 9, 10), (False, True), (0, 1), (1, 1)), ()),
    (ROWS, STATES),
    (ROWS, (Array("float32", (4, 2), bytes(range(32))),)),
    (RunRows(("a",), (1,), (0,), (2,), (8, 9), (False,), (0,), (1,), (4,), (True,)), ()),
    (TURNS, STATES),
    (SpeculationResult("x", ("a", "b"), (1, 2), (4, 6), (True, False), (1.0, 0.25)), ()),
    (LengthsProbed("x", ("a", "b"), (LengthMasses((0, 8), (0.25, 0.75)), LengthMasses((0,), (1.0,)))), ()),
    (
        OpenSequences(
            (1,),
            (REQUEST,),
            ((),),
            ((Hop("x", 0, 3), Hop("y", 3, 9, (0, 2))),),
            (False,),
            (0,),
            (None,),
            (None,),
            (((1, ("y", "z")),),),
        ),
        (),
    ),
    (Offer("x", ("a", "b"), (1, 1), (1, 2), (8, 3)), ()),
    (Bid("y", ("a", "b"), (1, 1), (1, 2)), ()),
    (Retract(("a",), (1,), (1,)), ()),
    (HopAssigned("x", ("a",), (1,), (1,), (0,), (8,), ("y",)), ()),
    (PageData(1, "a", 2, 0, 16, "d" * 64), (Array("uint8", (4, 64), bytes(256)),)),
    (PageData(1, "a", 2, 0, 16, "", "it is not here"), ()),
    (PageData(1, "a", 2, 4, 6, "d" * 64, "", 3, ((0, 6), (9, 10))), (Array("float16", (2, 5), bytes(20)),)),
    (PageData(1, "a", 2, 4, 6, "", "it is not kept", 3, ((9, 10),)), ()),
    (PageRequest(1, "a", 2, (3, 5), 4, 6, "x", 3), ()),
    (AgentHello("x", PROTOCOL, "1.0", 100, 64, 0, "ipc:///x"), ()),
    (
        RowsDone(
            "x",
            ("a",),
            (1,),
            (3,),
            (Sampled("a", 5, -0.5, (Logprob(5, -0.5),)),),
            (PromptLogprobs("a", 1, (Logprob(2, -1.0),), ((),)),),
        ),
        (),
    ),
    (RowsLost("x", ("a",), (1,), "no pages", True), ()),
    (MendPages(3, "a", 1, (("x", 0), ("y", 2)), (LostLayers(1, (0, 2)), LostLayers(2, (3, 4))), 16, (7, 8)), ()),
    (MEND, (Array("float32", (2, 3), bytes(24)),)),
    (AgentStats("x", 1, 2, 3, 4, 5, (("block", 1),)), ()),
    (LoadStages((Stage("m", 0, 3),), (("b", "c"),), counts=((1, 2),)), ()),
    (ReadAhead((Stage("m", 0, 3),), (("b", "c"),), ((1, 2),)), ()),
    (HostWeights("x", (("block", 4096), ("other", 0))), ()),
    (StageReady("x", Stage("m", 0, 3), SPEC, 100, 9, 60, 40), ()),
    (PeerList((("x", 1, "ipc:///x"),)), ()),
    (PeerList((("x", 1, "ipc:///x"), ("y", 2, "ipc:///y")), ("gloo/here", "")), ()),
    (AgentHello("x", PROTOCOL, "1.0", 100, 64, 0, "ipc:///x", tensor_transport="gloo/here"), ()),
    (AgentStats("x", 1, 2, 3, 4, 5, (("block", 1),), (("y", "direct"),)), ()),
    (RendezvousKey(True, "store/0/0", b"\0\1"), ()),
    (LinkClosed(False, "it has not come"), ()),
    (Heartbeat(12), ()),
    (PoolBeat("x", "here", 60, 20, (("y", 9), ("z", 12))), ()),
]


def frames_of(message: Message, arrays: tuple[Array, ...] = (), number: int = 3) -> list[Frame]:
    """Return a message's frames, read-only as a transport delivers them."""
    return [memoryview(bytes(frame)) for frame in encode(number, message, arrays)]


@pytest.mark.parametrize(("message", "arrays"), MESSAGES, ids=lambda value: type(value).__name__)
def test_a_message_comes_back_as_it_was(message: Message, arrays: tuple[Array, ...]) -> None:
    parcel = decode(frames_of(message, arrays))
    assert parcel.message == message and parcel.number == 3
    assert [(each.dtype, each.shape, bytes(each.data)) for each in parcel.arrays] == [
        (e.dtype, e.shape, bytes(e.data)) for e in arrays
    ]


def test_small_arrays_share_a_frame_and_large_ones_are_not_copied() -> None:
    assert len(encode(0, ROWS, STATES)) == 2
    large = tuple(Array("uint8", (count, 1 << 20), bytes(count << 20)) for count in ROWS.counts)
    frames = encode(0, ROWS, large)
    assert len(frames) == 3
    for frame, array in zip(frames[1:], large, strict=True):
        assert isinstance(frame, memoryview) and frame.obj is array.data
    views = decode(frames).arrays
    assert [view.data.obj for view in views] == [array.data for array in large]


def changed(body: Frame, **fields: object) -> bytes:
    """Return a message's first frame with fields of its preamble replaced."""
    magic, protocol, number = struct.unpack_from("<4sHxxQ", body)
    values = {"magic": magic, "protocol": protocol, "number": number} | fields
    return struct.pack("<4sHxxQ", values["magic"], values["protocol"], values["number"]) + bytes(body[16:])


def test_another_protocol_is_told_before_anything_is_read() -> None:
    body = changed(frames_of(Heartbeat(1))[0], protocol=PROTOCOL + 1)[:17]
    with pytest.raises(OtherProtocol, match=f"it speaks protocol {PROTOCOL + 1}, not {PROTOCOL}"):
        decode([body])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b""],
        [b"BZoo"],
        [changed(frames_of(Heartbeat(1))[0], magic=b"HTTP")],
        [bytes(frames_of(Heartbeat(1))[0]) + b"\0"],
        [bytes(frames_of(Heartbeat(1))[0])[:-1]],
        [*frames_of(Heartbeat(1)), b"more"],
        [*frames_of(ROWS, STATES), b""],
        frames_of(ROWS, STATES)[:1],
        [frames_of(ROWS, STATES)[0], bytes(31)],
        [frames_of(ROWS, STATES)[0], bytes(33)],
        [frames_of(ROWS, STATES)[0], bytes(8), bytes(24)],
        [bytes(frames_of(Heartbeat(1))[0][:16]) + b"\x93" * 4000],
    ],
    ids=range(13),
)
def test_what_is_no_message_is_refused(frames: list[Frame]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def lying(
    message: Message, arrays: list[tuple[str, tuple[int, ...]]], *data: bytes, counts: tuple[int, ...] = ()
) -> list[Frame]:
    """Return frames as a sender without checks could send them.

    `counts`: how many arrays of each kind the header claims.
    """
    body = bytearray(16)
    struct.pack_into("<4sHxxQ", body, 0, b"BZoo", PROTOCOL, 0)
    kinds = tuple(
        (dtype, shape, count) for (dtype, shape), count in zip(arrays, counts or (1,) * len(arrays), strict=True)
    )
    wire._encoder.encode_into((kinds, message), body, 16)
    return [bytes(body), *data]


def announced(
    message: Message,
    arrays: list[tuple[str, tuple[int, ...]]],
    *data: bytes,
    ticket: int = 5,
    counts: tuple[int, ...] = (),
) -> list[Frame]:
    """Return frames as `lying` does, of arrays that the header announces as sent directly."""
    body = bytearray(16)
    struct.pack_into("<4sHxxQ", body, 0, b"BZoo", PROTOCOL, 0)
    kinds = tuple(
        (dtype, shape, count) for (dtype, shape), count in zip(arrays, counts or (1,) * len(arrays), strict=True)
    )
    wire._encoder.encode_into((kinds, message, ticket), body, 16)
    return [bytes(body), *data]


@pytest.mark.parametrize(("message", "short"), [(ROWS, None), (ROWS, ForwardRowsDelta(0))], ids=["in full", "in short"])
def test_arrays_that_come_directly_are_only_said(message: Message, short: Message | None) -> None:
    nothing = tuple(structs.replace(each, data=None) for each in STATES)
    (body,) = encode(3, message, nothing, short, 7)
    parcel = decode([bytes(body)])
    assert (parcel.ticket, parcel.number, parcel.arrays) == (7, 3, nothing)
    assert parcel.message == (short or message)
    assert decode(announced(ROWS, [("float32", (3, 2)), ("float32", (1, 2))])).arrays == nothing
    for wrong in ((), (Array("float32", (4, 1 << 30), None),), (Array("object", (4, 2), None),)):
        with pytest.raises(WireError):
            encode(3, message, wrong, short, 7)


def test_what_comes_beside_its_message_says_nothing_of_tickets() -> None:
    """Messages of agents that send nothing directly have the same frames as without direct transport."""
    for message, arrays in ((ROWS, STATES), (PAIR, (Array("float32", (2, 2), bytes(16)),)), (Heartbeat(1), ())):
        body, *_ = encode(0, message, arrays)
        assert len(msgspec.msgpack.decode(bytes(body)[16:])) == 2
        assert decode(frames_of(message, arrays)).ticket is None


def test_arrays_that_are_alike_are_said_once() -> None:
    assert decode(lying(PAIR, [("float32", (1, 2))], bytes(range(16)), counts=(2,))).arrays[1].data == bytes(
        range(8, 16)
    )
    assert decode(lying(PAIR, [("float32", (1, 2))], bytes(8), bytes(range(8)), counts=(2,))).arrays[1].data == bytes(
        range(8)
    )


@pytest.mark.parametrize(
    "frames",
    [
        lying(ROWS, [("float32", (3, 2)), ("object", (1, 2))], bytes(24), bytes(8)),
        lying(ROWS, [("float32", (3, 2)), ("float32", (-1, -2))], bytes(24), bytes(8)),
        lying(ROWS, [("float32", (3, 2)), ("float32", (1 << 40, 1 << 40))], bytes(24), bytes(8)),
        lying(ROWS, [("float32", (3, 2)), ("float32", (1, 1, 1, 1, 2))], bytes(24), bytes(8)),
        lying(ROWS, [("float32", (3, 2))], bytes(24)),
        lying(PAIR, [("float32", (1, 2))], bytes(8), bytes(8), counts=(3,)),
        lying(PAIR, [("float32", (1, 2))], bytes(24), counts=(2,)),
        lying(PAIR, [("float32", (1, 2))], bytes(16), counts=(-2,)),
        lying(PAIR, [("float32", (1, 2)), ("uint8", (1, 2))], bytes(16), counts=(2, 0)),
        lying(PAIR, [("float32", (1, 2))], bytes(16), counts=(1 << 60,)),
        lying(PAIR, [("float32", (1, 0))], b"", counts=(1 << 60,)),
        lying(ROWS, [("float32", (2, 2)), ("float32", (1, 2))], bytes(16), bytes(8)),
        lying(ForwardRows(("a",), (1,), (1,), (0,), (1 << 30,), (True,), (0,)), [("float32", (1 << 30, 0))], b""),
        lying(ForwardRows(("a",), (1,), (1,), (0,), (0,), (True,), (0,)), [("float32", (0, 2))], b""),
        lying(ROWS, [("float32", (2, 2)), ("float32", (2, 2))], bytes(16), bytes(16)),
        lying(ROWS, [("float32", (5, 2))], bytes(40)),
        lying(ROWS, [("float32", (4,))], bytes(16)),
        lying(PageData(1, "a", 1, 0, 4, "d"), []),
        lying(AttendLoans(1, LoanQuery(((1,),), ((8,),), (1,), 0, pull=True)), [("float32", (1, 1, 4))], bytes(16)),
        lying(PageData(1, "a", 1, 0, 4, "", "no"), [("uint8", (1, 4))], bytes(4)),
        lying(PageData(1, "a", 1, 0, 4, "d"), [("float32", (1, 1))], bytes(4)),
        lying(PageData(1, "a", 1, 0, 4, "d", "", 2), [("float32", (1, 1))], bytes(4)),
        lying(PageData(1, "a", 1, 4, 4, "d", "", 2), [("float32", (0, 1))], b""),
        lying(Heartbeat(1), [("uint8", (1,))], b"x"),
        lying(SendAway("a", 1, 0, 1, "b", 0, 16, (-1, 2)), []),
        lying(
            StartMigration(
                1, "a", 1, Stage("m", 0, 2), (0, 2), 16, "b", 32, (), True, request("a", (1,)), shared=("c", -16)
            ),
            [],
        ),
        lying(CloseSequences(("a", "b"), (1,)), []),
        lying(RunRows(("a",), (1,), (0,), (2,), (8,), (True,), (0,), (1,)), []),
        lying(RunRows(("a",), (1,), (-1,), (1,), (8,), (True,), (0,), (1,)), []),
        lying(RowsDone("x", ("a", "b"), (1, 1), (1, 1), (None, None), (), (2, 4, 6)), []),
        lying(RowsDone("x", ("a", "b"), (1, 1), (1, 1), (None, None), attempts=(2,)), []),
        lying(RunRows(("a",), (1,), (0,), (1,), (8,), (True,), (0,), (1,), (-2,), (True,)), []),
        lying(RunRows(("a",), (1,), (0,), (1,), (8,), (True,), (0,), (1,), (2,)), []),
        lying(SpeculationResult("x", ("a",), (1,), (2, 4), (True,), (1.0,)), []),
        lying(
            OpenSequences(
                (1,),
                (REQUEST,),
                ((),),
                ((Hop("x", 0, 3),),),
                (False,),
                (0,),
                (None,),
                (RunAhead(0, Stage("m", 0, 3), None),),
            ),
            [],
        ),
        lying(
            OpenSequences(
                (1,), (REQUEST,), ((),), ((Hop("x", 0, 3),),), (False,), (0,), (None,), (), (((0, ("x",)),),)
            ),
            [],
        ),
        lying(
            OpenSequences(
                (1,), (REQUEST,), ((),), ((Hop("x", 0, 3), Hop("y", 3, 9)),), (False,), (0,), (None,), (), (((1, ()),),)
            ),
            [],
        ),
        lying(Offer("x", ("a",), (1,), (1, 2), (8,)), []),
        lying(HopAssigned("x", ("a",), (1,), (-1,), (0,), (8,), ("y",)), []),
        lying(RowsDone("x", ("a",), (1,), (-7,), (None,)), []),
        lying(RowsDone("x", ("a",), (1,), (1,), (Sampled("a", -1),)), []),
        lying(SpeculationResult("x", ("a",), (1,), (2,), (True,), (float("nan"),)), []),
        lying(SpeculationResult("x", ("a",), (1,), (2,), (True,), (float("inf"),)), []),
        lying(LengthsProbed("x", ("a", "b"), (LengthMasses((0,), (1.0,)),)), []),
        lying(LengthsProbed("x", ("a",), (LengthMasses((0, 8), (1.0,)),)), []),
        lying(LengthsProbed("x", ("a",), (LengthMasses((), ()),)), []),
        lying(LengthsProbed("x", ("a",), (LengthMasses((1, 8), (0.5, 0.5)),)), []),
        lying(LengthsProbed("x", ("a",), (LengthMasses((0, 8, 8), (0.5, 0.5, 0.5)),)), []),
        lying(LengthsProbed("x", ("a",), (LengthMasses((0, 8), (float("nan"), 0.5)),)), []),
        lying(LengthsProbed("x", ("a",), (LengthMasses((0, 8), (-0.5, 1.5)),)), []),
        lying(LengthsProbed("x", ("a",), (LengthMasses((0, 8), (0.0, 0.0)),)), []),
        lying(AgentStats("x", -1, 0, 0, 0, 0, ()), []),
        lying(AgentStats("x", 0, 0, 0, 0, -5, ()), []),
        lying(AgentHello("x", 1, "v", -1, 8, 0, "ipc://x"), []),
        lying(MigrationReady("x", 1, "a", (), (), -8), []),
        lying(LoadStages((Stage("m", 0, 3),), (("b",),), counts=((0,),)), []),
        lying(LoadStages((Stage("m", 0, 3),), (("b",),), counts=((3,), (1,))), []),
        lying(ReadAhead((Stage("m", 0, 3),), (("b",),), ((0,),)), []),
        lying(ReadAhead((Stage("m", 0, 3),), (("b",),), ()), []),
        lying(ReadAhead(*((each,) * (AHEAD_STAGES + 1) for each in (Stage("m", 0, 1), ("b",), (1,)))), []),
        lying(HostWeights("x", (("block", -1),)), []),
        lying(HostWeights("x", tuple((str(at), 1) for at in range(HOST_CHANGES + 1))), []),
        lying(StageReady("x", Stage("m", 0, 3), SPEC, 100, 9, -2), []),
        lying(StageReady("x", Stage("m", 0, 3), SPEC, 100, 9, 5, -1), []),
        lying(AgentHello("x", 1, "v", 1, 8, 0, "ipc://x", fetch_sets=0), []),
        lying(AgentHello("x", 1, "v", 1, 8, 0, "ipc://x", recompute_chunk=0), []),
        lying(PageRequest(1, "a", 1, (0, 1), -4, 4, "x"), []),
        lying(PeerList((("x", 1, "ipc:///x"),), ("a", "b")), []),
        lying(AgentHello("x", 1, "v", 1, 8, 0, "ipc://x", tensor_transport="x" * 201), []),
        lying(RendezvousKey(True, "", b"x"), []),
        lying(RendezvousKey(True, "k" * 201, b"x"), []),
        lying(RendezvousKey(True, "k", bytes((1 << 16) + 1)), []),
        lying(LinkClosed(True, "no"), [("uint8", (1,))], b"x"),
        lying(PoolBeat("x", "", 60, -1), []),
        lying(PoolBeat("x", "", 60, 20, (("y", -9),)), []),
        announced(ROWS, [("float32", (3, 2)), ("float32", (1, 2))], bytes(24), bytes(8)),
        announced(ROWS, [("float32", (3, 2))]),
        announced(ROWS, [("float32", (4, 2))], ticket=-1),
        announced(ROWS, [("object", (4, 2))]),
        announced(ROWS, [("float32", (4, 1 << 29))]),
        announced(PAIR, [("float32", (1, (1 << 27) + 1))], counts=(2,)),
        announced(PAIR, [("float32", (1, 2))], counts=(1 << 40,)),
        announced(Heartbeat(1), []),
        announced(PageData(1, "a", 1, 0, 4, "d"), [("uint8", (0, 64))]),
    ],
    ids=range(84),
)
def test_what_contradicts_itself_is_refused(frames: list[Frame]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def test_a_mend_has_the_states_of_its_tokens_and_lost_layers_of_its_last_hop() -> None:
    right = ("float32", (2, 3))
    frames = [
        lying(MEND, []),
        lying(MEND, [("float32", (3, 3))], bytes(36)),
        lying(MEND, [("float32", (2,))], bytes(8)),
    ]
    for change in (
        {"lost": ()}, {"lost": (LostLayers(1, (2, 2)),)}, {"lost": (LostLayers(1, (-1, 2)),)}, {"path": ()},
        {"path": (("x", 0),)}, {"path": (("y", 2), ("z", -3))}, {"first": -16}, {"tokens": ()},
    ):  # fmt: skip
        frames.append(lying(structs.replace(MEND, **change), [right], bytes(24)))
    for each in frames:
        with pytest.raises(WireError):
            decode(each)
    assert decode(lying(MEND, [right], bytes(24))).message == MEND


def test_arrays_without_elements_cannot_be_so_many_that_they_fill_the_memory() -> None:
    with pytest.raises(WireError, match="too many"):
        decode(lying(PAIR, [("float32", (1, 0))] * 64, b"", counts=(1 << 20,) * 64))


@pytest.mark.parametrize(
    ("message", "arrays"),
    [
        (ROWS, STATES[:1]),
        (ROWS, tuple(structs.replace(each, shape=(1, 1)) for each in STATES)),
        (CloseSequences(("a",), ()), ()),
        (Heartbeat(1), STATES),
    ],
)
def test_what_would_be_refused_does_not_go_out(message: Message, arrays: tuple[Array, ...]) -> None:
    with pytest.raises(WireError):
        encode(0, message, arrays)


@given(st.lists(st.binary(max_size=200), max_size=4))
@settings(max_examples=200, deadline=None)
def test_noise_is_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


@given(st.sampled_from(MESSAGES), st.data())
@settings(max_examples=400, deadline=None)
def test_a_message_with_changed_bytes_is_another_message_or_a_wire_error(
    case: tuple[Message, tuple[Array, ...]], data: st.DataObject
) -> None:
    body, *rest = frames_of(*case)
    noisy = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        noisy[data.draw(st.integers(16, len(noisy) - 1))] = data.draw(st.integers(0, 255))
    try:
        parcel = decode([bytes(noisy), *rest])
    except WireError:
        return
    assert encode(parcel.number, parcel.message, parcel.arrays)
