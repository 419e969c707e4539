"""Take requests for a driver: check model names, open streams, refuse with the reason once it drains or is dead.

Contract: `_changed` guards what is here and what a driver adds; it is notified whenever a sequence has ended. It knows
no agents, engines or schedulers: `_submit` and `abort` are the driver's.
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
    """See the top of the file. `what`: runs sequences, as clients read it. Every method may be called from any
    thread.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._changed = threading.Condition()
        self._routes = StreamRouter()
        self._draining = False
        self._death: str | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def open_stream(self, requests: Sequence[SequenceRequest]) -> Stream:
        """Submit sequences; their events come out of the stream, refusals included. Call it on a running event loop.

        Raises Unavailable while draining or dead; ValueError if two sequences have one name.
        """
        stream = Stream((one.seq for one in requests), asyncio.get_running_loop(), self.abort)
        stream.push(self._submit(requests, stream))
        return stream

    def run(self, requests: Sequence[SequenceRequest]) -> Generator[TokenEvent, None, None]:
        """Submit sequences at once; iterate over their events in this thread. Leaving early aborts. Raises as
        `open_stream`.
        """
        inbox = Inbox((one.seq for one in requests), self.abort)
        inbox.push(self._submit(requests, inbox))
        return inbox.drain()

    @abstractmethod
    def abort(self, seqs: Iterable[str]) -> None:
        """End sequences; those that have ended already are nothing to do."""

    @abstractmethod
    def _submit(self, requests: Sequence[SequenceRequest], sink: Sink) -> list[TokenEvent]:
        """Hand sequences on, all or none; returns the events of those that are refused at once."""

    # -- how it is -----------------------------------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """False once its loop has ended, for whatever reason."""
        return self._death is None

    @property
    def death(self) -> str | None:
        """Why its loop has ended; None while it lives."""
        return self._death

    @property
    def draining(self) -> bool:
        return self._draining

    # -- ends ----------------------------------------------------------------------------------------------------------

    def drain(self, timeout: float) -> bool:
        """Take no more requests, wait until the ones there are have ended (or died); false if that takes over `timeout`
        seconds.
        """
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: self._death is not None or not self._busy(), timeout)

    @abstractmethod
    def _busy(self) -> bool:
        """Whether sequences are there. The lock is held."""

    @abstractmethod
    def shutdown(self, timeout: float | None = None) -> bool:
        """Stop; what is unfinished ends with an error. Again: nothing to do. False if that takes over `timeout`
        seconds.
        """

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _require_open(self, requests: Sequence[SequenceRequest]) -> None:
        """Raises as `open_stream`. The lock is held."""
        if self._death is not None:
            raise Unavailable(self._death)
        if self._draining:
            raise Unavailable(f"the {self._what} takes no more requests: it is shutting down")
        names = {one.seq for one in requests}
        if len(names) < len(requests) or self._routes.any_of(names):
            raise ValueError("two sequences have the same name")
