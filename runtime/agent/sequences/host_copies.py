"""Keep K and V of sequences that gave way in host memory, and bring them back (QL-10).

    SaveSequences -> save: CopyOut per page table -> copied_out: the pages are free
    OpenSequences (swapped) -> claim -> begin_due: pages taken, CopyIn -> copied_in: the sequence's rows may run

- A copy has exactly the tokens that the scheduler named, and the epoch under which the sequence was closed. It is
  dropped when the scheduler closes the sequence, or opens it without it. What does not fit the limit is not kept.
- All that is lost with a copy is time: a sequence that asks for one that is not here is reported lost, and runs again.
- Rows of a sequence wait here until its K and V are back; the sequence itself waits for enough free pages.

The scheduler decides what is saved (`scheduler.kv.swapping`). Bytes are copied by the driver.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence, QueuedRow
from runtime.chains import Array, cut
from runtime.control.agent_io import AgentCommand, CopiedIn, CopiedOut, CopyIn, CopyOut, ShareHostMemory
from runtime.kv.pages import pages_for
from runtime.types import Opened

#: Times of copies that are kept for the next report.
_REPORTED = 64


@dataclass(slots=True, eq=False)
class HostCopy:
    """K and V of a sequence in host memory.

    Fields:
        epoch: Epoch under which the sequence was closed.
        tokens: Tokens with K and V.
        stages: Id of each stage, by its first component.
        arrays: Pages of each stage, ordered by token and then by layer; those not copied yet are missing.
        leaving: Page tables that are still being copied, with the first component of the stage.
        dropped: Whether it is not wanted any more, and ends with the last copy under way.
    """

    epoch: int
    tokens: int
    nbytes: int
    stages: dict[int, str]
    arrays: dict[int, Array] = field(default_factory=dict)
    leaving: dict[str, int] = field(default_factory=dict)
    dropped: bool = False


@dataclass(slots=True, eq=False)
class _Return:
    """A sequence that returns.

    Fields:
        since: When it was opened, in ns.
        writing: Page tables that are being written; None while it waits for pages.
        rows: Its rows that have arrived.
    """

    sequence: AgentSequence
    copy: HostCopy
    since: int
    writing: set[str] | None = None
    rows: list[QueuedRow] = field(default_factory=list)


class HostCopies:
    """The copies of one device.

    Args:
        limit: Bytes of host memory; 0: nothing is kept.
        page_bytes: Bytes of a page.
        opens: Whether the engine keeps K and V by sequence, and so opens one when they come back.

    Attributes:
        nbytes: Bytes of all copies, those under way included.
        returns: Sequences that return, by name.
        lost: Sequences that cannot return; the agent reports them and empties the list.
    """

    def __init__(self, tables: SequencePageTables, limit: int, page_bytes: int, opens: bool = False) -> None:
        self._tables, self._limit, self._page_bytes = tables, limit, page_bytes
        self._opens = opens
        self._copies: dict[str, HostCopy] = {}
        self._leaving: dict[str, HostCopy] = {}
        self._entering: dict[str, str] = {}
        self.returns: dict[str, _Return] = {}
        self.lost: list[AgentSequence] = []
        self._ready: list[QueuedRow] = []
        self.nbytes = 0
        self._times: list[tuple[bool, int, int]] = []

    def __len__(self) -> int:
        """Return the number of sequences with a copy, those that return included."""
        return len(self._copies) + len(self.returns)

    # -- out -----------------------------------------------------------------------------------------------------------

    def save(self, sequence: AgentSequence, tokens: int) -> list[AgentCommand]:
        """Keep the first `tokens` tokens of a sequence that has been taken off the device, or release its tables.

        A sequence that had not been written again yet keeps the copy that it came from.
        """
        back = self.returns.pop(sequence.seq, None)
        if back is not None and back.sequence is sequence and back.copy.tokens == tokens:
            back.copy.epoch = sequence.epoch
            self._copies[sequence.seq] = back.copy
            self._release(sequence)
            return []
        out = [] if back is None else self._forget_copy(back.copy)
        tables = self._tables
        nbytes = self._page_bytes * sum(pages_for(tables.spec(key), tokens) for key in sequence.keys.values())
        if self.nbytes + nbytes > self._limit or not self._complete(sequence, tokens):
            self._release(sequence)
            return out
        copy = HostCopy(sequence.epoch, tokens, nbytes, dict(sequence.stages))
        self._copies[sequence.seq] = copy
        self.nbytes += nbytes
        out.append(ShareHostMemory(nbytes))
        for lo, key in sequence.keys.items():
            pages = tables.pages(key, 0, tokens)
            if not pages:  # a stage without attention
                tables.release(key)
                continue
            copy.leaving[key] = lo
            self._leaving[key] = copy
            out.append(CopyOut(key, tokens, pages))
        return out

    def copied_out(self, event: CopiedOut) -> list[AgentCommand]:
        """Handle pages that are in host memory: those on the device are free."""
        copy = self._leaving.pop(event.key, None)
        if copy is None:
            return []
        lo = copy.leaving.pop(event.key)
        expected = self._page_bytes * pages_for(self._tables.spec(event.key), copy.tokens)
        self._tables.release(event.key)
        if event.data is None or event.error or len(event.data.data) != expected:
            self._lose(copy)
        else:
            copy.arrays[lo] = event.data
            self._record(True, expected, event.took)
        return self._forget_copy(copy) if copy.dropped else []

    def closed(self, seq: str, epoch: int) -> list[AgentCommand]:
        """Drop what there is of a sequence up to this epoch."""
        out: list[AgentCommand] = []
        copy = self._copies.get(seq)
        if copy is not None and copy.epoch <= epoch:
            del self._copies[seq]
            out += self._forget_copy(copy)
        back = self.returns.get(seq)
        if back is not None and back.sequence.epoch <= epoch:
            del self.returns[seq]
            out += self._forget_copy(back.copy)
        return out

    # -- in ------------------------------------------------------------------------------------------------------------

    def claim(self, sequence: AgentSequence, epoch: int, tokens: int, now: int) -> bool:
        """Let a sequence that was opened get its K and V back; return False if they are not here."""
        copy = self._copies.get(sequence.seq)
        if copy is None or (copy.epoch, copy.tokens, copy.stages) != (epoch, tokens, sequence.stages):
            return False
        del self._copies[sequence.seq]
        self.returns[sequence.seq] = _Return(sequence, copy, now)
        return True

    def begin_due(self) -> list[AgentCommand]:
        """Take pages for the sequences that wait for them, in their order, and begin to write them."""
        out: list[AgentCommand] = []
        for back in tuple(self.returns.values()):
            if back.writing is None and not (back.copy.leaving or back.copy.dropped):
                if not self._grow(back):
                    break
                out += self._begin(back)
        return out

    def copied_in(self, event: CopiedIn) -> list[AgentCommand]:
        """Handle pages that are written again. Once all of a sequence are, its copy goes and its rows may run."""
        seq = self._entering.pop(event.key)
        self._tables.settle([event.key])
        back = self.returns.get(seq)
        if back is None or back.writing is None or event.key not in back.writing:
            return []
        if event.error:
            self.lost.append(back.sequence)
            return []
        self._record(False, self._bytes_of(event.key, back.copy.tokens), event.took)
        self._tables.fill(event.key, back.copy.tokens - self._tables.book.tokens_of(event.key))
        back.writing.discard(event.key)
        return [] if back.writing else self._finish(back)

    def take_rows(self) -> list[QueuedRow]:
        """Return the rows that waited for what is here now; each is returned once."""
        rows, self._ready = self._ready, []
        return rows

    def hold_rows(self, rows: Iterable[QueuedRow]) -> list[QueuedRow]:
        """Keep the rows of sequences that have not returned yet; give back all other rows."""
        free: list[QueuedRow] = []
        for row in rows:
            back = self.returns.get(row.sequence.seq)
            (free if back is None or back.sequence is not row.sequence or row.move else back.rows).append(row)
        return free

    def overdue(self, since: int) -> list[AgentSequence]:
        """Return the sequences that have waited for pages since before `since` (ns)."""
        return [each.sequence for each in self.returns.values() if each.writing is None and each.since < since]

    # -- views ---------------------------------------------------------------------------------------------------------

    def keys(self) -> set[str]:
        """Return the page tables that are still being copied."""
        return set(self._leaving)

    def drain_times(self) -> tuple[tuple[bool, int, int], ...]:
        """Return (whether to the host, bytes, ns) of the latest copies, each once."""
        times, self._times = tuple(self._times), []
        return times

    def check(self, sequences: Iterable[AgentSequence]) -> None:
        """Raise RuntimeError unless the bytes add up and lie within the limit. For tests, after every event."""
        here = {id(each) for each in sequences}
        copies = {*self._copies.values(), *self._leaving.values(), *(each.copy for each in self.returns.values())}
        if self.nbytes != sum(each.nbytes for each in copies) or self.nbytes > max(self._limit, 0):
            raise RuntimeError(f"{self.nbytes} bytes of host memory are counted, of {self._limit}")
        for copy in copies:
            if not copy.leaving and copy.nbytes != sum(len(array.data) for array in copy.arrays.values()):
                raise RuntimeError("a copy is not complete")
        if not all(id(each.sequence) in here for each in self.returns.values()):
            raise RuntimeError("K and V come back for a sequence that has gone")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _complete(self, sequence: AgentSequence, tokens: int) -> bool:
        """Return whether the tables have K and V of these tokens, and no step is writing them."""
        tables = self._tables
        return sequence.shadow is None and all(
            not tables.writes(key) and (tables.book.tokens_of(key) >= tokens or not tables.spec(key).kv_layers)
            for key in sequence.keys.values()
        )

    def _grow(self, back: _Return) -> bool:
        """Take the pages of a sequence on this device, all or none."""
        tables, keys = self._tables, back.sequence.keys.values()
        more = sum(
            pages_for(tables.spec(key), back.copy.tokens) - pages_for(tables.spec(key), tables.book.tokens_of(key))
            for key in keys
        )
        if more > tables.book.free:
            return False
        for key in keys:
            tables.grow(key, back.copy.tokens - tables.book.tokens_of(key))
        return True

    def _begin(self, back: _Return) -> list[AgentCommand]:
        """Write what a sequence does not share with another one."""
        out: list[AgentCommand] = []
        tables, tokens, back.writing = self._tables, back.copy.tokens, set()
        for lo, key in back.sequence.keys.items():
            pages = tables.pages(key, tables.book.tokens_of(key), tokens)
            if not pages:
                tables.fill(key, tokens - tables.book.tokens_of(key))
                continue
            if self._opens:
                tables.introduce(key)
            tables.write([key])
            back.writing.add(key)
            self._entering[key] = back.sequence.seq
            data = back.copy.arrays[lo]
            request = replace(back.sequence.request, seq=key, model=back.sequence.stages[lo])
            part = cut(data, data.shape[0] - len(pages), data.shape[0])
            out.append(CopyIn(Opened(request, back.sequence.output), tokens, pages, part))
        return out if back.writing else [*out, *self._finish(back)]

    def _finish(self, back: _Return) -> list[AgentCommand]:
        """Let the rows of a sequence run, and drop its copy: all its pages are written."""
        del self.returns[back.sequence.seq]
        self._ready += back.rows
        return self._forget_copy(back.copy)

    def _bytes_of(self, key: str, tokens: int) -> int:
        spec = self._tables.spec(key)
        return self._page_bytes * (pages_for(spec, tokens) - pages_for(spec, self._tables.book.tokens_of(key)))

    def _lose(self, copy: HostCopy) -> None:
        """Give up a copy that could not be made, and the sequence that waits for it."""
        copy.dropped = True
        self._copies = {seq: each for seq, each in self._copies.items() if each is not copy}
        self.lost += [each.sequence for each in self.returns.values() if each.copy is copy]

    def _release(self, sequence: AgentSequence) -> None:
        for key in sequence.keys.values():
            self._tables.release(key)

    def _forget_copy(self, copy: HostCopy) -> list[AgentCommand]:
        """Drop a copy; its bytes count until nothing of it is under way."""
        copy.dropped = True
        if copy.leaving:
            return []
        freed, copy.nbytes = copy.nbytes, 0  # a sequence that is about to be closed may still wait for it
        self.nbytes -= freed
        copy.arrays.clear()
        return [ShareHostMemory(-freed)] if freed else []

    def _record(self, out: bool, nbytes: int, took: int) -> None:
        if nbytes and len(self._times) < _REPORTED:
            self._times.append((out, nbytes, took))
