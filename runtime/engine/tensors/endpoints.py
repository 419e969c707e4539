"""The two ends of one direct link, each with a thread that makes the group and then waits for what was begun on it.

    Outgoing     making -> ready: send …      over            IncomingTensors     making -> ready: expect … came
                                                                                  over

Contract: `begin` first. What is called from outside does not wait. A link that stands was proven: each end has made
a token, told it by the cluster's own messages, and got it back over the link, so at the other end is who was spoken
with. Then one sends and the other receives, in order; a tensor is kept until it has gone, or come. Whatever fails,
or takes longer than its limit, ends the link, once, with a reason: what was under way is given up, and what comes
in spite of that is dropped.
"""

from __future__ import annotations

import hmac
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from runtime.config import DirectConfig
from runtime.engine.tensors.process_groups import ProcessGroup
from runtime.engine.tensors.rendezvous import Rendezvous

_TOKEN_BYTES = 32
#: Tags of tokens; tickets begin behind them.
_THERE, _BACK, _FIRST = 0, 1, 2
#: Keys under which tokens are told; the store's own begin with its name.
_TOKEN, _STORE = "token", "store/"
#: How long what was sent is left alone while there is room, in seconds: a look at once would take the processor, and
#: the interpreter, from the loop, which has just sent it and goes on, for nothing but to let its memory go.
_LATER = 0.02
#: What is said of an error.
_SAID = 200

#: Tells the other end a key.
Tell = Callable[[str, bytes], None]


class _End:
    """What both have. `ended`: is called once, with the reason, unless it was closed; on any thread."""

    def __init__(
        self,
        process_group: ProcessGroup,
        config: DirectConfig,
        rank: int,
        tell: Tell,
        ended: Callable[[str], None],
        name: str,
    ) -> None:
        self._process_group, self._config, self._rank, self._tell, self._ended = (
            process_group,
            config,
            rank,
            tell,
            ended,
        )
        self._store = Rendezvous(lambda key, value: tell(_STORE + key, value), config.connect_timeout_s)
        self._token = secrets.token_bytes(_TOKEN_BYTES)
        self._lock = threading.Lock()
        self._group: Any = None
        self._ready = False
        self._over = ""
        self._thread = threading.Thread(target=self._run, name=f"zoo-direct-{name}", daemon=True)

    @property
    def state(self) -> str:
        return self._over or ("direct" if self._ready else "making")

    def begin(self) -> None:
        self._tell(_TOKEN, self._token)
        self._thread.start()

    def handle_rendezvous(self, key: str, value: bytes) -> None:
        """The other end has told this."""
        if key == _TOKEN or key.startswith(_STORE):
            self._store.learn(key.removeprefix(_STORE) if key != _TOKEN else "/" + _TOKEN, value)

    def end(self, reason: str) -> None:
        """It is over. From any thread; again: nothing to do."""
        with self._lock:
            if self._over:
                return
            self._over, self._ready = reason, False
            group, self._group = self._group, None
        self._store.end(reason)
        self._give_up(reason)
        self._ended(reason)
        if group is not None:
            self._process_group.abort(group)

    def join(self, seconds: float) -> None:
        """Behind `end`."""
        self._thread.join(seconds)

    # -- on its thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            group = self._make()
            with self._lock:
                if self._over:
                    return
                self._group, self._ready = group, True
            del group
            self._stands()
            self._work()
        except Exception as error:
            self.end(_words(error))

    def _make(self) -> Any:
        """A group whose other end has proven who it is."""
        process_group, seconds = self._process_group, self._config.connect_timeout_s
        group = process_group.group(self._store, self._rank, seconds)
        expected = self._store.get("/" + _TOKEN)
        theirs = process_group.empty(_TOKEN_BYTES)
        own = theirs.new_tensor(list(self._token_of(expected)), dtype=torch.uint8)
        other = 1 - self._rank
        if self._rank == 0:
            sent = process_group.send(group, own, _THERE, other)
            process_group.arrived(process_group.receive(group, theirs, _BACK, other), seconds)
            process_group.arrived(sent, seconds)
        else:
            process_group.arrived(process_group.receive(group, theirs, _THERE, other), seconds)
            self._verify(theirs)
            process_group.arrived(process_group.send(group, own, _BACK, other), seconds)
        self._verify(theirs)
        return group

    def _token_of(self, told: bytes) -> bytes:
        """What the other end is to be shown: its own token. Raises RuntimeError for one that is none."""
        if len(told) != _TOKEN_BYTES:
            raise RuntimeError("the other end gave no token")
        return told

    def _verify(self, shown: Tensor) -> None:
        if not hmac.compare_digest(bytes(shown.tolist()), self._token):
            raise RuntimeError("somebody else is at the other end")

    def _stands(self) -> None:
        """The group is there, and whoever is outside may use it."""

    def _work(self) -> None:
        """Until it is over."""
        raise NotImplementedError

    def _give_up(self, reason: str) -> None:
        """What was under way."""
        raise NotImplementedError


