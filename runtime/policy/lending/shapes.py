"""Choose which pages of a sequence another device gets: some page sets of all layers, or all of some layers.

    tokens   layers           layers   layers            # lent
             ####.....                 .........         . here, with what is written next
             ####.....                 #########
             ####.....                 #########

Each layer with something lent costs a question to its holder in each step. Page sets of all layers are the paper's
shape: all layers ask, and the holder attends to its part meanwhile. Of some layers only these ask, and nothing is
attended to beside them. With attention to all tokens of a layer in `a`, a question in `t`, and a share x lent, L layers
take L max(t + a x, a (1 - x)) or L (x t + a): the second is less where a < t.

Where there is a choice, what is lent begins and ends at whole steps of page sets, at which attention can be cut
without a change of its bits (`engine.attention.partial`). Pure.
"""

from __future__ import annotations

import math
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
        step: Page sets that are lent at a time (`cut_step`).
    """

    pages: PageRectangle
    by_layers: bool
    least: int
    most: int
    step: int = 1

    @property
    def unit(self) -> int:
        """Pages of a unit."""
        return self.pages.width if self.by_layers else self.pages.depth

    def first(self, units: int) -> PageRectangle:
        """Return its first units; page sets in whole steps, if they are at least one."""
        (layer, last), (group, stop) = self.pages
        if self.by_layers:
            return PageRectangle((layer, min(last, layer + units)), (group, stop))
        end = min(stop, group + units)
        return PageRectangle((layer, last), (group, _down(end, self.step) if _down(end, self.step) > group else end))


def cut_step(page_tokens: int, cut_tokens: int) -> int:
    """Return how many page sets of `page_tokens` tokens end at a multiple of `cut_tokens` tokens."""
    return cut_tokens // math.gcd(cut_tokens, page_tokens)


def _down(groups: int, step: int) -> int:
    return groups // step * step


def _up(groups: int, step: int, most: int) -> int:
    """Return the next whole step, or `most` if that is less."""
    return min(most, -(-groups // step) * step)


def last_groups(first: int, last: int, count: int, step: int) -> int:
    """Return where at most `count` page sets at the end of [first, last) begin: at a whole step, if there is one."""
    begin = max(first, last - count)
    return up if (up := -(-begin // step) * step) < last else begin


def _in_steps(here: Sequence[PageRectangle], step: int) -> list[PageRectangle]:
    """Return the same runs of layers with whole steps of their page sets; as they are if none has a whole one."""
    cut = []
    for each in here:
        first = -(-each.groups[0] // step) * step
        cut.append(each._replace(groups=(first, max(first, _down(each.groups[1], step)))))
    return cut if any(each.pages for each in cut) else list(here)


def cheaper_shape(layer_bytes: int, limit: int) -> LoanShape:
    """Return the shape that costs less time.

    Args:
        layer_bytes: K and V of all tokens in one layer.
        limit: Bytes of K and V that are attended to in the time of a question.
    """
    return "layers" if layer_bytes <= limit else "tokens"


def pieces(
    shape: LoanShape, here: Sequence[PageRectangle], need: int, coming: int, room: int, step: int = 1
) -> list[LoanPiece]:
    """Return what may be lent, the best first; nothing if nothing is lendable.

    Args:
        here: The first pages of a sequence that its device has, by runs of layers.
        need: Pages that are needed.
        coming: Page sets that the rest of its context will need.
        room: Pages that it has on the device, with those that are free.
        step: Page sets at multiples of which it is cut where there is a choice (`cut_step`).
    """
    end = max((each.groups[1] for each in here), default=0) + coming
    anywhere, here = here, _in_steps(here, step)
    if shape == "tokens":
        # The last one where there is no whole step, or no device has room for one.
        cuts = [(here, step), (anywhere, 1)] if step > 1 else [(here, 1)]
        return [piece for some, cut in cuts if (piece := _of_all_layers(some, need, coming, cut)) is not None]
    runs = [each for each in here if each.pages]
    begun = max((each for each in runs if each.groups[0]), key=lambda each: each.pages, default=None)
    whole = max((each for each in runs if not each.groups[0]), key=lambda each: each.pages, default=None)
    # What has grown in layers that are lent goes first, if it is worth a rest.
    if begun is not None and (whole is None or begun.pages >= _AT_LEAST * sum(each.pages for each in runs)):
        return [_by_page_sets(begun, need, begun.width, step), _by_pages(begun, need)]
    if whole is None:
        return []
    layers = sum(each.depth for each in here)
    lent = layers - sum(each.depth for each in here if not each.groups[0])
    kept = max(0, room - need) // max(1, end)  # so many layers fit here to the end
    least = min(whole.depth, -(-need // whole.width))
    most = max(least, min(whole.depth, layers - lent - kept))
    part = PageRectangle((whole.layers[0], whole.layers[0] + most), whole.groups)
    # Where no device has room for a whole layer: page sets of these.
    page_sets = _by_page_sets(part, need, part.width, step)
    return [LoanPiece(whole, True, least, most), page_sets, _by_pages(part, need)]


def _by_page_sets(pages: PageRectangle, need: int, most: int, step: int) -> LoanPiece:
    """Return page sets of some pages that make room for so many: at most so many, or whole steps of them."""
    first, width = pages.groups[0], pages.width
    least = _up(first + min(width, -(-need // pages.depth)), step, pages.groups[1]) - first
    return LoanPiece(pages, False, least, max(least, min(width, most)), step)


def _by_pages(pages: PageRectangle, need: int) -> LoanPiece:
    """Return pages of the first of some layers: what devices have room for that is less than a page of each."""
    first = PageRectangle((pages.layers[0], pages.layers[0] + 1), pages.groups)
    return _by_page_sets(first, need, first.width, 1)


def _of_all_layers(here: Sequence[PageRectangle], need: int, coming: int, step: int) -> LoanPiece | None:
    first, last = max((each.groups[0] for each in here), default=0), min((each.groups[1] for each in here), default=0)
    if last <= first:
        return None
    pages = PageRectangle((here[0].layers[0], here[-1].layers[1]), (first, last))
    # As much as the rest of its context will need, or a share of what is here.
    return _by_page_sets(pages, need, max(coming, int(pages.width * _AT_LEAST)), step)
