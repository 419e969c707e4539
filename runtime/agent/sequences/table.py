"""Open and close the sequences of one device: with empty tables, with a shared prefix, or with what they have here.

Contract: a sequence is here under one epoch at a time; messages of older ones are dropped. `open` returns whether
everything that its path needs here is here; else nothing of it stays. Its tables, and its cached activations, go with
it. Queues and steps are not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.migration.destination import IncomingMigrations
from runtime.agent.sequences.page_tables import SequencePageTables, TableSlice
from runtime.agent.sequences.sequence import AgentSequence
from runtime.agent.speculation.hop import SpeculativeHop
from runtime.agent.stages.stages import StageTable
from runtime.chains import Hop, Stage
from runtime.messages import OpenSequences
from runtime.types import Copied, ModelSpec, Opened


class SequenceTable:
    """`left`: called with the table of each sequence that goes. `copies`: the engine keeps K and V by sequence, so
    that what is shared is
    copied. `copied`: what the engine has to copy with its next plan, in order."""

    def __init__(
        self,
        device: str,
        tables: SequencePageTables,
        shelf: StageTable,
        moves: IncomingMigrations,
        ahead: SpeculativeHop,
        kept: ActivationCache,
        left: Callable[[str], None],
        copies: bool = False,
    ) -> None:
        self._device = device
        self._tables = tables
        self._shelf = shelf
        self._moves = moves
        self._ahead = ahead
        self._kept = kept
        self._left = left
        self._copies = copies
        self.copied: list[Copied] = []
        self.sequences: dict[str, AgentSequence] = {}

    def open(self, order: OpenSequences, at: int) -> bool | None:
        """Sequence `at` of an order. None: it is here under this epoch, or a newer one. False: something that it needs
        is missing.
        """
        request, epoch = order.requests[at], order.epochs[at]
        known = self.sequences.get(request.seq)
        if known is not None and known.epoch >= epoch:
            return None
        sequence = AgentSequence(
            request,
            epoch,
            order.paths[at],
            order.outputs[at],
            ahead=order.speculative_hops[at] if order.speculative_hops else None,
        )
        sequence.offers.update(order.offers[at] if order.offers else ())
        self.sequences[sequence.seq] = sequence
        if known is not None:
            known.here = False
        if order.keep[at]:
            if known is not None:
                self._ahead.closed(known)
            seated = self._reseat(sequence, known, order.computed[at])
        else:
            if known is not None:
                self._let_go(known)
            seated = self._seat(sequence, order.shared[at])
        if seated:
            self._ahead.opened(sequence, self._shelf.specs)
        else:
            self._remove_sequence(sequence)
        return seated

    def close(self, seq: str, epoch: int) -> None:
        """The end of a sequence, and of what moves of it, unless a newer epoch of it is here."""
        sequence = self.sequences.get(seq)
        if sequence is not None and sequence.epoch <= epoch:
            self._remove_sequence(sequence)
        self._moves.closed(seq, epoch)

    def keys(self) -> set[str]:
        """Tables of all sequences, with those of their stand-ins."""
        held = {key for sequence in self.sequences.values() for key in sequence.keys.values()}
        return held | {sequence.shadow for sequence in self.sequences.values() if sequence.shadow is not None}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _seat(self, sequence: AgentSequence, shared: tuple[str, int] | None) -> bool:
        """Give a sequence empty tables, or ones that begin as another's; false where a stage, or what it is to share,
        is missing.
        """
        other = self.sequences.get(shared[0]) if shared is not None else None
        for hop in self._here(sequence):
            stage = Stage(sequence.request.model, hop.lo, hop.hi).id
            spec = self._shelf.specs.get(stage)
            if spec is None:
                return False
            sequence.keys[hop.lo], sequence.stages[hop.lo] = self._tables.open(sequence.seq, hop.lo, spec), stage
            if shared is None:
                continue
            if other is None or hop.lo not in other.keys or not self._begin_as(sequence, other, hop.lo, shared[1]):
                return False
        return True

    def _begin_as(self, sequence: AgentSequence, other: AgentSequence, lo: int, tokens: int) -> bool:
        """A table's first tokens are another's: in the same pages, or copied. What runs no row of its own is in
        nobody's way there.
        """
        key, source = sequence.keys[lo], other.keys[lo]
        if not self._copies:
            return self._tables.share(key, source, tokens)
        runs = bool(sequence.request.prompt)
        if not (self._tables.copy(key, tokens) if runs else self._tables.share(key, source, tokens)):
            return False
        self._tables.introduce(key)
        request = replace(sequence.request, seq=key, model=sequence.stages[lo])
        self.copied.append(Copied(Opened(request, sequence.output), source, tokens))
        return True

    def take_copied(self) -> tuple[Copied, ...]:
        """Each is told once."""
        copied, self.copied = tuple(self.copied), []
        return copied

    def _reseat(self, sequence: AgentSequence, known: AgentSequence | None, computed: int) -> bool:
        """Give a sequence that goes on here the layers that it has here, and those that came, in tables of its new
        hops.

        False, and nothing of it stays, where any are missing, or are being written: by a row that is lost, for a device
        before it died.
        """
        had = (
            []
            if known is None
            else [(hop.layers, known.keys[hop.lo]) for hop in self._here(known) if hop.lo in known.keys]
        )
        for _, key in had:
            self._left(key)  # what comes next comes under another
        had += self._moves.adopted(sequence.seq, sequence.epoch)
        new = self._cut(sequence, had, computed)
        if new is None:
            for _, key in had:
                self._tables.release(key)
            return False
        keys = self._tables.recut(sequence.seq, new, [key for _, key in had], computed)
        sequence.keys.update(zip((lo for lo, _, _ in new), keys, strict=True))
        sequence.stages.update(
            (hop.lo, Stage(sequence.request.model, hop.lo, hop.hi).id) for hop in self._here(sequence)
        )
        self._kept.retain(sequence.seq, {hop.lo for hop in self._here(sequence)})
        return True

    def _cut(
        self, sequence: AgentSequence, had: Sequence[tuple[tuple[int, int], str]], computed: int
    ) -> list[tuple[int, ModelSpec, list[TableSlice]]] | None:
        """For each hop here its first component, spec, and the pieces of tables that its own is made of; None where
        that cannot be.
        """
        if any(self._tables.writes(key) for _, key in had):
            return None
        new: list[tuple[int, ModelSpec, list[TableSlice]]] = []
        for hop in self._here(sequence):
            spec, pieces = self._spec(sequence, hop), _pieces(hop, had)
            if (
                spec is None
                or pieces is None
                or any(self._tables.book.tokens_of(piece.key) < computed for piece in pieces)
            ):
                return None
            new.append((hop.lo, spec, pieces))
        return new

    def _spec(self, sequence: AgentSequence, hop: Hop) -> ModelSpec | None:
        return self._shelf.specs.get(Stage(sequence.request.model, hop.lo, hop.hi).id)

    def _here(self, sequence: AgentSequence) -> tuple[Hop, ...]:
        return tuple(hop for hop in sequence.path if hop.device == self._device)

    def _remove_sequence(self, sequence: AgentSequence) -> None:
        del self.sequences[sequence.seq]
        sequence.here = False
        self._let_go(sequence)

    def _let_go(self, sequence: AgentSequence) -> None:
        self._ahead.closed(sequence)
        self._kept.close(sequence.seq)
        for key in sequence.keys.values():
            self._tables.release(key)
            self._left(key)


def _pieces(hop: Hop, had: Sequence[tuple[tuple[int, int], str]]) -> list[TableSlice] | None:
    """The layers of a hop out of tables by their layers, in order; None where some are missing."""
    pieces: list[TableSlice] = []
    at = hop.layers[0]
    for (first, last), key in sorted(had):
        if first <= at < min(last, hop.layers[1]):
            end = min(last, hop.layers[1])
            pieces.append(TableSlice(key, at - first, end - first))
            at = end
    return pieces if at == hop.layers[1] else None
