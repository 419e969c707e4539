"""Run an agent in a process of its own. The caller passes in the table of engines (`cli.serving.agent_engines`).

    standard input     line 1: `Preparation`, the engine's kind and settings; everything it needs is imported then.
                       line 2: `Identity`, the device; the agent joins the cluster.
                       Nothing follows. When standard input ends, the parent is gone, and this process exits at once.
    standard output    {"warm": true} after line 1; {"code": …, "reason": …} at the end. Prints go to standard error.

So a process can stand by with everything imported until it gets a device. Secrets come over the pipe only, never in
arguments, environments or files. SIGTERM ends the process after the running step; exit codes are
`exit_status.AgentExit`.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import msgspec
import zmq

from runtime.agent.agent import Agent
from runtime.chains import StageEngine, looks_ahead
from runtime.cluster.agent_process.exit_status import AgentEnded, AgentExit
from runtime.cluster.agent_process.heartbeat import beat
from runtime.cluster.agent_process.loop import AgentLoop, AgentSettings
from runtime.cluster.agent_process.side_link import SideClient, SidePeers, SideServer, side_messengers
from runtime.cluster.errors import public
from runtime.cluster.version import own_version
from runtime.config import AgentConfig, DirectConfig
from runtime.loans import ExchangingEngine, LoanEngine
from runtime.messages import SCHEDULER
from runtime.transport.channels.seqpacket import PACKET_BYTES
from runtime.transport.interfaces import Connectable, TensorTransport
from runtime.transport.keys import Keys
from runtime.transport.messenger import Messenger
from runtime.transport.tensor_link import TensorLink
from zoo.errors import NotServable

_log = logging.getLogger(__name__)

#: Makes the engine of the device with this name, after its imports. Raises zoo.errors.ZooError, EngineLost.
MakeEngine = Callable[[str], StageEngine]
#: By kind of engine: imports what it needs and returns what makes an engine from these settings.
Engines = Mapping[str, Callable[[Mapping[str, Any]], MakeEngine]]

_MAX_LINE = 64 << 20
_PR_SET_PDEATHSIG = 1


class Preparation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line 1 of standard input.

    Fields:
        engine: A kind of engine, a key of the table.
        settings: The kind's own settings.
    """

    engine: str
    settings: dict[str, Any] = {}


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line 2 of standard input.

    Fields:
        scheduler: The scheduler's address.
        bind: Where other agents reach this one.
        keys: (public, secret), for tcp.
        environment: Variables that the agent's process sets before its engine is made, such as CUDA_VISIBLE_DEVICES.
    """

    device: str
    incarnation: int
    scheduler: str
    bind: str
    settings: AgentSettings
    agent: AgentConfig
    keys: tuple[str, str] | None = None
    beat_seconds: float = 0.5
    environment: dict[str, str] = {}


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of standard output."""

    warm: bool = False
    code: int | None = None
    reason: str = ""


def main(engines: Engines) -> int:
    """Run an agent, with standard input and output as above; return the exit code."""
    words, lines = os.fdopen(os.dup(1), "wb"), sys.stdin.buffer
    os.dup2(2, 1)
    _die_with_parent()
    ended = _main(engines, lines, words)
    _say(words, Word(code=int(ended.code), reason=ended.reason))
    return int(ended.code)


def _main(engines: Engines, lines: BinaryIO, words: BinaryIO) -> AgentEnded:
    try:
        preparation = msgspec.json.decode(lines.readline(_MAX_LINE), type=Preparation)
        make = engines[preparation.engine](preparation.settings)
        _say(words, Word(warm=True))
        line = lines.readline(_MAX_LINE)
        if not line:
            return AgentEnded(AgentExit.STOPPED, "it was not needed")
        identity = msgspec.json.decode(line, type=Identity)
        os.environ.update(identity.environment)
    except (msgspec.MsgspecError, KeyError) as error:
        return AgentEnded(AgentExit.DEFECT, f"what it was told cannot be read: {type(error).__name__}")
    except Exception as error:
        _log.critical("what the engine needs is not there", exc_info=True)
        return AgentEnded(AgentExit.LOST, f"what its engine needs is not there: {public(error)}")
    threading.Thread(target=_watch, args=(lines.fileno(),), name="zoo-parent", daemon=True).start()
    return be(identity, make, begun=_obey_signals)


