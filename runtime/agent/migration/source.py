"""Answer the page requests of a migration on its source device, with pages or with hidden states that were kept.

The source only reads. Every PageRequest gets one answer, with an error if there is nothing to give; requests for pages
that are not written yet are those of `agent.migration.by_layer`. Requests are checked against what is here, because the
destination may be out of date.
"""

from __future__ import annotations

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence
from runtime.chains import Hop
from runtime.control.agent_io import AgentCommand, ReadPages, Send, SendActivations
from runtime.messages import PageData, PageRequest
from runtime.types import AWAY


def answer(
    want: PageRequest, sequence: AgentSequence | None, device: str, tables: SequencePageTables, kept: ActivationCache
) -> AgentCommand:
    """Return the command that answers a page request: pages of the sequence, or hidden states that entered a stage."""
    if want.before:
        return _inputs(want, _hops(want, sequence, device), kept)
    found = place_of(want, sequence, device)
    if found is None:
        return refused(want, f"these layers of {want.seq} are not here")
    key, layers = found
    if not 0 <= want.lo < want.hi <= tables.book.tokens_of(key) or want.lo % tables.spec(key).page_tokens:
        return refused(want, f"tokens {want.lo} to {want.hi} of {want.seq} are not written here")
    pages = tables.pages(key, want.lo, want.hi, layers)
    if AWAY in pages:
        return refused(want, f"tokens {want.lo} to {want.hi} of {want.seq} are on other devices")
    return ReadPages(
        pages,
        want.by,
        PageData(want.move, want.seq, want.epoch, want.lo, want.hi, ""),
    )


def place_of(want: PageRequest, sequence: AgentSequence | None, device: str) -> tuple[str, slice] | None:
    """Return the page table that a request asks for, and which of its layers; None if they are not here."""
    if sequence is None or sequence.epoch != want.epoch:
        return None
    return layers_in(sequence, device, want.layers)


def layers_in(sequence: AgentSequence | None, device: str, layers: tuple[int, int]) -> tuple[str, slice] | None:
    """Return the page table of a sequence with these layers, and which of its layers they are; None if not here."""
    hops = () if sequence is None else sequence.path
    hop = next((hop for hop in hops if hop.device == device and hop.covers(layers)), None)
    key = None if sequence is None or hop is None else sequence.keys.get(hop.lo)
    if key is None or hop is None:
        return None
    return key, slice(layers[0] - hop.layers[0], layers[1] - hop.layers[0])


def refused(want: PageRequest, why: str, kept: tuple[tuple[int, int], ...] = ()) -> Send:
    """Return the answer that nothing is sent."""
    return Send(want.by, PageData(want.move, want.seq, want.epoch, want.lo, want.hi, "", why, want.before, kept))


def answer_for_loan(want: PageRequest, pages: tuple[int, ...] | None) -> AgentCommand:
    """Return the command that answers a request for pages of a loan. `pages`: these; None if they are not held here."""
    if pages is None:
        return refused(want, f"tokens {want.lo} to {want.hi} of {want.seq} are not lent here")
    return ReadPages(pages, want.by, PageData(want.move, want.seq, want.epoch, want.lo, want.hi, ""))


def _inputs(want: PageRequest, hops: tuple[Hop, ...], kept: ActivationCache) -> AgentCommand:
    if not any(hop.lo == want.before for hop in hops):
        return refused(want, f"no stage of {want.seq} begins with component {want.before} here")
    spans = kept.spans(want.seq, want.before)
    pieces = kept.pieces(want.seq, want.before, want.lo, want.hi)
    if pieces is None:
        return refused(want, f"what came into tokens {want.lo} to {want.hi} of {want.seq} is not kept", spans)
    return SendActivations(
        pieces, want.by, PageData(want.move, want.seq, want.epoch, want.lo, want.hi, "", "", want.before, spans)
    )


def _hops(want: PageRequest, sequence: AgentSequence | None, device: str) -> tuple[Hop, ...]:
    """Return the hops of a sequence's path on this device; none if the request is for another epoch."""
    if sequence is None or sequence.epoch != want.epoch:
        return ()
    return tuple(hop for hop in sequence.path if hop.device == device)
