"""Choose what travels between a debtor and a creditor: queries and partial attention, or the lent pages (IL-27, IL-28).

    queries   c H d b out, c H (a d + 16) back, whatever is lent   attention at the creditor, beside that to the rest
    pages     2 n G d b back, whatever is asked                    attention at the debtor, after they have come

for one layer: c query tokens, n lent tokens, H heads of queries, G of K and V, d values of b bytes, of a bytes in
attention, which has a sum and an exponent for each head. So pages are fewer bytes only for prompts in chunks over short
lent parts. Whether they are faster, too, depends on the link and on both devices: these times are learned from what was
asked before. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from runtime.lending_config import LoanShipping
from runtime.policy.measured_cost import MeasuredCost

#: Most bytes of pages that are asked for at once: they are held beside the device's own pages while a layer attends.
MOST_PULLED = 16 << 20
#: Seconds that are assumed for a round trip, a byte, and a product of values of a query and a key, before any was
#: measured.
_TRIP, _BYTE, _PRODUCT = 2e-4, 1e-9, 2e-10
#: Questions for which both are tried in turns, and later the period of those for which the other one is.
_FIRST, _AGAIN = 8, 64
#: Questions from which on only every so many is learned from, a divisor of `_AGAIN`: a fit takes as long as attention
#: of a short layer.
_LEARNT, _SELDOM = 32, 8
#: Pages must be expected to take less than this share of the time of queries.
_BETTER = 0.95


@dataclass(frozen=True, slots=True)
class LoanAsk:
    """What a layer asks of one creditor.

    Fields:
        creditor: Its device.
        queries: Bytes of queries and of partial attention.
        pages: Bytes of the lent pages.
        products: Query tokens times lent tokens times heads times head_dim, over all rows.
        here: The same for the tokens that are here, of which each query attends to those before it and its own.
    """

    creditor: str
    queries: int
    pages: int
    products: int
    here: int

    @property
    def is_open(self) -> bool:
        """Whether pages may be the cheaper ones: fewer bytes, and not too many at once."""
        return self.pages <= MOST_PULLED and self.pages < self.queries


def query_bytes(tokens: int, heads: int, width: int, element: int, back: int) -> int:
    """Return the bytes of so many query tokens, and of attention and its sums that come back for them.

    `element`, `back`: bytes of a value of a query, and of attention.
    """
    return tokens * heads * (width * element + back * width + 16)


def page_bytes(tokens: int, kv_heads: int, width: int, element: int) -> int:
    """Return the bytes of K and V of so many tokens in one layer."""
    return 2 * tokens * kv_heads * width * element


class ShippingChoice(NamedTuple):
    """Whether pages are asked for, and whether the answer's time is to be recorded."""

    pages: bool
    learns: bool = False


class ShippingCosts:
    """What asking creditors took, and attention here."""

    def __init__(self) -> None:
        self._asked: dict[tuple[str, bool], MeasuredCost] = {}
        self._chosen: dict[str, int] = {}
        self._here = MeasuredCost.assuming((0.0, _PRODUCT))
        self._pulled = MeasuredCost.assuming((0.0, _PRODUCT))

    def add_answer(self, ask: LoanAsk, pulled: bool, seconds: float, waited: bool) -> None:
        """Record the time from a question to its answer.

        Args:
            waited: Whether it was awaited. If not it came before, and the time is only an upper limit.
        """
        x, cost = _terms(ask, pulled), self._cost(ask.creditor, pulled)
        if waited or seconds < cost.at(x):
            cost.add(x, seconds)

    def add_attention(self, products: int, seconds: float) -> None:
        """Record the time of attention on this device."""
        self._here.add((1.0, products), seconds)

    def add_pulled_attention(self, products: int, seconds: float) -> None:
        """Record the time of attention on this device to pages that have come, with what it takes to put them there."""
        self._pulled.add((1.0, products), seconds)

    def choose(self, how: LoanShipping, ask: LoanAsk) -> ShippingChoice:
        """Choose what is asked for: never more pages than `MOST_PULLED`, as cheapest only if they are fewer bytes.

        At first both are tried in turns, and later now and then the other one, so that times do not get old.
        """
        if how != "cheapest" or not ask.is_open:
            return ShippingChoice(how == "pages" and ask.pages <= MOST_PULLED)
        number = self._chosen[ask.creditor] = self._chosen.get(ask.creditor, 0) + 1
        if number <= _FIRST:
            return ShippingChoice(number % 2 == 0, True)
        better, other = self.seconds(ask, True) < _BETTER * self.seconds(ask, False), number % _AGAIN == 0
        return ShippingChoice(better != other, number <= _LEARNT or number % _SELDOM == 0)

    def seconds(self, ask: LoanAsk, pulled: bool) -> float:
        """Return the expected time until both parts are attended to; what is here is attended to meanwhile."""
        answer = max(self._here.at((1.0, ask.here)), self._cost(ask.creditor, pulled).at(_terms(ask, pulled)))
        return answer + (self._pulled.at((1.0, ask.products)) if pulled else 0.0)

    def _cost(self, creditor: str, pulled: bool) -> MeasuredCost:
        if (creditor, pulled) not in self._asked:
            assumed = (_TRIP, _BYTE) if pulled else (_TRIP, _BYTE, _PRODUCT)
            self._asked[creditor, pulled] = MeasuredCost.assuming(assumed)
        return self._asked[creditor, pulled]


def _terms(ask: LoanAsk, pulled: bool) -> tuple[float, ...]:
    return (1.0, ask.pages) if pulled else (1.0, ask.queries, ask.products)
