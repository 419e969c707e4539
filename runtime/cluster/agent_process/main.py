"""The main program of an agent's process, but for the table of engines, which whoever starts it passes in
(`cli.serving.agent_engines`).

    standard input     line 1: what engine it will be (`Preparation`); all is imported then.    line 2: who it is
                       (`Identity`); it joins.
                       Nothing else comes; when it ends, the parent has gone, and so does this process, whatever it
                       is doing.
    standard output    {"warm": true} behind line 1; {"code": …, "reason": …} at the end. What prints goes to standard
                       error.

So a process can stand by, warm, until it is told who it is. Secrets come over the pipe: never in arguments,
environments or files. SIGTERM ends it after the step under way; the exit code is `ended.Exit`.
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
from runtime.cluster.errors import public
from runtime.cluster.version import own_version
from runtime.config import AgentConfig, DirectConfig
from runtime.messages import SCHEDULER
from runtime.transport.interfaces import Connectable, TensorTransport
from runtime.transport.keys import Keys
from runtime.transport.messenger import Messenger
from runtime.transport.tensor_link import TensorLink
from zoo.errors import NotServable

_log = logging.getLogger(__name__)

#: Makes an engine, once all it needs is imported. Raises zoo.errors.ZooError, EngineLost.
MakeEngine = Callable[[], StageEngine]
#: Kinds of engines: imports what a kind needs, and gives back what makes one from these settings.
Engines = Mapping[str, Callable[[Mapping[str, Any]], MakeEngine]]

_MAX_LINE = 64 << 20
_PR_SET_PDEATHSIG = 1


class Preparation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line 1. `engine`: a kind of the table; `settings`: its own."""

    engine: str
    settings: dict[str, Any] = {}


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Line 2. `scheduler`: its address; `bind`: where other agents reach this one. `keys`: (public, secret), for
    tcp.
    """

    device: str
    incarnation: int
    scheduler: str
    bind: str
    settings: AgentSettings
    agent: AgentConfig
    keys: tuple[str, str] | None = None
    beat_seconds: float = 0.5


class Word(msgspec.Struct, frozen=True, omit_defaults=True):
    """A line of standard output."""

    warm: bool = False
    code: int | None = None
    reason: str = ""


def main(engines: Engines) -> int:
    """Be an agent; returns the exit code."""
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
    """An agent on this thread, until it ends. `context`: where the scheduler is in this process. `begun`: is given what
    can be stopped.
    """
    keys = None if identity.keys is None else Keys(*identity.keys)
    try:
        engine = make()
        direct = _direct(engine, identity.settings.direct, identity.bind)
    except Exception as error:
        _log.critical("the engine cannot be made", exc_info=True)
        return AgentEnded(AgentExit.LOST, f"the engine cannot be made: {public(error)}")
    ahead = looks_ahead(engine) and not identity.settings.own_lane
    agent = Agent(
        identity.device, engine.page_capacity, identity.agent, engine.alike, lacks=engine.lacks, looks_ahead=ahead
    )
    try:
        messenger = Messenger(identity.device, identity.incarnation, identity.bind, keys, context=context)
        heart = Messenger(identity.device, identity.incarnation, keys=keys, context=context, purpose="beat")
        for each in (messenger, heart):
            each.learn(SCHEDULER, 0, identity.scheduler, calls=False)
    except (ValueError, zmq.ZMQError) as error:
        return AgentEnded(AgentExit.LOST, f"it cannot listen: {error}")
    directed = None if direct is None else TensorLink(identity.device, messenger, direct)
    loop, over = (
        AgentLoop(engine, agent, messenger, identity.settings, own_version(), directed=directed),
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
        heart.close()
        messenger.close()


def _direct(engine: StageEngine, config: DirectConfig | None, bind: str) -> TensorTransport | None:
    """What tensors go directly by, if they do. Raises NotServable where tensors are to go directly, and cannot."""
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
    )  # Ctrl-C goes to all of a terminal's processes: the parent drains and then ends us


def _say(words: BinaryIO, word: Word) -> None:
    try:
        words.write(msgspec.json.encode(word) + b"\n")
        words.flush()
    except OSError:  # nobody listens any more
        pass


def _watch(line: int) -> None:
    """Until the parent has gone, however it went: then nobody needs this process, and what it holds is others'
    memory.
    """
    while os.read(line, 4096):  # not through the buffer, whose lock would be held while the interpreter ends
        pass
    os._exit(int(AgentExit.ORPHANED))


def _die_with_parent() -> None:
    """Where there is Linux, also while this interpreter is stuck: the kernel sends SIGKILL when the thread that started
    us ends.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
