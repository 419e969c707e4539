"""Define the messages from the scheduler to agents: stages, sequences, rows to run, migrations."""

from __future__ import annotations

import msgspec

from runtime.chains import Hop, RunAhead, Stage
from runtime.messages.base import Message
from runtime.types import SequenceRequest


class LoadStages(Message, frozen=True, tag=True, array_like=True):
    """Load stages. The agent answers each with StageReady or StageLoadFailed.

    Fields:
        blocks: Blocks of each stage, in order.
        limits: (block, rows of a step that may pass it) for blocks with a batch limit of their own (BL-14).
        pages: Pages that may be in use from before these loads on; -1: as many as so far.
        counts: Components of each block of each stage, in order; empty if what host memory keeps is not to be reported.
    """

    stages: tuple[Stage, ...]
    blocks: tuple[tuple[str, ...], ...]
    limits: tuple[tuple[str, int], ...] = ()
    pages: int = -1
    counts: tuple[tuple[int, ...], ...] = ()


#: Most stages of one `ReadAhead`.
AHEAD_STAGES = 16


class ReadAhead(Message, frozen=True, tag=True, array_like=True):
    """Read the weights of the stages that are needed next into host memory, in this order, as far as they fit (QL-13).

    It takes the place of the one before; loads come first. What host memory has of these stages leaves it last. The
    agent answers with HostWeights.

    Fields:
        stages: At most `AHEAD_STAGES`; none: read nothing.
        blocks, counts: As in LoadStages.
    """

    stages: tuple[Stage, ...]
    blocks: tuple[tuple[str, ...], ...]
    counts: tuple[tuple[int, ...], ...]


class UnloadStages(Message, frozen=True, tag=True, array_like=True):
    """Unload stages. No sequence is on them any more.

    Fields:
        pages: Pages that may be in use once they are gone; -1: as many as so far.
        coming: Stages that are loaded in their place: what host memory has of these stays.
    """

    stages: tuple[Stage, ...]
    pages: int = -1
    coming: tuple[Stage, ...] = ()


class PromptEntry(msgspec.Struct, frozen=True, array_like=True):
    """Start a sequence from the K and V of another chain's first layers, and hidden states behind them (UN-15).

    Fields:
        seq: Sequence on this device of which the first pages are shared, in the first layers.
        tokens: Tokens that are shared.
        layers: Attention layers with shared pages.
        at: Component that these tokens enter, with saved hidden states.
        keys: Keys of these states, one per page set.
    """

    seq: str
    tokens: int
    layers: int
    at: int
    keys: tuple[bytes, ...]


class PromptSave(msgspec.Struct, frozen=True, array_like=True):
    """Save the hidden states of a prompt that enter component `at`, under these keys, one per page set (UN-15).

    An empty key: not that page set.
    """

    at: int
    keys: tuple[bytes, ...]


class OpenSequences(Message, frozen=True, tag=True, array_like=True):
    """Open sequences that run on this device.

    Fields:
        outputs: Tokens that each sequence has produced before.
        paths: Path of each sequence. For a hop that is offered to several devices, the path names the receiver.
        keep: True: the sequence continues under the new epoch and path, with the K and V of its first `computed` tokens
            that are here already or were migrated here. False: it starts without K and V.
        shared: (sequence of the same KV domain on this device, tokens): the first pages are shared with it (BL-32);
            None without sharing.
        speculative_hops: Hop of each sequence that is predicted (BL-25); empty if none is.
        offers: Hops of each sequence that are offered to several devices, as (hop, devices) (BL-23).
        entries: How each sequence starts with the first layers of another chain; empty if none does.
        saves: Hidden states to be saved while each sequence's prompt runs; empty if none are.
        swapped: Epoch under which each sequence's K and V were saved in host memory, from where the first `computed`
            tokens come back; 0 for those that were not. Empty if none were (QL-10).
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
    entries: tuple[PromptEntry | None, ...] = ()
    saves: tuple[tuple[PromptSave, ...], ...] = ()
    swapped: tuple[int, ...] = ()


class DropStates(Message, frozen=True, tag=True, array_like=True):
    """Drop saved hidden states of prompts (UN-15). Sequences that have started from them keep them."""

    keys: tuple[bytes, ...]


class CloseSequences(Message, frozen=True, tag=True, array_like=True):
    """Drop sequences, whatever they are doing, with what host memory has of them. Pages are freed once no step writes.

    A sequence that is open, or was saved, under a later epoch stays.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]


class SaveSequences(Message, frozen=True, tag=True, array_like=True):
    """Close sequences that give way, and keep their K and V in host memory (QL-10).

    `tokens`: tokens of each sequence with complete K and V. What cannot be kept is only closed: the OpenSequences that
    asks for it is then answered by RowsLost.
    """

    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    tokens: tuple[int, ...]


