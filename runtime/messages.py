"""What a scheduler and agents say to each other. Typed, versioned, columns instead of rows: one message per step and receiver.

    scheduler -> agent    Load Drop   Open Close   Go Gone   Receive Settle
    agent -> agent        Pass (hidden states)     Want Pages (K and V)     Offer Bid Retract (who takes a hop)
    agent -> scheduler    Ready   Loaded Refused   Done Lost Verdict Won    Moved Stuck    Report
    between drivers       Peers Halt   Beat Severed   Denial   Meet Unlinked       (state machines never see these)

A sequence is named together with its *epoch*, which grows whenever it is placed anew: what belongs to an older one is dropped by whoever
gets it, so a late message can do no harm. Sequences of columns have one entry per row. Arrays travel beside a message, in the order that it
says. Knows no transport; `runtime.transport.wire` turns these into bytes.
"""

from __future__ import annotations

import msgspec

from runtime.chains import Hop, RunAhead, Stage
from runtime.types import ModelSpec, PromptLogprobs, Sampled, SequenceRequest

#: Of these messages; agents and schedulers of different ones refuse each other.
PROTOCOL = 4


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Base of all."""


# -- scheduler to agent ------------------------------------------------------------------------------------------------


class Load(Message, frozen=True, tag=True, array_like=True):
    """Make stages ready. Answered by one Loaded or Refused each.

    `blocks[i]`: the blocks of stage i in order. `limits`: rows of a step that may pass a block, where it has a limit of its own (BL-14).
    """

    stages: tuple[Stage, ...]
    blocks: tuple[tuple[str, ...], ...]
    limits: tuple[tuple[str, int], ...] = ()


class Drop(Message, frozen=True, tag=True, array_like=True):
    """Let stages go; no sequence is on them any more."""

    stages: tuple[Stage, ...]


class Open(Message, frozen=True, tag=True, array_like=True):
    """Learn sequences that come over this device. `outputs`: tokens they have produced before.

    `keep[i]`: one that is here already goes on, under the new epoch and path, with the K and V of its first `computed[i]` tokens in the
    layers that it still has here; else it begins anew. `shared[i]`: (other sequence of the same domain on this device, tokens): its first
    pages are this one's too (BL-32); None for none. `ahead[i]`: which hop of it is predicted (BL-25); none at all where it is empty.
    `offers[i]`: hops that are offered, each to these devices (BL-23); to whom this goes stands in the path in place of the others.
    """

    epochs: tuple[int, ...]
    requests: tuple[SequenceRequest, ...]
    outputs: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[Hop, ...], ...]
    keep: tuple[bool, ...]
    computed: tuple[int, ...]
    shared: tuple[tuple[str, int] | None, ...]
    ahead: tuple[RunAhead | None, ...] = ()
    offers: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...] = ()


class Close(Message, frozen=True, tag=True, array_like=True):
    """Forget sequences, in whatever phase they are; their pages are free once no step writes them. Later epochs of them stay."""

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]


class Gone(Message, frozen=True, tag=True, array_like=True):
    """Another device is gone: nothing will come from there."""

    device: str


class Go(Message, frozen=True, tag=True, array_like=True):
    """Run these rows from their first hop on, which is on this device: `tokens` (all rows' back to back, `counts` of each) at `starts`.

    `sample`: choose a token behind the last one. `generated`: tokens produced so far. `steps`: decode so many tokens before coming back
    (only where the path has one hop and the agent strides). `turns`: of rows of sequences that are predicted, growing and even, in the
    order in which they supersede what began at or behind their start; 0 for all others. `ahead`: whether a row may be predicted. Both are
    empty where there is none of it.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]
    sample: tuple[bool, ...]
    generated: tuple[int, ...]
    steps: tuple[int, ...]
    turns: tuple[int, ...] = ()
    ahead: tuple[bool, ...] = ()


# -- migration (BL-16) -------------------------------------------------------------------------------------------------


