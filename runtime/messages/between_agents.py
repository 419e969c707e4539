"""Messages between agents: hidden states, pages of K and V, offers and bids."""

from __future__ import annotations

from runtime.messages.base import Message


class PageRequest(Message, frozen=True, tag=True, array_like=True):
    """Destination (`by`) to source: pages of tokens [lo, hi), whole groups, of these attention layers. Answered by one
    PageData.

    `before`: instead of pages, the hidden states of these tokens before that component; 0 for pages.
    """

    move: int
    seq: str
    epoch: int
    layers: tuple[int, int]
    lo: int
    hi: int
    by: str
    before: int = 0


class PageData(Message, frozen=True, tag=True, array_like=True):
    """Source to destination: K and V of tokens [lo, hi), one array of all page groups; or why not. `digest`: BLAKE3 of
    the bytes; of an array that comes directly, a checksum that was taken on its device.

    `before`: as in PageRequest; then the array is hidden states [hi - lo, width], and `kept` says of which tokens the
    source has any.
    """

    move: int
    seq: str
    epoch: int
    lo: int
    hi: int
    digest: str
    error: str = ""
    before: int = 0
    kept: tuple[tuple[int, int], ...] = ()


class ForwardRows(Message, frozen=True, tag=True, array_like=True):
    """Rows for the next hop (`hops[i]` of their paths), their hidden states beside it: [tokens, width], rows back to
    back, each array of one row or of several.

    `turns`, `ahead`: as in Go. An odd turn is a prediction of the row whose turn is the next number: it is tentative.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sample: tuple[bool, ...]
    generated: tuple[int, ...]
    attempts: tuple[int, ...] = ()
    speculate: tuple[bool, ...] = ()
    batch: int = 0


class Offer(Message, frozen=True, tag=True, array_like=True):
    """`device` has rows of so many tokens (`counts`) for these hops of their paths, and asks several who would take
    them.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    counts: tuple[int, ...]


class Bid(Message, frozen=True, tag=True, array_like=True):
    """`device` would take these. It gets a ForwardRows for each that nobody else has, and else nothing."""

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]


class Retract(Message, frozen=True, tag=True, array_like=True):
    """Others have these."""

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
