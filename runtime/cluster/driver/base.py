"""Accept requests for a driver: open streams, and refuse requests with a reason while the driver drains or is dead.

`BaseDriver` holds the streams; subclasses implement `_submit`, `abort` and the rest. The condition `_changed` guards
its state and that of subclasses, and is notified whenever a sequence has ended.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from types import TracebackType
from typing import Self

from runtime.cluster.streams.router import StreamRouter
from runtime.cluster.streams.streams import Inbox, Sink, Stream
from runtime.types import SequenceRequest, TokenEvent
from zoo.errors import Unavailable


class BaseDriver(ABC):
    """Base of drivers. Every method may be called from any thread. `what`: its name in messages to clients."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._routes = StreamRouter()
        self._draining = False
        self._death: str | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def open_stream(self, requests: Sequence[SequenceRequest]) -> Stream:
        """Submit sequences and return the stream of their events, refusals included. Call it on a running event loop.

        Raises Unavailable while draining or dead; ValueError if two sequences have one name.
        """
        stream = Stream((one.seq for one in requests), asyncio.get_running_loop(), self.abort)
        stream.push(self._submit(requests, stream))
        return stream

    def run(self, requests: Sequence[SequenceRequest]) -> Generator[TokenEvent, None, None]:
        """Submit sequences at once and iterate over their events in this thread.

        Closing the generator early aborts them. Raises as `open_stream`.
        """
        inbox = Inbox((one.seq for one in requests), self.abort)
        inbox.push(self._submit(requests, inbox))
        return inbox.drain()

    @abstractmethod
    def abort(self, seqs: Iterable[str]) -> None:
        """End sequences; those that have ended already are ignored."""

    @abstractmethod
    def _submit(self, requests: Sequence[SequenceRequest], sink: Sink) -> list[TokenEvent]:
        """Pass on all of these sequences or none; return the events of those that are refused at once."""

    # -- state ---------------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once the driver's loop has ended, for whatever reason."""
        return self._death is None

    @property
    def death(self) -> str | None:
        """Why the driver's loop has ended; None while it runs."""
        return self._death

    @property
    def draining(self) -> bool:
        return self._draining

    # -- shutdown ------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:
        """Accept no more requests, and wait until the running ones end or the driver dies.

        Returns False if that takes over `timeout` seconds.
        """
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: self._death is not None or not self._busy(), timeout)

    @abstractmethod
    def _busy(self) -> bool:
        """Return whether sequences are running or waiting. The lock is held."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> bool:
        """Stop; unfinished sequences end with an error. May be called again.

        Returns False if it takes over `timeout` seconds.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _require_open(self, requests: Sequence[SequenceRequest]) -> None:
        """Raise as `open_stream` if requests cannot be accepted. The lock is held."""
        if self._death is not None:
            raise Unavailable(self._death)
        if self._draining:
            raise Unavailable(f"the {self._what} takes no more requests: it is shutting down")
        names = {one.seq for one in requests}
        if len(names) < len(requests) or self._routes.any_of(names):
            raise ValueError("two sequences have the same name")