class Receive(Message, frozen=True, tag=True, array_like=True):
    """To the destination: bring here the K and V that a sequence has in these components, tokens [0, upto), from `source`.

    `layers`: attention layers [first, last) of the chain's that they have, `page_tokens` to a page. `tokens`: its first ones, to recompute
    pages from the front by that stage, which must be loaded (empty: copy only, unless `inputs`: by what the source kept of the hidden
    states that came into it). `copy`: whether pages come from the back (false: recompute only). A later Receive of the same move brings
    what has grown since (`upto` larger).
    """

    move: int
    seq: str
    epoch: int
    stage: Stage
    layers: tuple[int, int]
    page_tokens: int
    source: str
    upto: int
    tokens: tuple[int, ...]
    copy: bool
    request: SequenceRequest
    inputs: bool = False


class Settle(Message, frozen=True, tag=True, array_like=True):
    """To the destination: the move is over. Committed, its pages are the sequence's, whose Open under `epoch` is next; else they go."""

    move: int
    seq: str
    epoch: int
    commit: bool


class Want(Message, frozen=True, tag=True, array_like=True):
    """Destination (`by`) to source: pages of tokens [lo, hi), whole groups, of these attention layers. Answered by one Pages.

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


class Pages(Message, frozen=True, tag=True, array_like=True):
    """Source to destination: K and V of tokens [lo, hi), one array of all page groups; or why not. `digest`: BLAKE3 of the bytes; of an
    array that comes directly, a checksum that was taken on its device.

    `before`: as in Want; then the array is hidden states [hi - lo, width], and `kept` says of which tokens the source has any.
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


class Moved(Message, frozen=True, tag=True, array_like=True):
    """Destination to scheduler: all asked for is here. `copied`, `recomputed`: tokens of each, disjoint, together all of it.

    `nbytes`: that came, of K and V; `inputs`: of hidden states. `reason`: why the front has not worked as it was to, empty if it has.
    """

    device: str
    move: int
    seq: str
    copied: tuple[tuple[int, int], ...]
    recomputed: tuple[tuple[int, int], ...]
    nbytes: int
    inputs: int = 0
    reason: str = ""


class Stuck(Message, frozen=True, tag=True, array_like=True):
    """Destination to scheduler: the move cannot go on, and nothing of it is left here."""

    device: str
    move: int
    seq: str
    reason: str


# -- agent to agent ----------------------------------------------------------------------------------------------------


class Pass(Message, frozen=True, tag=True, array_like=True):
    """Rows for the next hop (`hops[i]` of their paths), their hidden states beside it: [tokens, width], rows back to back, each array of
    one row or of several.

    `turns`, `ahead`: as in Go. An odd turn is a prediction of the row whose turn is the next number: it is tentative.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    sample: tuple[bool, ...]
    generated: tuple[int, ...]
    turns: tuple[int, ...] = ()
    ahead: tuple[bool, ...] = ()


# -- who takes a hop (BL-23) ---------------------------------------------------------------------------------------------


class Offer(Message, frozen=True, tag=True, array_like=True):
    """`device` has rows of so many tokens (`counts`) for these hops of their paths, and asks several who would take them."""

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    counts: tuple[int, ...]


class Bid(Message, frozen=True, tag=True, array_like=True):
    """`device` would take these. It gets a Pass for each that nobody else has, and else nothing."""

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]


class Retract(Message, frozen=True, tag=True, array_like=True):
    """Others have these."""

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]


# -- agent to scheduler ------------------------------------------------------------------------------------------------


class Ready(Message, frozen=True, tag=True, array_like=True):
    """An agent is there. `weights`: bytes of weights it may hold, 0 for no limit. `server`: the machine that it is on, empty if unknown;
    `pid`: its process there, 0 if it has none. `inputs`: bytes that it keeps of what came into its stages, for moves; 0 for none.
    `rail`: how its tensors may come and go directly: agents of the same one can be linked; empty: by the host's memory only.
    """

    device: str
    protocol: int
    version: str
    page_capacity: int
    page_bytes: int
    weights: int
    address: str
    server: str = ""
    pid: int = 0
    inputs: int = 0
    rail: str = ""


class Loaded(Message, frozen=True, tag=True, array_like=True):
    device: str
    stage: Stage
    spec: ModelSpec
    nbytes: int


class Refused(Message, frozen=True, tag=True, array_like=True):
    """A stage could not be loaded."""

    device: str
    stage: Stage
    reason: str


class Done(Message, frozen=True, tag=True, array_like=True):
    """Rows that are through their last hop: K and V of `counts` tokens are written on all their path.

    `sampled`: in the order of `seqs`, None where none was asked for; behind a stride the last token stands for all of them.
    `turns`: as in Pass; what comes of an odd one is worth something only together with its Verdict.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    counts: tuple[int, ...]
    sampled: tuple[Sampled | None, ...]
    prompts: tuple[PromptLogprobs, ...] = ()
    turns: tuple[int, ...] = ()


