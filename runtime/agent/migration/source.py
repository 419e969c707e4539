"""Answer the page requests of a migration on its source device, with pages or with hidden states that were kept.

The source only reads. Every PageRequest gets one answer, with an error if there is nothing to give. Requests are
checked against what is here, because the destination may be out of date.
"""

from __future__ import annotations

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence
from runtime.chains import Hop
from runtime.control.agent_io import AgentCommand, ReadPages, Send, SendActivations
from runtime.messages import PageData, PageRequest


def answer(
    want: PageRequest, sequence: AgentSequence | None, device: str, tables: SequencePageTables, kept: ActivationCache
) -> AgentCommand:
    """Return the command that answers a page request: pages of the sequence, or hidden states that entered a stage."""
    hops = (
        ()
        if sequence is None or sequence.epoch != want.epoch
        else tuple(hop for hop in sequence.path if hop.device == device)
    )
    if want.before:
        return _inputs(want, hops, kept)
    hop = next((hop for hop in hops if hop.covers(want.layers)), None)
    key = None if sequence is None or hop is None else sequence.keys.get(hop.lo)
    if key is None or hop is None:
        return _refused(want, f"these layers of {want.seq} are not here")
    if not 0 <= want.lo < want.hi <= tables.book.tokens_of(key) or want.lo % tables.spec(key).page_tokens:
        return _refused(want, f"tokens {want.lo} to {want.hi} of {want.seq} are not written here")
    first = hop.layers[0]
    layers = slice(want.layers[0] - first, want.layers[1] - first)
    return ReadPages(
        tables.pages(key, want.lo, want.hi, layers),
        want.by,
        PageData(want.move, want.seq, want.epoch, want.lo, want.hi, ""),
    )


def answer_for_loan(want: PageRequest, pages: tuple[int, ...] | None) -> AgentCommand:
    """Return the command that answers a request for pages of a loan. `pages`: these; None if they are not held here."""
    if pages is None:
        return _refused(want, f"tokens {want.lo} to {want.hi} of {want.seq} are not lent here")
    return ReadPages(pages, want.by, PageData(want.move, want.seq, want.epoch, want.lo, want.hi, ""))


def _inputs(want: PageRequest, hops: tuple[Hop, ...], kept: ActivationCache) -> AgentCommand:
    if not any(hop.lo == want.before for hop in hops):
        return _refused(want, f"no stage of {want.seq} begins with component {want.before} here")
    spans = kept.spans(want.seq, want.before)
    pieces = kept.pieces(want.seq, want.before, want.lo, want.hi)
    if pieces is None:
        return _refused(want, f"what came into tokens {want.lo} to {want.hi} of {want.seq} is not kept", spans)
    return SendActivations(
        pieces, want.by, PageData(want.move, want.seq, want.epoch, want.lo, want.hi, "", "", want.before, spans)
    )


def _refused(want: PageRequest, why: str, kept: tuple[tuple[int, int], ...] = ()) -> Send:
    return Send(want.by, PageData(want.move, want.seq, want.epoch, want.lo, want.hi, "", why, want.before, kept))
