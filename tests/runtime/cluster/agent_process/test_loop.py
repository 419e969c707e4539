"""The loop of an agent with the real state machine, over one and two agents.

Covers sequences, page transfers, faults, forged messages, and all ways to end.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from msgspec import structs

from runtime.chains import Array, Hop, Stage, StageResult
from runtime.chains import Path as Hops
from runtime.cluster.agent_process import main as agent_main
from runtime.cluster.agent_process.commands import CommandExecutor
from runtime.cluster.agent_process.exit_status import AgentExit
from runtime.control.agent_io import PagesWritten, WritePages
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import expected
from runtime.messages import (
    SCHEDULER,
    CloseSequences,
    FinishMigration,
    LoadStages,
    MigrationFailed,
    MigrationReady,
    OpenSequences,
    PeerDisconnected,
    PeerDown,
    PeerList,
    Rejected,
    RowsDone,
    RowsLost,
    RunRows,
    Shutdown,
    StageLoadFailed,
    StageReady,
    StartMigration,
)
from runtime.transport.checksums import digest_of
from runtime.transport.keys import Keys
from runtime.transport.messenger import Messenger
from runtime.types import EngineLost, SamplingParams, SequenceRequest, StepPlan
from tests.runtime.cluster.agent_programs import LIMIT, MODEL, End, counting, identity, process, said, tell, threads

LENGTH = len(MODEL.parts)
GREEDY = SamplingParams(8, ignore_eos=True)


def hop(device: str, lo: int, hi: int) -> Hop:
    attends = [part.attends for part in MODEL.parts]
    return Hop(device, lo, hi, (sum(attends[:lo]), sum(attends[:hi])))


def request(seq: str, *prompt: int) -> SequenceRequest:
    return SequenceRequest(seq, f"r-{seq}", MODEL.spec.name, prompt, GREEDY)


def provide(end: End, path: Hops) -> None:
    for hop in path:
        end.messenger.send(hop.device, LoadStages((Stage(MODEL.spec.name, hop.lo, hop.hi),), (("b",),)))
    for _ in path:
        end.next(StageReady)


def opened(
    end: End,
    one: SequenceRequest,
    path: Hops,
    epoch: int = 1,
    output: tuple[int, ...] = (),
    keep: bool = False,
    computed: int = 0,
) -> None:
    for device in {hop.device for hop in path}:
        end.messenger.send(
            device, OpenSequences((epoch,), (one,), (output,), (path,), (keep,), (computed if keep else 0,), (None,))
        )


def go(
    end: End, one: SequenceRequest, path: Hops, start: int, tokens: tuple[int, ...], generated: int, epoch: int = 1
) -> int:
    end.messenger.send(
        path[0].device, RunRows((one.seq,), (epoch,), (start,), (len(tokens),), tokens, (True,), (generated,), (1,))
    )  # fmt: skip
    done = end.next(RowsDone)
    assert done.seqs == (one.seq,) and done.counts == (len(tokens),)
    assert done.sampled[0] is not None
    return done.sampled[0].token


def decode(end: End, one: SequenceRequest, path: Hops, count: int, tokens: list[int], epoch: int = 1) -> None:
    """Add tokens to those of the sequence (prompt included), all but the last of which have run."""
    for _ in range(count):
        generated = len(tokens) - len(one.prompt)
        first = not generated
        start = 0 if first else len(tokens) - 1
        tokens.append(go(end, one, path, start, tuple(tokens[start:]), generated, epoch))


@pytest.mark.parametrize(
    "path",
    [
        (hop("a", 0, LENGTH),),
        (hop("a", 0, 2), hop("b", 2, LENGTH)),
        (hop("a", 0, 1), hop("b", 1, 3), hop("a", 3, LENGTH)),
        (hop("a", 0, 2), hop("a", 2, LENGTH)),
    ],
)
def test_a_sequence_gets_its_tokens_whichever_agents_it_passes(path: Hops) -> None:
    one = request("s", 5, 6, 7, 8, 9)
    with threads("a", "b") as (end, _):
        end.welcome("a", "b")
        provide(end, path)
        opened(end, one, path)
        tokens = list(one.prompt)
        decode(end, one, path, 8, tokens)
        assert tokens[5:] == expected(MODEL, one.prompt, GREEDY)
        for name in ("a", "b"):
            end.messenger.send(name, CloseSequences(("s",), (1,)))
        end.until(lambda: all(name in end.reports and end.reports[name].pages_free == 200 for name in ("a", "b")))
        assert not end.cuts


@pytest.mark.parametrize("copy", [True, False])
def test_pages_move_and_the_sequence_goes_on(copy: bool) -> None:
    one, whole = request("s", *range(1, 30)), (hop("a", 0, LENGTH),)
    there = (hop("b", 0, LENGTH),)
    with threads("a", "b") as (end, _):
        end.welcome("a", "b")
        provide(end, whole)
        provide(end, there)
        opened(end, one, whole)
        tokens = list(one.prompt)
        decode(end, one, whole, 3, tokens)
        upto = len(tokens) - 1
        first = () if copy else tuple(tokens[:upto])
        end.messenger.send(
            "b",
            StartMigration(
                1,
                "s",
                1,
                Stage(MODEL.spec.name, 0, LENGTH),
                (0, 2),
                MODEL.spec.page_tokens,
                "a",
                upto,
                first,
                copy,
                one,
            ),
        )
        moved = end.next(MigrationReady)
        assert sum(hi - lo for lo, hi in moved.copied + moved.recomputed) >= upto - MODEL.spec.page_tokens
        assert bool(moved.copied) == copy and bool(moved.recomputed) == (not copy)
        end.messenger.send("b", FinishMigration(1, "s", 2, True))
        opened(end, one, there, 2, tuple(tokens[29:]), keep=True, computed=upto)
        end.messenger.send("a", CloseSequences(("s",), (1,)))
        decode(end, one, there, 5, tokens, 2)
        assert tokens[29:] == expected(MODEL, one.prompt, GREEDY)


def test_pages_that_do_not_verify_are_not_written() -> None:
    class Forger(IntegerEngine):
        written = 0

        def write_pages(self, pages: Any, data: Array) -> None:
            self.written += 1
            super().write_pages(pages, data)

    engine = Forger([MODEL], 10)
    with threads("a") as (_, agents):
        executor = CommandExecutor(engine, agents["a"].loop._messenger)
    pages = Array("uint8", (1, 64), bytes(64))
    good = WritePages((3,), pages, digest_of(pages), 1, 0, 4, (0, 2))
    assert executor.do(good) == PagesWritten(1, 0, 4, (0, 2)) and engine.written == 1
    for bad in (replace(good, digest=""), replace(good, data=structs.replace(pages, data=b"\1" + bytes(63)))):
        event = executor.do(bad)
        assert isinstance(event, PagesWritten) and "do not verify" in event.error
    assert engine.written == 1
    short = Array("uint8", (1, 32), bytes(32))
    event = executor.do(WritePages((3,), short, digest_of(short), 1, 0, 4, (0, 2)))
    assert isinstance(event, PagesWritten) and "do not fit" in event.error


def test_a_stage_that_cannot_be_loaded_is_refused_with_the_reason() -> None:
    with threads("a") as (end, _):
        end.welcome("a")
        end.messenger.send("a", LoadStages((Stage("org/none", 0, 1), Stage(MODEL.spec.name, 0, 9)), (("b",), ("b",))))
        assert "no model named" in end.next(StageLoadFailed).reason
        assert "4 components" in end.next(StageLoadFailed).reason


def test_a_failed_step_loses_its_rows_and_others_go_on() -> None:
    path = (hop("a", 0, LENGTH),)
    with threads("a", engines=[IntegerEngine([MODEL], 200, fail_at=[1])]) as (end, _):
        end.welcome("a")
        provide(end, path)
        first, second = request("s", 1, 2), request("t", 3)
        opened(end, first, path)
        end.messenger.send("a", RunRows(("s",), (1,), (0,), (2,), (1, 2), (True,), (0,), (1,)))
        lost = end.next(RowsLost)
        assert lost.seqs == ("s",) and not lost.retry and lost.reason == "the engine failed: FakeFault"
        opened(end, second, path)
        tokens = [3]
        decode(end, second, path, 8, tokens)
        assert tokens[1:] == expected(MODEL, (3,), GREEDY)


def test_three_failed_steps_in_a_row_end_the_agent() -> None:
    path = (hop("a", 0, LENGTH),)
    with threads("a", engines=[IntegerEngine([MODEL], 200, fail_at=range(1, 9))]) as (end, agents):
        end.welcome("a")
        provide(end, path)
        for name in "stuv":
            opened(end, request(name, 1, 2), path)
            end.messenger.send("a", RunRows((name,), (1,), (0,), (2,), (1, 2), (True,), (0,), (1,)))
        ended = agents["a"].wait()
        assert ended.code is AgentExit.LOST and "3 steps in a row failed" in ended.reason


def test_rows_that_overtake_the_opening_of_their_sequence_wait_for_it() -> None:
    path = (hop("a", 0, 2), hop("b", 2, LENGTH))
    one = request("s", 5, 6, 7)
    with threads("a", "b") as (end, _):
        end.welcome("a", "b")
        provide(end, path)
        opening = OpenSequences((1,), (one,), ((),), (path,), (False,), (0,), (None,))
        end.messenger.send("a", opening)
        end.messenger.send("a", RunRows(("s",), (1,), (0,), (3,), (5, 6, 7), (True,), (0,), (1,)))
        end.until(lambda: "a" in end.reports and end.reports["a"].steps == 1)
        for _ in range(10):
            end.pump()
        end.messenger.send("b", opening)
        assert end.next(RowsDone).sampled[0].token == expected(MODEL, one.prompt, GREEDY)[0]  # type: ignore[union-attr]


def test_a_lost_engine_ends_the_agent() -> None:
    class Broken(IntegerEngine):
        def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
            raise EngineLost("the device fell off the bus")

    path = (hop("a", 0, LENGTH),)
    with threads("a", engines=[Broken([MODEL], 200)]) as (end, agents):
        end.welcome("a")
        provide(end, path)
        opened(end, request("s", 1), path)
        end.messenger.send("a", RunRows(("s",), (1,), (0,), (1,), (1,), (True,), (0,), (1,)))
        assert agents["a"].wait().reason == "the engine is lost: the device fell off the bus"


def test_an_agent_takes_orders_of_the_scheduler_only() -> None:
    with threads("a", "b") as (end, agents):
        end.welcome("a", "b")
        stranger = Messenger("c", 1, context=end.messenger._sockets._context)
        stranger.learn("a", 1, "inproc://a")
        stranger.send("a", Shutdown())
        items: list[Any] = []
        limit = time.monotonic() + LIMIT
        while not items and time.monotonic() < limit:
            items = stranger.receive(0.05)
        assert items[0].denied and "Shutdown is the scheduler's to send" in items[0].reason
        stranger.close()
        assert agents["a"].thread.is_alive()


def test_an_agent_that_a_peer_will_not_have_ends_and_the_scheduler_hears_of_links_that_are_cut() -> None:
    with threads("a") as (end, agents):
        peer = Messenger("b", 1, "inproc://b", context=end.messenger._sockets._context)
        end.until(lambda: "a" in end.ready)
        end.messenger.send("a", PeerList((("a", 1, "inproc://a"), ("b", 1, "inproc://b"))))
        peer.learn("a", 1, "inproc://a")
        peer.send("a", Rejected("you send nonsense"))
        ended = agents["a"].wait()
        assert ended.code is AgentExit.DENIED and ended.reason == "b: you send nonsense"
        peer.close()


def test_a_link_with_nonsense_on_it_is_told_to_the_scheduler() -> None:
    with threads("a") as (end, agents):
        end.welcome("a")
        socket = end.messenger._sockets._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, b"b/7/main")
        socket.connect("inproc://a")
        socket.send_multipart([b"nonsense, and enough of it"])
        severed = end.next(PeerDisconnected)
        assert (severed.peer, severed.incarnation) == ("b", 7) and "no message of a cluster" in severed.reason
        socket.close(0)
        assert agents["a"].thread.is_alive()


def test_the_scheduler_may_refuse_an_agent() -> None:
    with threads("a") as (end, agents):
        end.until(lambda: "a" in end.ready)
        end.messenger.send("a", Rejected("it is of version 2, the cluster of 1"))
        ended = agents["a"].wait()
        assert ended.code is AgentExit.DENIED and "version 2" in ended.reason


def test_an_agent_that_nobody_answers_ends() -> None:
    with threads("a", hello_seconds=0.1) as (_end, agents):
        ended = agents["a"].wait()
        assert ended.code is AgentExit.UNANSWERED and "did not answer" in ended.reason


# -- as processes ------------------------------------------------------------------------------------------------------


@pytest.fixture
def end(tmp_path: Path) -> Any:
    made = End(Messenger(SCHEDULER, bind=f"ipc://{tmp_path}/scheduler"))
    yield made
    made.messenger.close()


def test_a_process_stands_by_until_it_is_told_who_it_is_and_works(end: End, tmp_path: Path) -> None:
    with process(counting()) as child:
        assert said(child).warm
        tell(child, identity("a", end.messenger.address, tmp_path))
        end.welcome("a")
        path = (hop("a", 0, LENGTH),)
        one = request("s", 3, 1, 4)
        provide(end, path)
        opened(end, one, path)
        child.send_signal(signal.SIGINT)  # a terminal's Ctrl-C is the parent's to handle
        tokens = [3, 1, 4]
        decode(end, one, path, 8, tokens)
        assert tokens[3:] == expected(MODEL, one.prompt, GREEDY)
        end.until(lambda: end.beats > 2)
        child.send_signal(signal.SIGTERM)
        assert child.wait(LIMIT) == 0
        assert said(child).reason == "it was told to stop"


def test_a_process_that_is_halted_ends_well(end: End, tmp_path: Path) -> None:
    with process(counting(), identity("a", end.messenger.address, tmp_path)) as child:
        end.welcome("a")
        end.messenger.send("a", Shutdown())
        assert child.wait(LIMIT) == 0


def test_a_process_with_another_key_ends_unanswered(tmp_path: Path) -> None:
    ours, theirs = Keys.make(), Keys.make()
    messenger = Messenger(SCHEDULER, bind="tcp://127.0.0.1:*", keys=ours)
    who = identity("a", messenger.address, tmp_path, keys=(theirs.public, theirs.secret), hello_seconds=0.5)
    with process(counting(), who) as child:
        assert child.wait(LIMIT) == AgentExit.UNANSWERED
        assert said(child).warm and "another key" in said(child).reason
    messenger.close()


@pytest.mark.parametrize("line", [b"", b"{", b"[]", b'{"engine": "pickle"}', b'{"engine": "counting", "more": 1}'])
def test_a_process_that_is_told_nonsense_ends(line: bytes) -> None:
    with process(line) as child:
        assert child.wait(LIMIT) == AgentExit.DEFECT
        assert "cannot be read" in said(child).reason


def test_a_process_without_what_its_engine_needs_says_so() -> None:
    with process(b'{"engine": "counting", "settings": {"models": [], "pages": 1, "pace": "fast"}}') as child:
        assert child.wait(LIMIT) == AgentExit.DEFECT

    def missing(settings: Any) -> Any:
        raise ImportError("no module named torch, looked for in /secret/place")

    lines, words = io.BytesIO(b'{"engine": "gone"}\n'), io.BytesIO()
    ended = agent_main._main({"gone": missing}, lines, words)
    assert (ended.code, ended.reason) == (AgentExit.LOST, "what its engine needs is not there: ImportError")


def test_an_agent_that_cannot_listen_says_so() -> None:
    who = msgspec.structs.replace(identity("a", "ipc:///tmp/nobody", Path("/tmp")), bind="ipc:///no/such/folder/a")
    ended = agent_main.be(who, lambda device: IntegerEngine([MODEL], 8))
    assert ended.code == AgentExit.LOST and ended.reason.startswith("it cannot listen: No such file")


_PARENT = """
import subprocess, sys, time
command = [sys.executable, "-m", "cli.serving.agent_engines"]
child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
for line in sys.argv[1:]:
    child.stdin.write(line.encode() + b"\\n")
child.stdin.flush()
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_no_agent_outlives_its_parent(end: End, tmp_path: Path) -> None:
    lines = [
        msgspec.json.encode(line).decode() for line in (counting(), identity("a", end.messenger.address, tmp_path))
    ]
    parent = subprocess.Popen(
        [sys.executable, "-c", _PARENT, *lines],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path.cwd())},
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    end.welcome("a")
    assert alive(pid)
    parent.kill()
    parent.wait(LIMIT)
    end.until(lambda: not alive(pid))
    parent.stdout.close()


def test_moves_that_cannot_go_on_are_told(end: End) -> None:
    """The source does not exist, and the destination reports that in time."""
    one = request("s", *range(1, 20))
    with threads("b") as (inside, _):
        inside.welcome("b")
        provide(inside, (hop("b", 0, LENGTH),))
        inside.messenger.send(
            "b",
            StartMigration(
                1, "s", 1, Stage(MODEL.spec.name, 0, LENGTH), (0, 2), MODEL.spec.page_tokens, "a", 19, (), True, one
            ),
        )
        inside.messenger.send("b", PeerDown("a"))
        assert inside.next(MigrationFailed).move == 1
