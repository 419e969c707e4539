"""Messages from agents to the scheduler: hello, stages, results of rows, migrations, statistics."""

from __future__ import annotations

from runtime.chains import Lack, Stage
from runtime.messages.base import Message
from runtime.types import ModelSpec, PromptLogprobs, Sampled


class AgentHello(Message, frozen=True, tag=True, array_like=True):
    """An agent is there. `weights`: bytes of weights it may hold, 0 for no limit. `server`: the machine that it is
    on, empty if unknown;
    `pid`: its process there, 0 if it has none. `inputs`: bytes that it keeps of what came into its stages, for
    moves; 0 for none.
    `rail`: how its tensors may come and go directly: agents of the same one can be linked; empty: by the host's
    memory only.
    `lacks`: what its engine cannot do (`stages.Lack`).
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


class StageReady(Message, frozen=True, tag=True, array_like=True):
    device: str
    stage: Stage
    spec: ModelSpec
    nbytes: int


class StageLoadFailed(Message, frozen=True, tag=True, array_like=True):
    """A stage could not be loaded."""

    device: str
    stage: Stage
    reason: str


class RowsDone(Message, frozen=True, tag=True, array_like=True):
    """Rows that are through their last hop: K and V of `counts` tokens are written on all their path.

    `sampled`: in the order of `seqs`, None where none was asked for. `earlier`: the tokens of a decode credit
    before the last one, in the order in which they came; empty where there is none of it, and where simulated
    devices stride: the last token stands for all of them.
    `turns`: as in Pass; what comes of an odd one is worth something only together with its SpeculationResult.
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
    """Rows that were predicted and have run: whether the prediction stands, and its least cosine with what it was to
    be.

    If it does not, the row itself is on its way now, under the same (even) turn.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    attempts: tuple[int, ...]
    stands: tuple[bool, ...]
    cosines: tuple[float, ...]


class RowsLost(Message, frozen=True, tag=True, array_like=True):
    """Rows that will not come through. `retry`: the sequences are well, but their K and V here are not (no pages, a hop
    that was cut off); else a step failed on them."""

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    reason: str
    retry: bool


class HopAssigned(Message, frozen=True, tag=True, array_like=True):
    """Hops that `device` has offered, and who runs them from now on (`devices`), beginning with rows of `counts` tokens
    at `starts`.
    """

    device: str
    seqs: tuple[str, ...]
    epochs: tuple[int, ...]
    hops: tuple[int, ...]
    starts: tuple[int, ...]
    counts: tuple[int, ...]
    devices: tuple[str, ...]


class MigrationReady(Message, frozen=True, tag=True, array_like=True):
    """Destination to scheduler: all asked for is here. `copied`, `recomputed`: tokens of each, disjoint, together all
    of it.

    `nbytes`: that came, of K and V; `inputs`: of hidden states. `reason`: why the front has not worked as it was to,
    empty if it has.
    """

    device: str
    move: int
    seq: str
    copied: tuple[tuple[int, int], ...]
    recomputed: tuple[tuple[int, int], ...]
    nbytes: int
    activation_bytes: int = 0
    reason: str = ""


class MigrationFailed(Message, frozen=True, tag=True, array_like=True):
    """Destination to scheduler: the move cannot go on, and nothing of it is left here."""

    device: str
    move: int
    seq: str
    reason: str


class AgentStats(Message, frozen=True, tag=True, array_like=True):
    """An agent's state, once per period: rows waiting, here and by the block that they enter at, and totals since it
    began (`busy`: ns).

    `links`: other agents that tensors go to directly, and how that stands: `direct`, `making`, or why they go by the
    host's memory.
    """

    device: str
    queued: int
    steps: int
    busy: int
    tokens: int
    pages_free: int
    queues: tuple[tuple[str, int], ...]
    links: tuple[tuple[str, str], ...] = ()
