"""Choose which pages of a sequence another device gets: some page sets of all layers, or all of some layers.

    tokens   layers           layers   layers            # lent
             ####.....                 .........         . here, with what is written next
             ####.....                 #########
             ####.....                 #########

Each layer with something lent costs a question to its holder in each step. Page sets of all layers are the paper's
shape: all layers ask, and the holder attends to its part meanwhile. Of some layers only these ask, and nothing is
attended to beside them. With attention to all tokens of a layer in `a`, a question in `t`, and a share x lent, L layers
take L max(t + a x, a (1 - x)) or L (x t + a): the second is less where a < t. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from runtime.lending_config import LoanShape

#: Share of a sequence's pages on its path that it lends at a time, at least: each loan costs the sequence a rest.
_AT_LEAST = 0.125


class PageRectangle(NamedTuple):
    """Page sets [first, last) in layers [first, last), both counted from the first ones on a device."""

    layers: tuple[int, int]
    groups: tuple[int, int]

    @property
    def depth(self) -> int:
        return self.layers[1] - self.layers[0]

    @property
    def width(self) -> int:
        return max(0, self.groups[1] - self.groups[0])

    @property
    def pages(self) -> int:
        return self.depth * self.width


class LoanPiece(NamedTuple):
    """What is to be lent: the first units of some pages.

    Fields:
        by_layers: Whether a unit is one layer; otherwise it is one page set.
        least, most: Units that make the room that is needed, and those that are given away if a device takes them.
    """

    pages: PageRectangle
    by_layers: bool
    least: int
    most: int

    @property
    def unit(self) -> int:
        """Pages of a unit."""
        return self.pages.width if self.by_layers else self.pages.depth

    def first(self, units: int) -> PageRectangle:
        """Return its first units."""
        (layer, last), (group, stop) = self.pages
        if self.by_layers:
            return PageRectangle((layer, min(last, layer + units)), (group, stop))
        return PageRectangle((layer, last), (group, min(stop, group + units)))


def cheaper_shape(layer_bytes: int, limit: int) -> LoanShape:
    """Return the shape that costs less time.

    Args:
        layer_bytes: K and V of all tokens in one layer.
        limit: Bytes of K and V that are attended to in the time of a question.
    """
    return "layers" if layer_bytes <= limit else "tokens"


def pieces(shape: LoanShape, here: Sequence[PageRectangle], need: int, coming: int, room: int) -> list[LoanPiece]:
    """Return what may be lent, the best first; nothing if nothing is lendable.

    Args:
        here: The first pages of a sequence that its device has, by runs of layers.
        need: Pages that are needed.
        coming: Page sets that the rest of its context will need.
        room: Pages that it has on the device, with those that are free.
    """
    if shape == "tokens":
        return [piece for piece in (_of_all_layers(here, need, coming),) if piece is not None]
    runs = [each for each in here if each.pages]
    begun = max((each for each in runs if each.groups[0]), key=lambda each: each.pages, default=None)
    whole = max((each for each in runs if not each.groups[0]), key=lambda each: each.pages, default=None)
    # What has grown in layers that are lent goes first, if it is worth a rest.
    if begun is not None and (whole is None or begun.pages >= _AT_LEAST * sum(each.pages for each in runs)):
        return [LoanPiece(begun, False, min(begun.width, -(-need // begun.depth)), begun.width), _by_pages(begun, need)]
    if whole is None:
        return []
    layers = sum(each.depth for each in here)
    lent = layers - sum(each.depth for each in here if not each.groups[0])
    end = max(each.groups[1] for each in here) + coming
    kept = max(0, room - need) // max(1, end)  # so many layers fit here to the end
    least = min(whole.depth, -(-need // whole.width))
    most = max(least, min(whole.depth, layers - lent - kept))
    part = PageRectangle((whole.layers[0], whole.layers[0] + most), whole.groups)
    # Where no device has room for a whole layer: page sets of these.
    page_sets = LoanPiece(part, False, min(part.width, -(-need // most)), part.width)
    return [LoanPiece(whole, True, least, most), page_sets, _by_pages(part, need)]


def _by_pages(pages: PageRectangle, need: int) -> LoanPiece:
    """Return pages of the first of some layers: what devices have room for that is less than a page of each."""
    first = PageRectangle((pages.layers[0], pages.layers[0] + 1), pages.groups)
    return LoanPiece(first, False, min(first.width, need), first.width)


def _of_all_layers(here: Sequence[PageRectangle], need: int, coming: int) -> LoanPiece | None:
    first, last = max((each.groups[0] for each in here), default=0), min((each.groups[1] for each in here), default=0)
    if last <= first:
        return None
    pages = PageRectangle((here[0].layers[0], here[-1].layers[1]), (first, last))
    least = min(pages.width, -(-need // pages.depth))
    # As much as the rest of its context will need, or a share of what is here.
    return LoanPiece(pages, False, least, min(pages.width, max(least, coming, int(pages.width * _AT_LEAST))))
