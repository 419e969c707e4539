"""Open the page table that a migration or a loan fills, with all of its pages (BL-16, IL-04).

Its first page sets may be those that another sequence has here of the same tokens and layers: they are shared, so that
they stay when that one closes, and are neither brought nor written.
"""

from __future__ import annotations

from dataclasses import dataclass

from runtime.agent.migration.source import layers_in
from runtime.agent.sequences.page_tables import SequencePageTables
from runtime.agent.sequences.sequence import AgentSequence
from runtime.messages import StartMigration
from runtime.policy.migration.two_ended import TwoEnded
from runtime.types import ModelSpec


@dataclass(frozen=True, slots=True)
class OpenedTable:
    """A page table with its key and spec. Field `ends`: which page sets are to be brought."""

    key: str
    spec: ModelSpec
    ends: TwoEnded


def open_table(
    order: StartMigration, spec: ModelSpec | None, tables: SequencePageTables, device: str, donor: AgentSequence | None
) -> OpenedTable | str:
    """Open a table and take its pages; return why that is not possible, with nothing changed.

    Args:
        spec: That of the stage; None if it is not loaded.
        donor: The sequence of which pages are shared, as `order.shared` says; None if it is not here.
    """
    first, last = order.layers
    if order.loan or order.recall:  # no use of the stage, which may leave meanwhile
        spec = ModelSpec(f"loan of {order.stage.id}", last - first, order.page_tokens, order.upto + 1, 1)
    elif spec is None or spec.kv_layers != last - first:
        spec = ModelSpec(order.stage.id, last - first, order.page_tokens, order.upto + 1, 1)
    key = tables.open(f"{order.seq}!{order.move}", order.stage.lo, spec)
    present, why = order.shared[1] if order.shared is not None and spec.kv_layers else 0, ""
    if present and not _share(order, key, tables, device, donor, present):
        why = "the prefix that it shares is not here"
    elif not tables.grow(key, order.upto - order.first - present):
        why = "no room for its pages"
    if why:
        tables.release(key)
        return why
    # Without attention layers there are no pages to bring.
    tokens, recompute = order.upto - order.first if spec.kv_layers else 0, bool(order.tokens) or order.from_activations
    width = spec.page_tokens
    return OpenedTable(key, spec, TwoEnded(tokens, width, recompute, order.copy, present=present // width))


def _share(
    order: StartMigration, key: str, tables: SequencePageTables, device: str, donor: AgentSequence | None, tokens: int
) -> bool:
    """Begin a table with the first tokens of a donor; return False, with nothing changed, if that is not possible."""
    found = layers_in(donor, device, order.layers)
    return found is not None and tables.share(key, found[0], tokens, found[1])