class OutgoingTensors(_End):
    """The end that sends. Tensors are flat, of uint8."""

    def __init__(
        self, process_group: ProcessGroup, config: DirectConfig, tell: Tell, ended: Callable[[str], None], name: str
    ) -> None:
        super().__init__(process_group, config, 0, tell, ended, f"to-{name}")
        self._under_way: queue.SimpleQueue[tuple[Any, Tensor] | None] = queue.SimpleQueue()
        self._nbytes = 0

    def carries(self, nbytes: int) -> bool:
        """Whether it stands, and has room. (What is larger than the room goes when nothing else is under way.)"""
        return self._ready and (self._nbytes + nbytes <= self._config.max_inflight_bytes or not self._nbytes)

    def send(self, tensor: Tensor, ticket: int) -> None:
        """The link is over if it fails."""
        with self._lock:
            group = self._group
            self._nbytes += tensor.numel()
        if group is None:
            return
        try:
            self._under_way.put((self._process_group.send(group, tensor, _FIRST + ticket), tensor))
        except Exception as error:
            self.end(_words(error))

    def _work(self) -> None:
        while (one := self._under_way.get()) is not None:
            if self._nbytes < self._config.max_inflight_bytes // 4:
                time.sleep(_LATER)
            work, tensor = one
            self._process_group.arrived(work, self._config.send_timeout_s)
            with self._lock:
                self._nbytes -= tensor.numel()
            del one, work, tensor

    def _give_up(self, reason: str) -> None:
        """The thread may be at one of them until its limit; the others go now."""
        with suppress(queue.Empty):
            while True:
                self._under_way.get_nowait()
        self._under_way.put(None)


@dataclass(slots=True)
class _Awaited:
    """`work`: None until it has been begun."""

    ticket: int
    nbytes: int
    tensor: Tensor | None = None
    work: Any = None


class IncomingTensors(_End):
    """The end that receives. `came`: is called once for each ticket that is expected, with the tensor or why there is
    none, on any thread."""

    def __init__(
        self,
        process_group: ProcessGroup,
        config: DirectConfig,
        tell: Tell,
        ended: Callable[[str], None],
        came: Callable[[int, Tensor | None, str], None],
        name: str,
    ) -> None:
        super().__init__(process_group, config, 1, tell, ended, f"from-{name}")
        self._came = came
        self._awaited: deque[_Awaited] = deque()
        self._begun = 0  # of those awaited: their receives have been begun
        self._bytes = 0  # of these
        self._changed = threading.Condition(self._lock)

    def expect(self, ticket: int, nbytes: int) -> None:
        with self._changed:
            over = self._over
            if not over:
                self._awaited.append(_Awaited(ticket, nbytes))
        if over:
            self._came(ticket, None, over)
            return
        self._try_to_begin()
        with self._changed:
            self._changed.notify_all()

    def _try_to_begin(self) -> None:
        try:
            with self._lock:
                self._begin_some()
        except Exception as error:
            self.end(_words(error))

    def _begin_some(self) -> None:
        """Begin receives, in order, as long as there is room for their bytes. The lock is held."""
        while self._group is not None and self._begun < len(self._awaited):
            one = self._awaited[self._begun]
            if self._bytes and self._bytes + one.nbytes > self._config.max_inflight_bytes:
                return
            one.tensor = self._process_group.empty(one.nbytes)
            one.work = self._process_group.receive(self._group, one.tensor, _FIRST + one.ticket)
            self._begun += 1
            self._bytes += one.nbytes

    def _stands(self) -> None:
        self._try_to_begin()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._over or self._begun)
                if self._over:
                    return
                one = self._awaited[0]
            self._process_group.arrived(one.work, self._config.receive_timeout_s)
            with self._changed:
                if self._over:
                    return
                self._awaited.popleft()
                self._begun -= 1
                self._bytes -= one.nbytes
            self._came(one.ticket, one.tensor, "")
            del one
            self._try_to_begin()

    def _give_up(self, reason: str) -> None:
        with self._changed:
            lost = list(self._awaited)
            self._awaited.clear()
            self._begun = self._bytes = 0
            self._changed.notify_all()
        for one in lost:
            self._came(one.ticket, None, reason)


def _words(error: Exception) -> str:
    """What is said of an error: its last line, which of torch's is what happened, and no path of theirs."""
    said = str(error).strip().split("] ", 1)[-1].splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:_SAID]
