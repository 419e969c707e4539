"""Define the messages from agents to the scheduler: hello, stages, results of rows, migrations, statistics."""

from __future__ import annotations

from runtime.chains import Lack, Stage
from runtime.messages.base import Message
from runtime.types import LengthMasses, ModelSpec, PromptLogprobs, Sampled

#: Largest number of blocks in one `HostWeights`.
HOST_CHANGES = 1024


class AgentHello(Message, frozen=True, tag=True, array_like=True):
    """Announce an agent and its capacity.

    Fields:
        protocol: `PROTOCOL` of the agent.
        page_capacity: Pages of the KV cache.
        page_bytes: Bytes of a page, K and V together.
        weights: Bytes of weights that the agent may hold; 0 for no limit.
        address: Address at which the other agents reach it.
        server: Machine it runs on; empty if unknown.
        pid: Process id on that machine; 0 without one.
        activation_cache_bytes: Bytes of stage inputs (hidden states) kept for migrations; 0 for none.
        tensor_transport: Transport for direct tensor transfers; agents with the same one can be linked. Empty: only
            through host memory.
        lacks: What the engine cannot do (`chains.Lack`).
        budget: Bytes of weights and pages together, where pages get what weights leave; 0: as many pages as
            `page_capacity`, whatever the weights take.
        fetch_sets: Page sets of a migration to it that are under way at once.
        recompute_chunk: Tokens that a migration to it recomputes at a time.
        host_memory: Bytes of host memory for K and V of sequences that give way, shared with weights that wait.
        copies_beside: Whether K and V are copied to and from host memory while steps run.
        between_steps: Whether it handles messages between its steps only.
        side: Address at which it answers queries to lent pages; empty: it does not.
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
    activation_cache_bytes: int = 0
    tensor_transport: str = ""
    lacks: tuple[Lack, ...] = ()
    budget: int = 0
    fetch_sets: int = 8
    recompute_chunk: int = 64
    host_memory: int = 0
    copies_beside: bool = False
    between_steps: bool = False
    side: str = ""


class StageReady(Message, frozen=True, tag=True, array_like=True):
    """Report that a stage is loaded.

    Fields:
        nbytes: Bytes of all weights on the device now.
        took: Nanoseconds of work for this stage, without the time it waited for earlier ones.
        disk: Bytes of its blocks that were read from disk; -1 if the engine does not say.
        host: Bytes of its blocks that host memory still had.
    """

    device: str
    stage: Stage
    spec: ModelSpec
    nbytes: int
    took: int = 0
    disk: int = -1
    host: int = 0


class HostWeights(Message, frozen=True, tag=True, array_like=True):
    """Report changes of what host memory keeps of blocks that are not on the device, after loads and unloads (UN-04).

    Fields:
        blocks: (block, bytes of it that are kept now); 0: none. At most `HOST_CHANGES` of them, more follow with the
            next message.
    """

    device: str
    blocks: tuple[tuple[str, int], ...]


class StageLoadFailed(Message, frozen=True, tag=True, array_like=True):
    """Report that a stage could not be loaded."""

    device: str
    stage: Stage
    reason: str


class RowsDone(Message, frozen=True, tag=True, array_like=True):
    """Report rows that left their last hop. K and V of `counts` tokens are written on the whole path.

    Fields:
        counts: Tokens of each row, those of a decode credit included.
        sampled: The sampled token of each row, in the order of `seqs`; None where no token was requested.
        prompts: Log-probabilities of prompt tokens that the rows computed.
        attempts: As in RunRows. The result of an odd attempt is valid only together with its SpeculationResult.
        earlier: With a decode credit, the tokens before the last one, in order. Empty without one, and in simulations,
            where the last token stands for all of them.
        batch: As in RunRows.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    counts: tuple[int, ...]
    sampled: tuple[Sampled | None, ...]
    prompts: tuple[PromptLogprobs, ...] = ()
    attempts: tuple[int, ...] = ()
    earlier: tuple[tuple[Sampled, ...], ...] = ()
    batch: int = 0


