"""What must hold of a message before anything is taken for what it says it is: columns of one length, numbers in their
range, arrays that are its own, and nobody in whose name another speaks.

Contract: whatever is wrong is a WireError and nothing else. Knows no bytes and no sockets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isfinite

from runtime.chains import Array
from runtime.messages import (
    AgentHello,
    AgentStats,
    Bid,
    CloseSequences,
    ForwardRows,
    HopAssigned,
    LoadStages,
    Message,
    MigrationFailed,
    MigrationReady,
    Offer,
    OpenSequences,
    PageData,
    PageRequest,
    PeerList,
    RendezvousKey,
    Retract,
    RowsDone,
    RowsLost,
    RunRows,
    SpeculationResult,
    StageLoadFailed,
    StageReady,
)


class WireError(Exception):
    """What came is not a message, or contradicts itself. The text says in what, and holds nothing of what came."""


#: Characters of a rail's name, and of a key of a rendezvous; bytes of what stands under it (addresses, mostly: some
#: hundred).
_MAX_RAIL, _MAX_KEY, _MAX_VALUE = 200, 200, 1 << 16

#: Columns of one length.
_COLUMNS: dict[type[Message], tuple[str, ...]] = {
    LoadStages: ("stages", "blocks"),
    OpenSequences: ("epochs", "requests", "outputs", "paths", "keep", "computed", "shared"),
    CloseSequences: ("seqs", "epochs"),
    RunRows: ("seqs", "epochs", "starts", "counts", "sample", "generated", "steps"),
    ForwardRows: ("seqs", "epochs", "hops", "starts", "counts", "sample", "generated"),
    RowsDone: ("seqs", "epochs", "counts", "sampled"),
    RowsLost: ("seqs", "epochs"),
    SpeculationResult: ("seqs", "epochs", "attempts", "stands", "cosines"),
    Offer: ("seqs", "epochs", "hops", "counts"),
    Bid: ("seqs", "epochs", "hops"),
    Retract: ("seqs", "epochs", "hops"),
    HopAssigned: ("seqs", "epochs", "hops", "starts", "counts", "devices"),
}
#: Columns that are as long as the first one of their message, or empty.
_PERHAPS: dict[type[Message], tuple[str, ...]] = {
    OpenSequences: ("speculative_hops", "offers"),
    RunRows: ("attempts", "speculate"),
    ForwardRows: ("attempts", "speculate"),
    RowsDone: ("attempts", "earlier"),
}
#: Columns of numbers from 0 on.
_NATURAL = {
    OpenSequences: ("computed",),
    RunRows: ("starts", "counts", "generated", "steps", "attempts"),
    ForwardRows: ("hops", "starts", "counts", "generated", "attempts"),
    RowsDone: ("counts", "attempts"),
    SpeculationResult: ("attempts",),
    Offer: ("hops", "counts"),
    Bid: ("hops",),
    Retract: ("hops",),
    HopAssigned: ("hops", "starts", "counts"),
}
#: Numbers from 0 on.
_COUNTS: dict[type[Message], tuple[str, ...]] = {
    **dict.fromkeys((RunRows, ForwardRows, RowsDone), ("batch",)),
    AgentHello: ("page_capacity", "page_bytes", "weights", "pid", "activation_cache_bytes"),
    StageReady: ("nbytes",),
    MigrationReady: ("nbytes", "activation_bytes"),
    AgentStats: ("queued", "steps", "busy", "tokens", "pages_free"),
    PageRequest: ("lo", "hi"),
    PageData: ("lo", "hi"),
}


def speaker(message: Message) -> str | None:
    """Whose message it says it is, where it says so."""
    name = _SPEAKERS.get(type(message))
    return None if name is None else str(getattr(message, name))


#: Fields in which messages name whoever sends them. (What a AgentHello says is judged by whoever takes agents in.)
_SPEAKERS: dict[type[Message], str] = {
    **dict.fromkeys(
        (
            StageReady,
            StageLoadFailed,
            RowsDone,
            RowsLost,
            SpeculationResult,
            HopAssigned,
            MigrationReady,
            MigrationFailed,
            AgentStats,
            Offer,
            Bid,
        ),
        "device",
    ),
    PageRequest: "by",
}


def check(message: Message, arrays: Sequence[Array]) -> None:
    """Raises WireError for a message that contradicts itself or what is beside it."""
    kind = type(message)
    if len({len(getattr(message, name)) for name in _COLUMNS.get(kind, ())}) > 1:
        raise WireError(f"columns of a {kind.__name__} differ in length")
    perhaps = _PERHAPS.get(kind, ())
    if any(len(getattr(message, name)) not in (0, len(message.epochs)) for name in perhaps):  # type: ignore[attr-defined]
        raise WireError(f"columns of a {kind.__name__} differ in length")
    if any(min(getattr(message, name), default=0) < 0 for name in _NATURAL.get(kind, ())):
        raise WireError(f"a {kind.__name__} with negative numbers")
    if any(getattr(message, name) < 0 for name in _COUNTS.get(kind, ())):
        raise WireError(f"a {kind.__name__} with negative numbers")
    check_arrays(message, arrays)


def check_arrays(message: Message, arrays: Sequence[Array]) -> None:
    """As `check`, of a message whose columns are known to be right each for itself: they go on from one that was
    checked.
    """
    kind = type(message)
    if not _CHECKS.get(kind, _no_arrays)(message, arrays):
        raise WireError(f"a {kind.__name__} and its arrays or columns disagree")


def _no_arrays(message: Message, arrays: Sequence[Array]) -> bool:
    return not arrays


def _go(message: RunRows, arrays: Sequence[Array]) -> bool:
    return not arrays and sum(message.counts) == len(message.tokens) and len(message.attempts) == len(message.speculate)


def _open(message: OpenSequences, arrays: Sequence[Array]) -> bool:
    """A predicted hop is one of the path, and not the last; one that is offered is one of the path, and not the
    first.
    """
    ahead = zip(message.speculative_hops, message.paths, strict=False)
    offers = zip(message.offers, message.paths, strict=False)
    return (
        not arrays
        and all(each is None or 0 <= each.hop < len(path) - 1 for each, path in ahead)
        and all(0 < hop < len(path) and devices for some, path in offers for hop, devices in some)
    )


def _pass(message: ForwardRows, arrays: Sequence[Array]) -> bool:
    """Hidden states [tokens, width] of one row or several, neither of them 0: no row claims tokens that nobody has sent
    bytes for.
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
    """Pages [groups x layers, page bytes], or hidden states [tokens, width], unless it says why not."""
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
    return not arrays and len(message.tensor_transport) <= _MAX_RAIL


def _peers(message: PeerList, arrays: Sequence[Array]) -> bool:
    return not arrays and len(message.tensor_transports) in (0, len(message.agents))


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


_CHECKS: dict[type[Message], Callable[..., bool]] = {
    OpenSequences: _open,
    RunRows: _go,
    ForwardRows: _pass,
    PageData: _pages,
    RowsDone: _done,
    SpeculationResult: _outcome,
    AgentHello: _ready,
    PeerList: _peers,
    RendezvousKey: _meet,
}
