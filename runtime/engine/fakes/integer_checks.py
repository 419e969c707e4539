"""Checks of a plan's rows against the tables of the integer engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from runtime.chains import Array, Stage
from runtime.engine.fakes.faults import require
from runtime.engine.fakes.integer_model import IntegerPart
from runtime.kv.pages import Group
from runtime.types import AWAY, CameBack, ModelSpec, Opened, PlaceChange, Row

#: Bytes of a value.
WORD = 8


@dataclass(slots=True)
class HeldTable:
    """A sequence on a stage.

    Fields:
        known: Its first tokens, as far as it was opened with them.
        groups: Page groups in its table.
        computed: Number of tokens that have run.
    """

    opened: Opened
    stage: Stage
    spec: ModelSpec
    known: tuple[int, ...]
    groups: list[Group] = field(default_factory=list)
    computed: int = 0

    def change_groups(self, one: PlaceChange, first: int, last: int) -> None:
        """Change page sets [first, last). Raises PlanViolation for pages that are where they go already."""
        lo, hi = one.layers[0], min(one.layers[1], self.spec.kv_layers)
        nowhere = ((AWAY,) * (hi - lo),) * (last - first)
        for at, new in enumerate(one.groups if isinstance(one, CameBack) else nowhere, first):
            old = self.groups[at]
            moves = all((a == AWAY) != (b == AWAY) for a, b in zip(old[lo:hi], new, strict=True))
            require(moves, f"{one.seq}: tokens from {one.first} on are where they go")
            self.groups[at] = (*old[:lo], *new, *old[hi:])


def here(group: Group) -> Iterator[int]:
    """Yield the pages of a page set that are on this device."""
    return (page for page in group if page != AWAY)


def verify_row(row: Row, held: HeldTable, last: bool, away: Callable[[int, int], bool]) -> None:
    """Raise PlanViolation unless a row fits its table.

    `last`: whether its stage has the head. `away`: returns whether another device has K and V of a token and layer.
    """
    spec, end = held.spec, row.start + len(row.tokens)
    groups = len(held.groups) + len(row.new_pages)
    prompt = spec.virtual_tokens + len(held.opened.request.prompt)
    require(row.model == held.stage.id, f"{row.seq} belongs to {held.stage.id}, not {row.model}")
    require(bool(row.tokens), f"{row.seq}: no tokens to run")
    require(
        all(
            len(group) == spec.kv_layers
            and all((page == AWAY) == away(at * spec.page_tokens, layer) for layer, page in enumerate(group))
            for at, group in enumerate(row.new_pages, len(held.groups))
        ),
        f"{row.seq}: a group is not one page per layer",
    )
    require(not spec.kv_layers or groups * spec.page_tokens >= end, f"{row.seq}: {groups} groups for {end} tokens")
    require(end - spec.virtual_tokens <= spec.max_model_len, f"{row.seq}: {end} tokens are too many")
    require(not row.sample or (last and not row.layers), f"{row.seq}: samples without a head")
    require(0 <= row.layers <= spec.kv_layers, f"{row.seq}: it has no {row.layers} layers")
    require(
        not row.sample or end == prompt + row.generated,
        f"{row.seq}: {end} tokens are not its prompt and {row.generated}",
    )


def verify_input(row: Row, held: HeldTable, parts: Sequence[IntegerPart], given: Array | None) -> None:
    """Raise PlanViolation unless a row has the input that it needs. `parts`: those of its stage."""
    entered = parts[: row.enters]
    require(
        all(0 < at < len(parts) and at > row.enters for at in row.saves) and row.enters >= 0
        and (not row.enters or any(part.attends for part in entered)),
        f"{row.seq}: enters at {row.enters}, saves {row.saves}",
    )  # fmt: skip
    if held.stage.lo or row.enters:
        require(not row.enters or not row.sample, f"{row.seq}: samples a row that enters inside its stage")
        require(given is not None, f"{row.seq}: no hidden states to start from")
        require(not any(row.tokens), f"{row.seq}: tokens where hidden states are to come from")
        known = given is not None and (given.dtype, given.shape, memoryview(given.data).nbytes)
        require(
            known == ("int64", (len(row.tokens), 1), WORD * len(row.tokens)),
            f"{row.seq}: its hidden states are {known}",
        )
        return
    require(given is None, f"{row.seq}: hidden states where it starts from tokens")
    require(all(0 <= token < held.spec.vocab_size for token in row.tokens), f"{row.seq}: tokens beyond the vocabulary")
    known_tokens = held.known[row.start : row.start + len(row.tokens)]
    require(row.tokens[: len(known_tokens)] == known_tokens, f"{row.seq}: these are not its tokens")


def written_pages(row: Row, held: HeldTable, parts: Sequence[IntegerPart]) -> set[int]:
    """Return the pages that a row writes: those of the layers that it passes. `parts`: those of its stage."""
    groups, width = (*held.groups, *row.new_pages), held.spec.page_tokens
    first, last = sum(part.attends for part in parts[: row.enters]), row.layers or held.spec.kv_layers
    ran = groups[row.start // width : -(-(row.start + len(row.tokens)) // width)]
    return {page for group in ran for page in group[first:last]}