class PeerDown(Message, frozen=True, tag=True, array_like=True):
    """Report that another device is gone and will send nothing more."""

    device: str


class RunRows(Message, frozen=True, tag=True, array_like=True):
    """Run these rows from their first hop, which is on this device.

    Fields:
        starts: Position of each row's first token.
        counts: Tokens of each row.
        tokens: Token ids of all rows, back to back.
        sample: Whether a token is sampled after the row's last position.
        generated: Tokens that the sequence has produced so far.
        steps: Decode credit: tokens that may be decoded before they are reported; above 1 only on paths of one hop.
        attempts: Even, growing numbers of rows of sequences with a speculated hop, and of rows that are sent again; a
            later attempt supersedes rows that started at or after its start. 0 for the rest; empty if all are 0.
        speculate: Whether each row may be predicted; empty if there are no attempts.
        batch: Number of the persistent batch that the rows are; 0 for none. A later message with the same number has
            the same rows in the same order, one token on.
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
    """Copy or recompute the K and V of tokens [0, upto) of a sequence in these components (scheduler to destination).

    A later StartMigration of the same move covers the tokens computed since, with a larger `upto`.

    Fields:
        stage: The components that move. It must be loaded here if pages are recomputed.
        layers: Attention layers [first, last) of the chain in these components.
        page_tokens: Tokens per page.
        source: Device that holds the K and V.
        tokens: Token ids from which pages are recomputed from the front; empty if recomputing does not start from
            tokens.
        copy: Whether pages are copied from the back; false: recompute only.
        from_activations: Recompute from the hidden states of the stage's input that the source cached.
        first: Tokens before it are not brought; whole page sets.
        loan: Whether this device only holds the pages for the source, which attends to them here (IL-04), until the
            sequence is closed. Then neither the stage nor its weights are needed here.
        recall: Number of the loan at the source of which these are the last page sets; 0: none. They become a part of
            the sequence's pages here (IL-25).
        skipped: With `loan` and `recall`: attention layers of the debtor's hop before the first of `layers`.
        as_written: Whether the last tokens may not be computed yet: their row has been sent (TI-15).
        shared: A sequence that is open here, and how many of its first tokens are shared instead of brought: whole page
            sets, no more than `upto`. It holds for the first StartMigration of a move.
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
    first: int = 0
    loan: bool = False
    recall: int = 0
    as_written: bool = False
    skipped: int = 0
    shared: tuple[str, int] | None = None

    @property
    def hop_layers(self) -> tuple[int, int]:
        """`layers`, counted from the first one of the debtor's hop."""
        return self.skipped, self.skipped + self.layers[1] - self.layers[0]


class SendAway(Message, frozen=True, tag=True, array_like=True):
    """Free the pages of tokens [first, last) of a sequence here: another device holds them now (IL-04).

    Attention to them is asked of that device from the next row on.

    Fields:
        lo: First component of the hop here.
        loan: Number of the loan at the creditor.
        layers: Attention layers [first, last) of the hop, counted from its first one.
    """

    seq: str
    epoch: int
    lo: int
    loan: int
    creditor: str
    first: int
    last: int
    layers: tuple[int, int]


class LostLayers(msgspec.Struct, frozen=True, array_like=True):
    """Attention layers [first, last) of a hop, counted from its first one, that a part of this loan was of."""

    loan: int
    layers: tuple[int, int]


class MendPages(Message, frozen=True, tag=True, array_like=True):
    """Compute tokens from `first` on of a sequence again: a device that held K and V of them is gone (IL-18).

    They are whole page sets, and K and V of all tokens before them are there. No row of the sequence is under way. An
    agent that is not the last one of `path` sends it on, with its hidden states [tokens, width]. The last one answers
    with MigrationReady once they are pages of the sequence there; each may answer with MigrationFailed.

    Fields:
        move: Its number, of those of migrations.
        path: Devices from this one on to the one with lost layers, each with the first component of its hop.
        lost: The layers that were lost on the last one; those of all other layers stay as they are.
        tokens: Token ids.
    """

    move: int
    seq: str
    epoch: int
    path: tuple[tuple[str, int], ...]
    lost: tuple[LostLayers, ...]
    first: int
    tokens: tuple[int, ...]


class EndLoan(Message, frozen=True, tag=True, array_like=True):
    """Hold only the tokens of a loan before `upto` of the sequence: the rest is at the debtor again (IL-25)."""

    seq: str
    epoch: int
    loan: int
    upto: int


class FinishMigration(Message, frozen=True, tag=True, array_like=True):
    """End a migration (scheduler to destination).

    Fields:
        commit: True: the pages become the sequence's; its OpenSequences under `epoch` follows. False: they are freed.
    """

    move: int
    seq: str
    epoch: int
    commit: bool
