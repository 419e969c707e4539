"""The two ends of one direct link, each with a thread that makes the group and then waits for transfers.

    OutgoingTensors     making -> ready: send …      over
    IncomingTensors     making -> ready: expect … came      over

Contract: call `begin` first. Only `join` waits. A ready link is authenticated: each end has made a token, sent it in a
message of the cluster, and received it back over the link. Then one end sends and the other receives, in order.
A tensor is kept until it has been sent or has arrived. Any failure or timeout ends the link, once, with a reason:
transfers under way are given up, and data that arrives later is dropped.
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
#: Tags of the two token transfers, and the first tag of tickets.
_THERE, _BACK, _FIRST = 0, 1, 2
#: Key of the token, and prefix of the store's own keys.
_TOKEN, _STORE = "token", "store/"
#: Seconds after which a completed send is checked while there is room. Checking at once would take the CPU and the
#: interpreter lock from the agent's loop, which has just sent it, only to free the tensor earlier.
_LATER = 0.02
#: Maximum length of an error text, in characters.
_SAID = 200

#: Sends a rendezvous key and its value to the other end.
Tell = Callable[[str, bytes], None]


class _End:
    """The common part of both ends.

    `tell` sends a rendezvous key to the other end. `ended` is called once with the reason, on any thread.
    """

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
        """Store a rendezvous key that the other end has sent."""
        if key == _TOKEN or key.startswith(_STORE):
            self._store.learn(key.removeprefix(_STORE) if key != _TOKEN else "/" + _TOKEN, value)

    def end(self, reason: str) -> None:
        """End the link. Any thread may call it; further calls do nothing."""
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
        """Wait for the thread; call it after `end`."""
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
        """Make the group and exchange tokens over it. Raises RuntimeError if the other end shows a wrong token."""
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
        """Return the token that the other end must receive back. Raises RuntimeError if it has the wrong length."""
        if len(told) != _TOKEN_BYTES:
            raise RuntimeError("the other end gave no token")
        return told

    def _verify(self, shown: Tensor) -> None:
        if not hmac.compare_digest(bytes(shown.tolist()), self._token):
            raise RuntimeError("somebody else is at the other end")

    def _stands(self) -> None:
        """React to the group being ready for use."""

    def _work(self) -> None:
        """Wait for transfers until the link ends."""
        raise NotImplementedError

    def _give_up(self, reason: str) -> None:
        """Drop the transfers under way."""
        raise NotImplementedError


class OutgoingTensors(_End):
    """The sending end. Tensors are flat and of uint8."""

    def __init__(
        self, process_group: ProcessGroup, config: DirectConfig, tell: Tell, ended: Callable[[str], None], name: str
    ) -> None:
        super().__init__(process_group, config, 0, tell, ended, f"to-{name}")
        self._under_way: queue.SimpleQueue[tuple[Any, Tensor] | None] = queue.SimpleQueue()
        self._nbytes = 0

    def carries(self, nbytes: int) -> bool:
        """Return whether the link is ready and has room for `nbytes` bytes.

        A tensor larger than the limit is accepted when no other one is under way.
        """
        return self._ready and (self._nbytes + nbytes <= self._config.max_inflight_bytes or not self._nbytes)

    def send(self, tensor: Tensor, ticket: int) -> None:
        """Begin to send a tensor. A failure ends the link."""
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
        """Drop the queued transfers; the thread may still wait for one of them until its limit."""
        with suppress(queue.Empty):
            while True:
                self._under_way.get_nowait()
        self._under_way.put(None)


@dataclass(slots=True)
class _Awaited:
    """An expected tensor. `tensor` and `work` are None until its receive has begun."""

    ticket: int
    nbytes: int
    tensor: Tensor | None = None
    work: Any = None


class IncomingTensors(_End):
    """The receiving end.

    `came` is called once for each expected ticket, with the tensor or with the reason why it does not arrive, on any
    thread.
    """

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
        self._begun = 0  # number of awaited tensors with a receive under way
        self._bytes = 0  # their bytes
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
        """Begin receives in order, as long as there is room for their bytes. The caller holds the lock."""
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
    """Return a short text for an error, without the file path that torch puts in front."""
    said = str(error).strip().split("] ", 1)[-1].splitlines()
    return f"{type(error).__name__}: {said[0] if said else ''}"[:_SAID]
