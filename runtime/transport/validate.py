"""Validate decoded messages: columns of one length, numbers in range, matching arrays, and the true sender's name.

Any fault raises a WireError and nothing else. Does not depend on bytes or sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate, pairwise
from math import isfinite
from typing import NamedTuple

from runtime.chains import Array
from runtime.messages import (
    AgentHello,
    AgentStats,
    AttendLoans,
    Bid,
    CloseSequences,
    EndLoan,
    ForwardRows,
    HopAssigned,
    HostWeights,
    LengthsProbed,
    LoadStages,
    LoansAttended,
    MendPages,
    Message,
    MigrationFailed,
    MigrationReady,
    Offer,
    OpenSequences,
    PageData,
    PageRequest,
    PeerList,
    PoolBeat,
    PromptEntry,
    ReadAhead,
    RendezvousKey,
    Retract,
    RowsDone,
    RowsLost,
    RunRows,
    SaveSequences,
    SendAway,
    SpeculationResult,
    StageLoadFailed,
    StageReady,
    StartMigration,
)
from runtime.messages.to_agent import AHEAD_STAGES
from runtime.messages.to_scheduler import HOST_CHANGES


class WireError(Exception):
    """Raised for data that is not a valid message. The text names the fault and contains nothing of the data."""


#: Most characters of a tensor transport's name and of a rendezvous key, and most bytes of a key's value (mostly
#: addresses of some hundred bytes).
_MAX_RAIL, _MAX_KEY, _MAX_VALUE = 200, 200, 1 << 16
#: Most hops in a report, and most buckets in a forecast of a length.
_MAX_HOPS, _MAX_BUCKETS = 8, 1 << 12

#: Columns of equal length.
_COLUMNS: dict[type[Message], tuple[str, ...]] = {
    LoadStages: ("stages", "blocks"),
    ReadAhead: ("stages", "blocks", "counts"),
    OpenSequences: ("epochs", "requests", "outputs", "paths", "keep", "computed", "shared"),
    CloseSequences: ("seqs", "epochs"),
    SaveSequences: ("seqs", "epochs", "tokens"),
    RunRows: ("seqs", "epochs", "starts", "counts", "sample", "generated", "steps"),
    ForwardRows: ("seqs", "epochs", "hops", "starts", "counts", "sample", "generated"),
    RowsDone: ("seqs", "epochs", "counts", "sampled"),
    RowsLost: ("seqs", "epochs"),
    LengthsProbed: ("seqs", "lengths"),
    SpeculationResult: ("seqs", "epochs", "attempts", "stands", "cosines"),
    Offer: ("seqs", "epochs", "hops", "counts"),
    Bid: ("seqs", "epochs", "hops"),
    Retract: ("seqs", "epochs", "hops"),
    HopAssigned: ("seqs", "epochs", "hops", "starts", "counts", "devices"),
}
#: Columns that are as long as `epochs`, or empty.
_PERHAPS: dict[type[Message], tuple[str, ...]] = {
    OpenSequences: ("speculative_hops", "offers", "entries", "saves", "swapped"),
    RunRows: ("attempts", "speculate"),
    ForwardRows: ("attempts", "speculate"),
    RowsDone: ("attempts", "earlier"),
}
#: Columns of numbers >= 0.
_NATURAL = {
    OpenSequences: ("computed", "swapped"),
    SaveSequences: ("tokens",),
    RunRows: ("starts", "counts", "generated", "steps", "attempts"),
    ForwardRows: ("hops", "starts", "counts", "generated", "attempts"),
    RowsDone: ("counts", "attempts"),
    SpeculationResult: ("attempts",),
    Offer: ("hops", "counts"),
    Bid: ("hops",),
    Retract: ("hops",),
    HopAssigned: ("hops", "starts", "counts"),
    SendAway: ("layers",),
}
#: Fields with numbers >= 0.
_COUNTS: dict[type[Message], tuple[str, ...]] = {
    **dict.fromkeys((RunRows, RowsDone), ("batch",)),
    ForwardRows: ("batch", "sent"),
    AgentHello: ("page_capacity", "page_bytes", "weights", "pid", "activation_cache_bytes", "budget", "host_memory"),
    StageReady: ("nbytes", "took", "host"),
    MigrationReady: ("nbytes", "activation_bytes", "copying", "recomputing"),
    AgentStats: ("queued", "steps", "busy", "tokens", "pages_free", "prompt_tokens", "host_kv", "host_weights"),
    StartMigration: ("first", "upto", "recall", "skipped"),
    AttendLoans: ("turn",),
    LoansAttended: ("turn",),
    SendAway: ("lo", "loan", "first", "last"),
    EndLoan: ("loan", "upto"),
    MendPages: ("first",),
    PoolBeat: ("capacity", "free"),
    PageRequest: ("lo", "hi", "loan"),
    PageData: ("lo", "hi"),
}


def speaker(message: Message) -> str | None:
    """Return the sender that a message names; None if its type names none."""
    name = _SPEAKERS.get(type(message))
    return None if name is None else str(getattr(message, name))


#: Fields in which messages name their sender. (The name in an AgentHello is checked where agents are accepted.)
_SPEAKERS: dict[type[Message], str] = {
    **dict.fromkeys(
        (
            StageReady,
            StageLoadFailed,
            RowsDone,
            RowsLost,
            SpeculationResult,
            HopAssigned,
            HostWeights,
            LengthsProbed,
            MigrationReady,
            MigrationFailed,
            AgentStats,
            Offer,
            Bid,
            PoolBeat,
        ),
        "device",
    ),
    PageRequest: "by",
}


class _Plan(NamedTuple):
    """What is checked of a kind of messages: names of fields, as in the tables above."""

    columns: tuple[str, ...]
    perhaps: tuple[str, ...]
    natural: tuple[str, ...]
    counts: tuple[str, ...]


@cache
def _plan(kind: type[Message]) -> _Plan:
    return _Plan(*(table.get(kind, ()) for table in (_COLUMNS, _PERHAPS, _NATURAL, _COUNTS)))


def check(message: Message, arrays: Sequence[Array]) -> None:
    """Raise WireError if a message contradicts itself or its arrays."""
    kind = type(message)
    columns, perhaps, natural, counts = _plan(kind)
    if columns and len({len(getattr(message, name)) for name in columns}) > 1:
        raise WireError(f"columns of a {kind.__name__} differ in length")
    if perhaps and any(len(getattr(message, name)) not in (0, len(message.epochs)) for name in perhaps):  # type: ignore[attr-defined]
        raise WireError(f"columns of a {kind.__name__} differ in length")
    if natural and any(min(getattr(message, name), default=0) < 0 for name in natural):
        raise WireError(f"a {kind.__name__} with negative numbers")
    for name in counts:
        if getattr(message, name) < 0:
            raise WireError(f"a {kind.__name__} with negative numbers")
    check_arrays(message, arrays)


def check_arrays(message: Message, arrays: Sequence[Array]) -> None:
    """Check a message rebuilt from a difference to a checked one: its columns are valid, its arrays may not be."""
    kind = type(message)
    if not _CHECKS.get(kind, _no_arrays)(message, arrays):
        raise WireError(f"a {kind.__name__} and its arrays or columns disagree")


def _no_arrays(message: Message, arrays: Sequence[Array]) -> bool:
    return not arrays


def _start(message: StartMigration, arrays: Sequence[Array]) -> bool:
    return not arrays and (message.shared is None or message.shared[1] > 0)


def _go(message: RunRows, arrays: Sequence[Array]) -> bool:
    return not arrays and sum(message.counts) == len(message.tokens) and len(message.attempts) == len(message.speculate)


def _open(message: OpenSequences, arrays: Sequence[Array]) -> bool:
    """Return whether predicted hops lie in the path and are not its last, and offered hops are not its first.

    Entries must be inside a stage, with as many tokens per key.
    """
    ahead = zip(message.speculative_hops, message.paths, strict=False)
    offers = zip(message.offers, message.paths, strict=False)
    return (
        not arrays
        and all(each is None or 0 <= each.hop < len(path) - 1 for each, path in ahead)
        and all(0 < hop < len(path) and devices for some, path in offers for hop, devices in some)
        and all(each is None or _enters(each) for each in message.entries)
        and all(each.at > 0 for some in message.saves for each in some)
    )


def _enters(entry: PromptEntry) -> bool:
    whole = bool(entry.keys) and entry.tokens > 0 and entry.tokens % len(entry.keys) == 0
    return whole and entry.layers > 0 and entry.at > 0


def _pass(message: ForwardRows, arrays: Sequence[Array]) -> bool:
    """Return whether arrays are hidden states [tokens, width] of whole rows, and no row has 0 tokens.

    So no row claims tokens for which no bytes were sent.
    """
    if len(message.attempts) != len(message.speculate) or 0 in message.counts:
        return False
    if any(len(each.shape) != 2 or 0 in each.shape for each in arrays):
        return False
    if len(arrays) == 1:
        return arrays[0].shape[0] == sum(message.counts)
    ends = set(accumulate(message.counts, initial=0))
    bounds = list(accumulate((each.shape[0] for each in arrays), initial=0))
    return bounds[-1] == sum(message.counts) and ends.issuperset(bounds)


def _pages(message: PageData, arrays: Sequence[Array]) -> bool:
    """Return whether the array is pages [page sets x layers, page bytes] or hidden states [tokens, width].

    With an error there must be no array.
    """
    if message.error:
        return not arrays
    if message.before:
        return (
            len(arrays) == 1
            and len(arrays[0].shape) == 2
            and 0 < arrays[0].shape[0] == message.hi - message.lo
            and arrays[0].shape[1] > 0
        )
    return len(arrays) == 1 and arrays[0].dtype == "uint8" and len(arrays[0].shape) == 2


def _ready(message: AgentHello, arrays: Sequence[Array]) -> bool:
    steps = min(message.fetch_sets, message.recompute_chunk)
    return not arrays and len(message.tensor_transport) <= _MAX_RAIL and steps >= 1


def _report(message: AgentStats, arrays: Sequence[Array]) -> bool:
    return not arrays and len(message.hops) <= _MAX_HOPS and all(min(hop[1:]) >= 0 for hop in message.hops)


def _peers(message: PeerList, arrays: Sequence[Array]) -> bool:
    return not arrays and all(
        len(each) in (0, len(message.agents)) for each in (message.tensor_transports, message.sides)
    )


def _meet(message: RendezvousKey, arrays: Sequence[Array]) -> bool:
    return not arrays and 0 < len(message.key) <= _MAX_KEY and len(message.value) <= _MAX_VALUE


def _done(message: RowsDone, arrays: Sequence[Array]) -> bool:
    return (
        not arrays
        and all(one is None or one.token >= 0 for one in message.sampled)
        and all(one.token >= 0 for some in message.earlier for one in some)
    )


def _outcome(message: SpeculationResult, arrays: Sequence[Array]) -> bool:
    return not arrays and all(map(isfinite, message.cosines))


def _probed(message: LengthsProbed, arrays: Sequence[Array]) -> bool:
    """Return whether each forecast has growing edges from 0, and a mass for each of them, some of it above 0."""
    return not arrays and all(
        0 < len(each.mass) == len(each.edges) <= _MAX_BUCKETS
        and each.edges[0] == 0
        and all(low < high for low, high in pairwise(each.edges))
        and all(isfinite(mass) and mass >= 0 for mass in each.mass)
        and sum(each.mass) > 0
        for each in message.lengths
    )


def _load(message: LoadStages, arrays: Sequence[Array]) -> bool:
    counts = message.counts
    return not arrays and len(counts) in (0, len(message.stages)) and all(each > 0 for some in counts for each in some)


def _ahead(message: ReadAhead, arrays: Sequence[Array]) -> bool:
    counts = message.counts
    return not arrays and len(message.stages) <= AHEAD_STAGES and all(each > 0 for some in counts for each in some)


def _host(message: HostWeights, arrays: Sequence[Array]) -> bool:
    return not arrays and len(message.blocks) <= HOST_CHANGES and all(nbytes >= 0 for _, nbytes in message.blocks)


def _loaded(message: StageReady, arrays: Sequence[Array]) -> bool:
    return not arrays and message.disk >= -1


def _mend(message: MendPages, arrays: Sequence[Array]) -> bool:
    """Return whether there are tokens, layers that were lost, and for all but the first hop hidden states."""
    lost, path, count = message.lost, message.path, len(message.tokens)
    shaped = all(len(each.shape) == 2 and each.shape[0] == count and each.shape[1] > 0 for each in arrays)
    return (
        bool(count and lost and path)
        and all(0 <= each.layers[0] < each.layers[1] for each in lost)
        and min(lo for _, lo in path) >= 0
        and len(arrays) == (path[0][1] > 0)
        and shaped
    )


def _beat(message: PoolBeat, arrays: Sequence[Array]) -> bool:
    return not arrays and all(pages >= 0 for _, pages in message.lent)


def _attend(message: AttendLoans, arrays: Sequence[Array]) -> bool:
    """Return whether queries are one array [tokens, heads, head_dim] with the tokens of its rows."""
    query = message.query
    rows = len(query.loans) == len(query.counts) > 0 and all(query.loans) and min(query.counts) > 0
    whole = rows and query.layer >= 0 and query.kv_heads > 0 and isfinite(query.scaling) and isfinite(query.softcap)
    shaped = all(len(each.shape) == 3 and each.shape[0] == sum(query.counts) for each in arrays)
    return whole and len(arrays) <= (not query.pull) and shaped


def _attended(message: LoansAttended, arrays: Sequence[Array]) -> bool:
    return not arrays if message.error else 0 < len(arrays) <= 2


_CHECKS: dict[type[Message], Callable[..., bool]] = {
    StartMigration: _start,
    MendPages: _mend,
    LoadStages: _load,
    ReadAhead: _ahead,
    HostWeights: _host,
    StageReady: _loaded,
    OpenSequences: _open,
    RunRows: _go,
    ForwardRows: _pass,
    PageData: _pages,
    RowsDone: _done,
    LengthsProbed: _probed,
    SpeculationResult: _outcome,
    AgentHello: _ready,
    AgentStats: _report,
    PeerList: _peers,
    RendezvousKey: _meet,
    AttendLoans: _attend,
    LoansAttended: _attended,
    PoolBeat: _beat,
}