class Verdict(Message, frozen=True, tag=True, array_like=True):
    """Rows that were predicted and have run: whether the prediction stands, and its least cosine with what it was to be.

    If it does not, the row itself is on its way now, under the same (even) turn.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    turns: tuple[int, ...]
    stands: tuple[bool, ...]
    cosines: tuple[float, ...]


class Lost(Message, frozen=True, tag=True, array_like=True):
    """Rows that will not come through. `retry`: the sequences are well, but their K and V here are not (no pages, a hop that was cut off);
    else a step failed on them."""

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    reason: str
    retry: bool


class Won(Message, frozen=True, tag=True, array_like=True):
    """Hops that `device` has offered, and who runs them from now on (`devices`), beginning with rows of `counts` tokens at `starts`."""

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    devices: tuple[str, ...]


class Report(Message, frozen=True, tag=True, array_like=True):
    """An agent's state, once per period: rows waiting, here and by the block that they enter at, and totals since it began (`busy`: ns).

    `links`: other agents that tensors go to directly, and how that stands: `direct`, `making`, or why they go by the host's memory.
    """

    device: str
    queued: int
    steps: int
    busy: int
    tokens: int
    pages_free: int
    queues: tuple[tuple[str, int], ...]
    links: tuple[tuple[str, str], ...] = ()


# -- between their drivers ----------------------------------------------------------------------------------------------


class Peers(Message, frozen=True, tag=True, array_like=True):
    """Scheduler to agent: every agent there is, as (name, incarnation, address). Whoever is not in it any more is gone.

    The first one is the answer to Ready. `rails`: of each of them (`Ready.rail`); empty where none has one.
    """

    agents: tuple[tuple[str, int, str], ...]
    rails: tuple[str, ...] = ()


class Halt(Message, frozen=True, tag=True, array_like=True):
    """Scheduler to agent: end after the step under way."""


class Beat(Message, frozen=True, tag=True, array_like=True):
    """Agent to scheduler, from a thread of its own: its process lives, and its loop has been at one thing for `stalled_ms`."""

    stalled_ms: int


class Severed(Message, frozen=True, tag=True, array_like=True):
    """Agent to scheduler: its link with another agent is cut; what was on it may be lost."""

    peer: str
    incarnation: int
    reason: str


class Denial(Message, frozen=True, tag=True, array_like=True):
    """To whoever sent what cannot be taken: why. Nothing more will be taken of it, nor sent to it."""

    reason: str


class Meet(Message, frozen=True, tag=True, array_like=True):
    """Agent to agent, while a direct link is made: a key of its rendezvous. `outgoing`: of the link on which whoever says this sends."""

    outgoing: bool
    key: str
    value: bytes


class Unlinked(Message, frozen=True, tag=True, array_like=True):
    """Agent to agent: a direct link is over, and what was under way on it is lost. `outgoing`: as in Meet."""

    outgoing: bool
    reason: str


ToAgent = Load | Drop | Open | Close | Go | Gone | Receive | Settle | Pass | Want | Pages | Offer | Bid | Retract
ToScheduler = Ready | Loaded | Refused | Done | Lost | Verdict | Won | Moved | Stuck | Report
ToDriver = Peers | Halt | Beat | Severed | Denial | Meet | Unlinked
