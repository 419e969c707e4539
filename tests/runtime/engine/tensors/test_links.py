"""Direct links over gloo: tensors arrive as they were sent, and every fault is reported within its time limit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from runtime.chains import Array
from runtime.config import DirectConfig
from runtime.engine.tensors.convert import staying
from runtime.engine.tensors.process_groups import Gloo, Nccl, rail_for
from tests.runtime.engine.links import LIMIT, Faulty, Wire
from zoo.errors import NotServable

SHORT = DirectConfig(receive_timeout_s=0.5, connect_timeout_s=3.0)


@pytest.fixture
def made() -> Iterator[Callable[..., Wire]]:
    with ExitStack() as stack:

        def make(config: DirectConfig | None = None, rails: Any = None, as_bytes: bool = False) -> Wire:
            wire = Wire(config or DirectConfig(), rails, as_bytes)
            stack.callback(wire.close)
            return wire

        yield make


def state(seed: int = 0, rows: int = 3, dtype: torch.dtype = torch.float32) -> Array:
    torch.manual_seed(seed)
    return staying(torch.randn(rows, 8).to(dtype))


def kinds(*arrays: Array) -> tuple[Array, ...]:
    return tuple(Array(array.dtype, array.shape, None) for array in arrays)


def go(wire: Wire, ticket: int, *arrays: Array) -> None:
    wire.b.expect("a", ticket, kinds(*arrays))
    wire.a.send("b", ticket, arrays)


def same(a: Array, b: Array) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and torch.equal(a.data, b.data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_tensors_come_as_they_went(made: Callable[..., Wire], dtype: torch.dtype) -> None:
    wire = made()
    wire.link()
    one = state(dtype=dtype)
    go(wire, 1, one)
    (came,) = wire.came()
    assert (came.peer, came.ticket, came.error) == ("a", 1, "") and same(came.arrays[0], one)
    assert came.arrays[0].data.data_ptr() != one.data.data_ptr()
    assert wire.a.state() == {"b": "direct"} and wire.b.state() == {}


def test_several_arrays_of_several_kinds_come_as_one(made: Callable[..., Wire]) -> None:
    wire = made()
    wire.link()
    arrays = [state(1, 3), state(2, 1, torch.bfloat16), staying(torch.zeros((0, 4))), state(3, 5)]
    wire.b.expect("a", 1, kinds(*arrays))
    wire.a.send("b", 1, arrays)
    (came,) = wire.came()
    assert all(same(a, b) for a, b in zip(came.arrays, arrays, strict=True))


def test_bytes_of_the_host_go_and_come_for_an_engine_that_knows_no_tensors(made: Callable[..., Wire]) -> None:
    wire = made(as_bytes=True)
    wire.link()
    array = Array("int64", (2, 1), bytes(range(16)))
    go(wire, 1, array)
    (came,) = wire.came()
    assert bytes(came.arrays[0].data) == array.data and memoryview(came.arrays[0].data).nbytes == 16
    assert (
        wire.a.digest(array)
        == wire.b.digest(came.arrays[0])
        == wire.b.digest(staying(torch.frombuffer(bytearray(array.data), dtype=torch.uint8)))
    )


def test_many_under_way_come_each_under_its_ticket(made: Callable[..., Wire]) -> None:
    wire = made(DirectConfig(max_inflight_bytes=4096))  # less than all of them together
    wire.link()
    arrays = {ticket: state(ticket, 1 + ticket % 7) for ticket in range(1, 60)}
    for ticket, array in arrays.items():
        wire.a.send("b", ticket, [array])
    assert not wire.a.carries("b", 1)  # none of them has been received yet
    for ticket, array in arrays.items():
        wire.b.expect("a", ticket, kinds(array))
    came = {one.ticket: one for one in wire.came(len(arrays))}
    assert all(same(came[ticket].arrays[0], array) for ticket, array in arrays.items())
    wire.until(lambda: wire.a.carries("b", 4096))


def test_both_ways_have_links_of_their_own(made: Callable[..., Wire]) -> None:
    wire = made()
    wire.link()
    wire.b.offer("a")
    wire.until(lambda: wire.b.carries("a", 1))
    there, back = state(1), state(2)
    go(wire, 1, there)
    wire.a.expect("b", 1, kinds(back))
    wire.b.send("a", 1, [back])
    assert same(wire.came()[0].arrays[0], there)
    got: list[Any] = []
    wire.until(lambda: got.extend(wire.a.drain_arrivals()) or got)
    assert same(got[0].arrays[0], back)


def test_what_is_expected_before_the_link_stands_here_waits_for_it(made: Callable[..., Wire]) -> None:
    wire = made()
    one = state()
    wire.a.offer("b")
    wire.until(lambda: wire.b.expects("a"))
    wire.b.expect("a", 1, kinds(one))
    wire.until(lambda: wire.a.carries("b", 1))
    wire.a.send("b", 1, [one])
    assert same(wire.came()[0].arrays[0], one)


def test_a_tensor_that_never_comes_ends_the_link_within_its_limit_and_both_ends_know(made: Callable[..., Wire]) -> None:
    wire = made(SHORT, (Faulty(swallows=(4,)), Gloo()))
    wire.link()
    one, begin = state(), time.monotonic()
    for ticket in (1, 2, 3):
        go(wire, ticket, one)
    came = sorted(wire.came(3), key=lambda each: each.ticket)
    assert [bool(each.error) for each in came] == [False, True, True] and time.monotonic() - begin < LIMIT
    assert not came[1].arrays
    wire.until(lambda: not wire.a.carries("b", 1))
    assert "the other end" in wire.a.state()["b"]
    wire.b.expect("a", 9, kinds(one))  # announced before the sender noticed
    assert wire.came()[0].error
    wire.a.offer("b")
    assert not wire.a.carries("b", 1)  # one failure is enough


def test_a_link_that_is_not_made_in_time_is_over_on_both_sides(made: Callable[..., Wire]) -> None:
    wire = made(DirectConfig(connect_timeout_s=0.5), (Gloo(), Faulty(delay=1.5)))
    wire.a.offer("b")
    wire.until(lambda: "in time" in wire.a.state()["b"] or "over" in wire.a.state()["b"], 5.0)
    wire.until(lambda: {name for name, _, _ in wire.over} == {"a", "b"}, 5.0)


def test_an_end_that_nobody_answers_gives_up(made: Callable[..., Wire]) -> None:
    wire = made(DirectConfig(connect_timeout_s=0.3))
    wire.changes = lambda who, said: None
    wire.a.offer("b")
    wire.until(lambda: "in time" in wire.a.state()["b"], 5.0)


def test_somebody_else_at_the_other_end_is_not_believed(made: Callable[..., Wire]) -> None:
    wire = made(SHORT)

    def forged(who: str, said: Any) -> Any:
        return said if said.key != "token" or who == "a" else type(said)(said.peer, said.outgoing, said.key, bytes(32))

    wire.changes = forged
    wire.a.offer("b")
    wire.until(lambda: any("somebody else" in reason for _, _, reason in wire.over))
    assert not wire.a.carries("b", 1)


def test_a_token_that_is_none_is_refused(made: Callable[..., Wire]) -> None:
    wire = made(SHORT)
    wire.changes = lambda who, said: (
        type(said)(said.peer, said.outgoing, said.key, b"") if said.key == "token" else said
    )
    wire.a.offer("b")
    wire.until(lambda: any("no token" in reason for _, _, reason in wire.over))


def test_a_life_that_is_over_is_forgotten_and_the_next_one_gets_a_link_of_its_own(made: Callable[..., Wire]) -> None:
    wire = made(SHORT)
    wire.link()
    one = state()
    wire.b.expect("a", 1, kinds(one))  # never sent
    wire.b.remove_peer("a")
    wire.a.remove_peer("b")
    assert wire.b.drain_arrivals() == [] and not wire.b.expects("a") and wire.a.state() == {}
    wire.a.drain_notices(), wire.b.drain_notices()
    wire.link()
    go(wire, 1, one)
    assert same(wire.came()[0].arrays[0], one)
    time.sleep(0.7)  # the limit of the former incarnation
    assert wire.b.drain_arrivals() == [] and wire.a.carries("b", 1)


def test_kept_rows_are_joined_where_they_lie(made: Callable[..., Wire]) -> None:
    wire = made()
    one, other = state(1, 4), state(2, 4)
    joined = wire.a.joined([(one, 1, 3), (other, 0, 4)])
    assert joined.shape == (6, 8) and torch.equal(joined.data, torch.cat([one.data[32:96], other.data]))
    hosted = wire.a.hosted(joined)
    assert isinstance(hosted.data, memoryview) and bytes(hosted.data) == bytes(joined.data.tolist())


#: One end of a link in a process of its own. It exchanges lines of (outgoing, key, value), and either sends one large
#: tensor or does not receive one.
_CHILD = """
import sys, json, threading, time, torch
from runtime.config import DirectConfig
from runtime.engine.tensors.links import DirectLinks
from runtime.engine.tensors.process_groups import Gloo
from runtime.engine.tensors.convert import staying
sends, nbytes = sys.argv[1] == "sends", int(sys.argv[2])
links = DirectLinks(Gloo(), DirectConfig())
links.begin(lambda: None)
def hear():
    for line in sys.stdin:
        outgoing, key, value = json.loads(line)
        links.handle_rendezvous("p", outgoing, key, bytes.fromhex(value))
