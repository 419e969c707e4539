"""Messages from the scheduler to agents: stages, sequences, rows to run, migrations."""

from __future__ import annotations

from runtime.chains import Hop, RunAhead, Stage
from runtime.messages.base import Message
from runtime.types import SequenceRequest


class LoadStages(Message, frozen=True, tag=True, array_like=True):
    """Make stages ready. Answered by one Loaded or Refused each.

    `blocks[i]`: the blocks of stage i in order. `limits`: rows of a step that may pass a block, where it has a limit of
    its own (BL-14).
    """

    stages: tuple[Stage, ...]
    blocks: tuple[tuple[str, ...], ...]
    limits: tuple[tuple[str, int], ...] = ()


class UnloadStages(Message, frozen=True, tag=True, array_like=True):
    """Let stages go; no sequence is on them any more."""

    stages: tuple[Stage, ...]


class OpenSequences(Message, frozen=True, tag=True, array_like=True):
    """Learn sequences that come over this device. `outputs`: tokens they have produced before.

    `keep[i]`: one that is here already goes on, under the new epoch and path, with the K and V of its first
    `computed[i]` tokens in the layers that it still has here; else it begins anew. `shared[i]`: (other sequence of the
    same domain on this device, tokens): its first pages are this one's too (BL-32); None for none. `ahead[i]`: which
    hop of it is predicted (BL-25); none at all where it is empty.
    `offers[i]`: hops that are offered, each to these devices (BL-23); to whom this goes stands in the path in place of
    the others.
    """

    epochs: tuple[int, ...]
    requests: tuple[SequenceRequest, ...]
    outputs: tuple[tuple[int, ...], ...]
    paths: tuple[tuple[Hop, ...], ...]
    keep: tuple[bool, ...]
    computed: tuple[int, ...]
    shared: tuple[tuple[str, int] | None, ...]
    speculative_hops: tuple[RunAhead | None, ...] = ()
    offers: tuple[tuple[tuple[int, tuple[str, ...]], ...], ...] = ()


class CloseSequences(Message, frozen=True, tag=True, array_like=True):
    """Forget sequences, in whatever phase they are; their pages are free once no step writes them. Later epochs of them
    stay.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]


class PeerDown(Message, frozen=True, tag=True, array_like=True):
    """Another device is gone: nothing will come from there."""

    device: str


class RunRows(Message, frozen=True, tag=True, array_like=True):
    """Run these rows from their first hop on, which is on this device: `tokens` (all rows' back to back, `counts` of
    each) at `starts`.

    `sample`: choose a token behind the last one. `generated`: tokens produced so far. `steps`: the decode credit:
    up to so many tokens may be decoded before they are told of (only where the path has one hop). `turns`: of rows
    of sequences that are predicted, growing and even, in the order in which they supersede what began at or behind
    their start; 0 for all others. `ahead`: whether a row may be predicted. Both are empty where there is none of
    it.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    tokens: tuple[int, ...]
    sample: tuple[bool, ...]
    generated: tuple[int, ...]
    steps: tuple[int, ...]
    attempts: tuple[int, ...] = ()
    speculate: tuple[bool, ...] = ()
    batch: int = 0


class StartMigration(Message, frozen=True, tag=True, array_like=True):
    """To the destination: bring here the K and V that a sequence has in these components, tokens [0, upto), from
    `source`.

    `layers`: attention layers [first, last) of the chain's that they have, `page_tokens` to a page. `tokens`: its first
    ones, to recompute pages from the front by that stage, which must be loaded (empty: copy only, unless `inputs`: by
    what the source kept of the hidden states that came into it). `copy`: whether pages come from the back (false:
    recompute only). A later StartMigration of the same move brings what has grown since (`upto` larger).
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
    from_activations: bool = False


class FinishMigration(Message, frozen=True, tag=True, array_like=True):
    """To the destination: the move is over. Committed, its pages are the sequence's, whose OpenSequences under `epoch`
    is next; else they go.
    """

    move: int
    seq: str
    epoch: int
    commit: bool