def be(
    identity: Identity,
    make: MakeEngine,
    context: zmq.Context[zmq.Socket[bytes]] | None = None,
    begun: Callable[[AgentLoop], None] = lambda loop: None,
) -> AgentEnded:
    """Run an agent on this thread until it ends.

    Args:
        context: Shared with the scheduler if it is in this process.
        begun: Receives the loop before it runs, so that it can be stopped.
    """
    keys = None if identity.keys is None else Keys(*identity.keys)
    try:
        engine = make(identity.device)
        direct = _direct(engine, identity.settings.direct, identity.bind)
    except Exception as error:
        _log.critical("the engine cannot be made", exc_info=True)
        return AgentEnded(AgentExit.LOST, f"the engine cannot be made: {public(error)}")
    ahead = looks_ahead(engine) and not identity.settings.own_lane
    agent = Agent(
        identity.device,
        engine.page_capacity,
        identity.agent,
        engine.alike,
        lacks=engine.lacks,
        looks_ahead=ahead,
        page_bytes=engine.page_bytes,
        between_steps=not identity.settings.own_lane,
    )
    try:
        messenger = Messenger(identity.device, identity.incarnation, identity.bind, keys, context=context)
        heart = Messenger(identity.device, identity.incarnation, keys=keys, context=context, purpose="beat")
        for each in (messenger, heart):
            each.learn(SCHEDULER, 0, identity.scheduler, calls=False)
        sides = _sides(identity, engine, ahead or identity.settings.own_lane, keys, context)
    except (ValueError, zmq.ZMQError) as error:
        return AgentEnded(AgentExit.LOST, f"it cannot listen: {error}")
    directed = None if direct is None else TensorLink(identity.device, messenger, direct)
    loop, over = (
        AgentLoop(
            engine,
            agent,
            messenger,
            identity.settings,
            own_version(),
            directed=directed,
            side="" if sides is None else sides[0].address,
            side_peers=None if sides is None else sides[2],
            side_client=None if sides is None else sides[1],
        ),
        threading.Event(),
    )
    pulse = threading.Thread(
        target=beat, args=(heart, loop.stalled_ns, identity.beat_seconds, over.wait), name="zoo-beat", daemon=True
    )
    begun(loop)
    pulse.start()
    try:
        return loop.run()
    finally:
        over.set()
        pulse.join()
        if directed is not None:
            directed.close()
        if sides is not None:
            sides[0].close()
            sides[1].close()
        heart.close()
        messenger.close()


def _sides(
    identity: Identity, engine: StageEngine, overlaps: bool, keys: Keys | None,
    context: zmq.Context[zmq.Socket[bytes]] | None,
) -> tuple[SideServer, SideClient, SidePeers] | None:  # fmt: skip
    """Return both ends of the link over which K and V on other devices are attended to; None if there are no loans.

    `overlaps`: whether steps overlap: their engines do not wait for other devices.
    """
    seconds = identity.settings.loan_seconds
    if not seconds or overlaps or not isinstance(engine, LoanEngine):
        return None
    peers = SidePeers()
    server, client = side_messengers(identity.device, identity.incarnation, identity.bind, keys, context)
    exchange = None
    if identity.settings.loan_native and isinstance(engine, ExchangingEngine):
        exchange = engine.exchange_packets(PACKET_BYTES)
    asks = SideClient(client, peers, seconds, None if exchange is None else exchange.receiver)
    engine.borrow(asks, identity.settings.loan_shipping)
    return SideServer(engine, server, peers, None if exchange is None else exchange.known), asks, peers


def _direct(engine: StageEngine, config: DirectConfig | None, bind: str) -> TensorTransport | None:
    """Return the transport for tensors between devices; None if they go through host memory.

    Raises NotServable if they are to go directly and cannot.
    """
    if config is None:
        return None
    if not isinstance(engine, Connectable):
        raise NotServable(f"the tensors of a {type(engine).__name__} go by the host's memory only")
    network = config.network and bind.startswith("tcp://")
    return engine.direct(config, bind.removeprefix("tcp://").rpartition(":")[0].strip("[]") if network else "")


def _obey_signals(loop: AgentLoop) -> None:
    signal.signal(signal.SIGTERM, lambda *_: loop.stop())
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches all processes of a terminal: the parent drains and then ends this one


def _say(words: BinaryIO, word: Word) -> None:
    try:
        words.write(msgspec.json.encode(word) + b"\n")
        words.flush()
    except OSError:  # the parent is gone
        pass


def _watch(line: int) -> None:
    """Exit as soon as the parent is gone, to free the memory that this process holds."""
    while os.read(line, 4096):  # not through the buffer: its lock would be held while the interpreter ends
        pass
    os._exit(int(AgentExit.ORPHANED))


def _die_with_parent() -> None:
    """Have the kernel send SIGKILL when the thread that started this process ends (Linux only).

    Works also while the interpreter is stuck.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
