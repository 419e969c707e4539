"""Open and close the sequences of one device.

A sequence opens with empty page tables, with a shared prefix, or with the layers that it already has here. It is here
under one epoch at a time; messages of older epochs are dropped. `SequenceTable.open` either sets up everything that its
path needs on this device or leaves nothing behind. Closing a sequence releases its page tables and its cached
activations. Queues and steps are not handled here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.migration.destination import IncomingMigrations
from runtime.agent.sequences.page_tables import SequencePageTables, TableSlice
from runtime.agent.sequences.prompt_states import EnteringPrompt, PromptStates, SavingPrompt
from runtime.agent.sequences.sequence import AgentSequence
from runtime.agent.speculation.hop import SpeculativeHop
from runtime.agent.stages.stages import StageTable
from runtime.chains import Hop, Stage
from runtime.messages import OpenSequences, PromptEntry
from runtime.types import Copied, ModelSpec, Opened


class SequenceTable:
    """The open sequences of one device, by name.

    Args:
        left: Called with the key of each page table of a sequence that leaves.
        states: Saved hidden states of prompts.
        copies: Whether the engine keeps K and V by sequence, so that a shared prefix is copied instead of shared.

    Attribute `copied` lists what the engine must copy with its next plan, in order.
    """

    def __init__(
        self,
        device: str,
        tables: SequencePageTables,
        shelf: StageTable,
        moves: IncomingMigrations,
        ahead: SpeculativeHop,
        kept: ActivationCache,
        left: Callable[[str], None],
        states: PromptStates,
        copies: bool = False,
    ) -> None:
        self._device = device
        self._tables = tables
        self._shelf = shelf
        self._moves = moves
        self._ahead = ahead
        self._kept = kept
        self._left = left
        self._states = states
        self._copies = copies
        self.copied: list[Copied] = []
        self.sequences: dict[str, AgentSequence] = {}

    def open(self, order: OpenSequences, at: int) -> bool | None:
        """Open sequence number `at` of an order.

        Returns None if the sequence is here under this epoch or a newer one; False if a stage, or K and V that it
        needs, is missing; True if it is open.
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
            if seated and order.entries and (entry := order.entries[at]) is not None:
                seated = self._enter(sequence, entry)
            if seated and order.saves and order.saves[at]:
                width = self._tables.spec(sequence.keys[0]).page_tokens
                sequence.saving = SavingPrompt(self._states, order.saves[at], width)
        if seated:
            self._ahead.opened(sequence, self._shelf.specs)
        else:
            self._remove_sequence(sequence)
        return seated

    def close(self, seq: str, epoch: int) -> None:
        """Close a sequence and its incoming migrations, unless a newer epoch of it is here."""
        sequence = self.sequences.get(seq)
        if sequence is not None and sequence.epoch <= epoch:
            self._remove_sequence(sequence)
        self._moves.closed(seq, epoch)

    def take_out(self, seq: str, epoch: int) -> AgentSequence | None:
        """Remove a sequence that is here under this epoch, and return it; its page tables stay the caller's to release.

        Returns None, and does nothing, if it is not here.
        """
        sequence = self.sequences.get(seq)
        if sequence is None or sequence.epoch != epoch:
            return None
        del self.sequences[seq]
        sequence.here = False
        self._ahead.closed(sequence)
        self._kept.close(seq)
        for key in sequence.keys.values():
            self._left(key)
        return sequence

    def keys(self) -> set[str]:
        """Return the page tables of all sequences, those of stand-ins included."""
        held = {key for sequence in self.sequences.values() for key in sequence.keys.values()}
        return held | {sequence.shadow for sequence in self.sequences.values() if sequence.shadow is not None}

    # -- inside --------------------------------------------------------------------------------------------------------

    def _seat(self, sequence: AgentSequence, shared: tuple[str, int] | None) -> bool:
        """Open empty tables for a sequence, or tables that begin with another sequence's first tokens.

        Returns False if a stage, or the shared prefix, is missing. `shared`: (other sequence, tokens), or None.
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
        """Begin a table with another sequence's first `tokens` tokens; return False if that is not possible.

        The pages are shared. If the engine keeps K and V by sequence, a copy is queued for it instead, and takes pages
        of its own, unless the sequence has no prompt and so runs no rows.
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

    def _enter(self, sequence: AgentSequence, entry: PromptEntry) -> bool:
        """Begin a sequence's only table with another chain's first layers; return False if that is not possible."""
        other, states = self.sequences.get(entry.seq), self._states.find(entry.keys)
        if other is None or states is None or not states or other.keys.keys() != {0} or sequence.keys.keys() != {0}:
            return False
        sequence.entry = EnteringPrompt(entry.at, entry.tokens, states)
        return self._tables.share_layers(sequence.keys[0], other.keys[0], entry.tokens, entry.layers)

    def take_copied(self) -> tuple[Copied, ...]:
        """Return what the engine must copy; each entry is returned once."""
        copied, self.copied = tuple(self.copied), []
        return copied

    def _reseat(self, sequence: AgentSequence, known: AgentSequence | None, computed: int) -> bool:
        """Open a sequence that continues here: recut its tables, and those that migrations brought, for the new path.

        Returns False, and releases all of them, if a layer is missing, if a table holds fewer than `computed` tokens,
        or if a step is still writing one (a row that was lost, from before a device died).
        """
        had = (
            []
            if known is None
            else [(hop.layers, known.keys[hop.lo]) for hop in self._here(known) if hop.lo in known.keys]
        )
        for _, key in had:
            self._left(key)  # later rows have another key
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
        """Return, per hop on this device, the first component, the spec, and the table slices of its new table.

        Returns None if a stage or layer is missing, tokens are missing, or a step writes one of the tables.
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
    """Return the slices of tables that make up the layers of a hop; None if a layer is missing.

    `had`: tables with their layers.
    """
    pieces: list[TableSlice] = []
    at = hop.layers[0]
    for (first, last), key in sorted(had):
        if first <= at < min(last, hop.layers[1]):
            end = min(last, hop.layers[1])
            pieces.append(TableSlice(key, at - first, end - first))
            at = end
    return pieces if at == hop.layers[1] else None
