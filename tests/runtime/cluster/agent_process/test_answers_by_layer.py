"""Questions to loans of some layers, which native code answers as those to whole ones (IL-27)."""

from __future__ import annotations

from tests.runtime.cluster.agent_process.test_known_answers import (
    PAGE,
    SETS,
    Sides,
    queries,
    question,
    sides,  # noqa: F401
    told,
)
from tests.runtime.engine.compiled import needs_kernels

pytestmark = needs_kernels


def test_loans_of_some_layers_are_answered_in_these(sides: Sides) -> None:  # noqa: F811
    """Their first one is not the hop's; a question to two of them is for the layers that both have."""
    for loan, first in ((1, 4), (2, 5)):
        sides.creditor.lent.hold_loan(loan, sides.creditor.pages[loan - 1], SETS * PAGE, "d0", first)
    for step in range(4):
        for loans, layers in (((1,), (4, 5, 6)), ((2,), (5, 6, 7)), ((1, 2), (5, 6))):
            for layer in layers:
                query, arrays = question(layer, loans), queries(len(loans), 10 * step + layer)
                assert told(sides.link, query, arrays) == sides.creditor.answer(query, arrays)
    assert sides.creditor.calls < 3 * 8, "each of eight questions once, of four times"
