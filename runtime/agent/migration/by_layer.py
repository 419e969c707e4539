"""Send pages to another device while the step that writes them runs: each layer's once they are written (TI-15).

    PageRequest (as_written) -> add: pages that are written go at once; else it waits for the row that writes them
        a step runs that row -> send_layers: pages of the layers that it has passed, while later ones are computed
        the step is over     -> settle: pages of the layers that are left

Contract:
- Each request is answered with PageData for all of its layers, in order and without gaps, or in the end with an error.
- Pages are read once their layer is written and before their sequence is closed: closing drops the request, for its
  migration is over then.
- A request may overtake the message that opens its sequence. It is refused if the sequence does not come.
- If the row fails the request is refused: the destination asks for all layers again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from runtime.agent.migration.source import place_of, refused
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.control.agent_io import AgentCommand, ReadPages
from runtime.messages import PageData, PageRequest

#: How long a request waits for its sequence to be opened, in nanoseconds.
_PATIENCE_NS = 30 * 1_000_000_000
#: Most requests that wait at once, and bytes of pages of several layers in one message.
_MOST_OPEN, _MOST_BYTES = 1024, 4 << 20


@dataclass(slots=True)
class _OpenRequest:
    """A request that waits. `since`: time of its arrival in ns; `sent`: number of its layers that have been sent."""

    want: PageRequest
    since: int
    sent: int = 0


class PagesByLayer:
    """Requests for pages of one device that are not written yet.

    Args:
        sequences: Those that are open here.
        page_bytes: Bytes of a page; 0: unknown.

    Attributes:
        waiting: The requests, in the order in which they came.
    """

    def __init__(
        self, device: str, tables: SequencePageTables, sequences: Mapping[str, AgentSequence], page_bytes: int
    ) -> None:
        self._device, self._tables, self._sequences, self._page_bytes = device, tables, sequences, page_bytes
        self.waiting: list[_OpenRequest] = []

    def add(self, want: PageRequest, now: int) -> list[AgentCommand]:
        """Answer a request, or let it wait. A later request for the same pages takes the place of an earlier one."""
        sequence, same = self._sequences.get(want.seq), (want.move, want.lo, want.hi)
        self.waiting = [each for each in self.waiting if (each.want.move, each.want.lo, each.want.hi) != same]
        if sequence is not None and sequence.epoch > want.epoch:
            return [refused(want, f"{want.seq} goes another way by now")]
        if len(self.waiting) >= _MOST_OPEN:
            return [refused(want, "too many requests wait for pages that are not written")]
        self.waiting.append(_OpenRequest(want, now))
        return self.settle()

    def send_layers(self, rows: Iterable[QueuedRow], passed: Mapping[str, int]) -> list[AgentCommand]:
        """Return commands for pages of layers that the rows of a running step have written.

        At most one message for each request, so that the step is not held up for long.

        Args:
            rows: The rows of the step.
            passed: By page table, how many of its attention layers the row has passed.
        """
        ends = {each.name: self._tables.book.tokens_of(each.name) + each.tokens for each in rows if not each.shadow}
        out: list[AgentCommand] = []
        for each in tuple(self.waiting):
            found = self._place(each.want)
            if found is not None and each.want.hi <= ends.get(found[0], 0):
                key, layers = found
                out += self._send(each, key, layers, min(passed.get(key, 0), layers.stop) - layers.start, once=True)
        return out

    def settle(self) -> list[AgentCommand]:
        """Return commands for all pages that are written by now, behind a step for example."""
        out: list[AgentCommand] = []
        for each in tuple(self.waiting):
            found = self._place(each.want)
            if found is not None and each.want.hi <= self._tables.book.tokens_of(found[0]):
                key, layers = found
                out += self._send(each, key, layers, layers.stop - layers.start)
        return out

    def fail(self, names: Collection[str]) -> list[AgentCommand]:
        """Refuse requests of which a part was sent, because the step that wrote the rest has failed.

        `names`: page tables of the step's rows.
        """
        found = [(each, self._place(each.want)) for each in self.waiting if each.sent]
        return self._refuse([each for each, place in found if place and place[0] in names], "the step failed")

    def expire(self, now: int) -> list[AgentCommand]:
        """Refuse requests that have waited too long for a sequence that is not here."""
        late = [each for each in self.waiting if each.since < now - _PATIENCE_NS and self._place(each.want) is None]
        return self._refuse(late, "the sequence is not here")

    def close(self, seq: str, epoch: int) -> None:
        """Drop the requests of a sequence up to this epoch."""
        if self.waiting:
            self.waiting = [each for each in self.waiting if each.want.seq != seq or each.want.epoch > epoch]

    def remove_device(self, device: str) -> None:
        """Drop the requests of a device that is gone."""
        self.waiting = [each for each in self.waiting if each.want.by != device]

    # -- internals -----------------------------------------------------------------------------------------------------

    def _place(self, want: PageRequest) -> tuple[str, slice] | None:
        return place_of(want, self._sequences.get(want.seq), self._device)

    def _send(
        self, request: _OpenRequest, key: str, layers: slice, upto: int, once: bool = False
    ) -> list[AgentCommand]:
        """Send the pages of a request's layers up to number `upto` that have not been sent yet.

        `once`: in one message; the rest waits for the next call.
        """
        want, out = request.want, list[AgentCommand]()
        width = self._tables.spec(key).page_tokens
        if want.lo % width or not 0 <= want.lo < want.hi:
            self.waiting.remove(request)
            return [refused(want, f"tokens {want.lo} to {want.hi} of {want.seq} are no whole page sets")]
        nbytes = -(-(want.hi - want.lo) // width) * self._page_bytes
        most = max(1, _MOST_BYTES // nbytes) if nbytes else upto
        while request.sent < upto and not (once and out):
            first, request.sent = request.sent, min(request.sent + most, upto)
            pages = self._tables.pages(key, want.lo, want.hi, slice(layers.start + first, layers.start + request.sent))
            sent = want.layers[0] + first, want.layers[0] + request.sent
            data = PageData(want.move, want.seq, want.epoch, want.lo, want.hi, "", layers=sent)
            out.append(ReadPages(pages, want.by, data))
        if request.sent == layers.stop - layers.start:
            self.waiting.remove(request)
        return out

    def _refuse(self, requests: Iterable[_OpenRequest], why: str) -> list[AgentCommand]:
        out: list[AgentCommand] = []
        for each in requests:
            self.waiting.remove(each)
            out.append(refused(each.want, why))
        return out