class SpeculationResult(Message, frozen=True, tag=True, array_like=True):
    """Report whether predictions of rows hold, after the real hops have run (BL-25).

    If a prediction does not hold, the real row continues under the same even attempt.

    Fields:
        attempts: The even attempts of the real rows.
        stands: Whether the prediction is accepted.
        cosines: Smallest cosine over the row's tokens between the predicted and the real output.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    attempts: tuple[int, ...]
    stands: tuple[bool, ...]
    cosines: tuple[float, ...]


class LengthsProbed(Message, frozen=True, tag=True, array_like=True):
    """Report what a probe forecasts of answers' lengths, from the agent that runs the component before it (TI-10).

    It depends on the sequence's tokens alone, so it has no epochs: a forecast holds wherever it is placed by then.
    """

    device: str
    seqs: tuple[str, ...]
    lengths: tuple[LengthMasses, ...]


class RowsLost(Message, frozen=True, tag=True, array_like=True):
    """Report rows that will not finish.

    Fields:
        retry: True: the sequences can run again, but their K and V here are invalid (no pages, a broken hop).
            False: the step failed on these rows.
        intact: Whether K and V of all tokens before these rows are still valid on the whole path: the same rows may run
            again. Only K and V on another device could not be reached.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    reason: str
    retry: bool
    intact: bool = False


class HopAssigned(Message, frozen=True, tag=True, array_like=True):
    """Report which agents run hops that `device` offered (BL-23).

    Fields:
        hops: Index of the hop in each sequence's path.
        starts: Position of the first row's first token.
        counts: Tokens of that row.
        devices: The device that runs each hop from now on.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    devices: tuple[str, ...]


class MigrationReady(Message, frozen=True, tag=True, array_like=True):
    """Report that all K and V requested by StartMigration have arrived (destination to scheduler).

    Fields:
        copied: Token ranges that were copied.
        recomputed: Token ranges that were recomputed; disjoint from `copied`, together they cover all tokens.
        nbytes: Bytes of K and V received.
        activation_bytes: Bytes of hidden states received.
        reason: Why recomputing did not work as planned; empty if it did.
        copying, recomputing: Nanoseconds from the first StartMigration until the latest page was written, and until the
            latest token was recomputed; 0 for none.
    """

    device: str
    move: int
    seq: str
    copied: tuple[tuple[int, int], ...]
    recomputed: tuple[tuple[int, int], ...]
    nbytes: int
    activation_bytes: int = 0
    reason: str = ""
    copying: int = 0
    recomputing: int = 0


class MigrationFailed(Message, frozen=True, tag=True, array_like=True):
    """Report that a migration cannot continue; the destination has dropped what it had received."""

    device: str
    move: int
    seq: str
    reason: str


class AgentStats(Message, frozen=True, tag=True, array_like=True):
    """Report an agent's load and totals, once per period.

    Fields:
        queued: Rows waiting.
        steps: Steps run since the agent started.
        busy: Nanoseconds spent in steps since the agent started.
        tokens: Tokens run since the agent started.
        queues: (block at which rows enter, rows waiting there).
        links: (agent, state of the direct link to it): `direct`, `making`, or the reason why tensors go through host
            memory.
        prompt_tokens: Tokens of prompts among the rows waiting.
        hops: (device that rows came from, their bytes, nanoseconds on the way, whether their message was in full and
            not of a batch that decodes on) of rows that came while this device waited, since the last report. Clocks
            of devices on different machines differ.
        host_kv, host_weights: Bytes of host memory with K and V, and with weights that wait to be loaded again.
        copies: (whether to host memory, bytes, nanoseconds) of K and V that were copied, since the last report.
        prompts: (stage, tokens, tokens before them, nanoseconds) of steps with tokens of prompts, since the last
            report; the time of the other rows of these steps is not counted. Only where there is host memory.
    """

    device: str
    queued: int
    steps: int
    busy: int
    tokens: int
    pages_free: int
    queues: tuple[tuple[str, int], ...]
    links: tuple[tuple[str, str], ...] = ()
    prompt_tokens: int = 0
    hops: tuple[tuple[str, int, int, bool], ...] = ()
    host_kv: int = 0
    host_weights: int = 0
    copies: tuple[tuple[bool, int, int], ...] = ()
    prompts: tuple[tuple[str, int, int, int], ...] = ()