threading.Thread(target=hear, daemon=True).start()
if sends:
    links.offer("p")
begun = False
while True:
    for said in links.drain_notices():
        print(json.dumps([said.outgoing, said.key, said.value.hex()]), flush=True)
    if sends and not begun and links.carries("p", nbytes):
        links.send("p", 1, [staying(torch.zeros(1, nbytes, dtype=torch.uint8))])
        begun = True
    time.sleep(0.001)
"""


@pytest.mark.parametrize("what", ["sends", "takes"])
def test_a_peer_that_is_killed_in_the_middle_of_a_transfer_is_noticed_at_once(
    made: Callable[..., Wire], what: str
) -> None:
    """A killed peer is noticed long before any limit.

    Half a gigabyte takes some tenths of a second. Gloo reports a peer that died while sending, or before it received
    anything. A peer that dies while receiving is reported by the cluster, which then removes the link.
    """
    import json
    import threading

    nbytes = 512 << 20
    links, large = made().b, staying(torch.zeros(1, nbytes, dtype=torch.uint8))
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, what, str(nbytes)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdin is not None and child.stdout is not None

        def hear() -> None:
            for line in child.stdout or ():
                outgoing, key, value = json.loads(line)
                links.handle_rendezvous("p", not outgoing, key, bytes.fromhex(value))

        threading.Thread(target=hear, daemon=True).start()

        def tell() -> None:
            for said in links.drain_notices():
                child.stdin.write(json.dumps([not said.outgoing, said.key, said.value.hex()]) + "\n")  # type: ignore[union-attr]
                child.stdin.flush()  # type: ignore[union-attr]

        end = time.monotonic() + 60.0
        if what == "takes":
            links.offer("p")
        while not (links.carries("p", 1) if what == "takes" else links.expects("p")):
            tell()
            assert time.monotonic() < end
            time.sleep(0.001)
        if what == "takes":
            links.send("p", 1, [large])
        else:
            links.expect("p", 1, [Array("uint8", (1, nbytes), None)])
            while links._incoming["p"].state != "direct":
                tell()
                assert time.monotonic() < end
                time.sleep(0.001)
        time.sleep(0.02)
        os.kill(child.pid, signal.SIGSTOP)  # it makes no further progress
        time.sleep(0.1)
        os.kill(child.pid, signal.SIGKILL)
        killed = time.monotonic()
        if what == "takes":
            while links.carries("p", 1) or links.state()["p"] == "direct":
                assert time.monotonic() < killed + LIMIT
                time.sleep(0.001)
        else:
            got: list[Any] = []
            while not got:
                got = links.drain_arrivals()
                assert time.monotonic() < killed + LIMIT
                time.sleep(0.001)
            assert got[0].error and not got[0].arrays
    finally:
        child.kill()
        child.wait(10)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


# -- NCCL, as far as it can be tested without a GPU -------------------------------------------------------------------


class _Work:
    """Stands for NCCL's work object: it is completed after so many looks."""

    def __init__(self, looks: int, error: Exception | None = None) -> None:
        self.looks, self.error = looks, error

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def exception(self) -> Exception | None:
        return self.error


def test_nccls_work_is_looked_at_until_it_is_there_or_late() -> None:
    process_group = Nccl.__new__(Nccl)
    process_group.arrived(_Work(3), 5.0)
    with pytest.raises(RuntimeError, match="broken"):
        process_group.arrived(_Work(0, ValueError("broken")), 5.0)
    begin = time.monotonic()
    with pytest.raises(TimeoutError):
        process_group.arrived(_Work(1 << 40), 0.05)
    assert time.monotonic() - begin < 2.0


def test_where_torch_has_no_such_transport_it_is_said() -> None:
    assert isinstance(rail_for(torch.device("cpu"), ""), Gloo)
    with pytest.raises(NotServable, match="host's memory"):
        rail_for(torch.device("meta"), "")
    if not torch.distributed.is_nccl_available():
        with pytest.raises(NotServable, match="NCCL"):
            rail_for(torch.device("cuda", 0), "")


def test_only_ends_of_one_kind_and_reach_can_be_linked() -> None:
    assert Gloo().name == Gloo().name != Gloo("127.0.0.1").name == Gloo("10.0.0.1").name
