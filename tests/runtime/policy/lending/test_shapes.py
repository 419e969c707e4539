"""Which pages are lent: page sets of all layers, or all of some layers (`policy.lending.shapes`)."""

from __future__ import annotations

import random

import pytest

from runtime.policy.lending.shapes import LoanPiece, PageRectangle, cheaper_shape, cut_step, last_groups, pieces


def rectangle(layers: tuple[int, int], groups: tuple[int, int]) -> PageRectangle:
    return PageRectangle(layers, groups)


def only(found: list[LoanPiece]) -> LoanPiece:
    (piece,) = found
    return piece


def test_tokens_are_the_first_page_sets_of_all_layers() -> None:
    piece = only(pieces("tokens", [rectangle((0, 4), (3, 23))], need=9, coming=1, room=80))
    assert (piece.by_layers, piece.least, piece.most, piece.unit) == (False, 3, 3, 4)
    assert piece.first(3) == rectangle((0, 4), (3, 6))
    assert only(pieces("tokens", [rectangle((0, 4), (0, 40))], 1, 0, 200)).most == 5, "an eighth at a time, at least"
    assert only(pieces("tokens", [rectangle((0, 4), (0, 40))], 1, 17, 200)).most == 17, "what its context will need"
    cut = [rectangle((0, 1), (2, 9)), rectangle((1, 4), (4, 9))]
    assert only(pieces("tokens", cut, 99, 99, 40)).first(99) == rectangle((0, 4), (4, 9)), "what all layers have here"
    assert pieces("tokens", [rectangle((0, 4), (7, 7))], 1, 0, 9) == pieces("tokens", [], 1, 0, 9) == []


def test_layers_are_lent_whole_as_many_as_do_not_fit_to_the_end() -> None:
    # Ten layers, 20 page sets of each here, 30 in the end: 200 pages hold six layers, without the 10 needed.
    whole, part, page = pieces("layers", [rectangle((0, 10), (0, 20))], need=10, coming=10, room=200)
    assert (whole.by_layers, whole.unit, whole.least, whole.most) == (True, 20, 1, 4)
    assert whole.first(4) == rectangle((0, 4), (0, 20))
    assert not part.by_layers and part.pages == whole.first(whole.most), "page sets of these where no whole layer fits"
    assert (part.unit, part.least, part.most) == (4, 3, 20)
    assert (page.pages, page.unit, page.least) == (rectangle((0, 1), (0, 20)), 1, 10), (
        "and pages of one where these do not"
    )


def test_layers_that_are_lent_already_count() -> None:
    here = [rectangle((0, 4), (20, 21)), rectangle((4, 10), (0, 21))]
    whole = pieces("layers", here, need=10, coming=9, room=140)[0]
    assert whole.first(whole.most) == rectangle((4, 6), (0, 21)), "130 pages hold four layers of 30 page sets, six stay"


def test_what_has_grown_in_lent_layers_goes_first_if_it_is_worth_a_rest() -> None:
    here = [rectangle((0, 8), (10, 20)), rectangle((8, 10), (0, 20))]
    piece, page = pieces("layers", here, need=9, coming=0, room=130)
    assert page.first(3) == rectangle((0, 1), (10, 13))
    assert (piece.by_layers, piece.pages, piece.least, piece.most) == (False, rectangle((0, 8), (10, 20)), 2, 10)
    little = [rectangle((0, 1), (19, 20)), rectangle((1, 10), (0, 20))]
    assert pieces("layers", little, 9, 0, 190)[0].by_layers, "one page of 181 is not"
    last = [rectangle((0, 10), (19, 20))]
    assert pieces("layers", last, 50, 0, 10)[0].first(1) == rectangle((0, 10), (19, 20)), "if it is all there is"


def test_whatever_is_lent_is_here_and_makes_room_as_far_as_there_is_something() -> None:
    rng = random.Random(4)
    for _ in range(2_000):
        layers, at, here = rng.randrange(1, 12), 0, list[PageRectangle]()
        groups = rng.randrange(1, 30)
        while at < layers:
            end = rng.randrange(at + 1, layers + 1)
            first = rng.choice((0, rng.randrange(groups + 1)))
            here.append(rectangle((at, end), (first, groups)))
            at = end
        pages = {(layer, g) for each in here for layer in range(*each.layers) for g in range(*each.groups)}
        need, coming, room = rng.randrange(1, 40), rng.randrange(20), len(pages) + rng.randrange(9)
        found = pieces("layers", here, need, coming, room)
        assert bool(found) == bool(pages)
        for piece in found:
            assert 1 <= piece.least <= piece.most and piece.unit > 0
            for units in range(1, piece.most + 1):
                part = piece.first(units)
                given = {(layer, g) for layer in range(*part.layers) for g in range(*part.groups)}
                assert given <= pages and len(given) == units * piece.unit == part.pages
            units = piece.pages.depth if piece.by_layers else piece.pages.width
            assert piece.least * piece.unit >= need or piece.least == units


def test_page_sets_are_lent_in_whole_steps_where_there_is_one() -> None:
    """Steps of four page sets: what is lent begins and ends at a multiple of four, and makes the room needed."""
    rng = random.Random(5)
    for _ in range(2_000):
        first, groups, depth = rng.choice((0, rng.randrange(20))), rng.randrange(1, 40), rng.randrange(1, 6)
        here = [rectangle((0, depth), (first, max(first, groups)))]
        begin, end = -(-first // 4) * 4, groups // 4 * 4
        need, coming = rng.randrange(1, 60), rng.randrange(20)
        for shape in ("tokens", "layers"):
            found = pieces(shape, here, need, coming, groups * depth, 4)
            assert bool(found) == (groups > first)
            for piece in found[:-1] if end > begin else ():
                assert piece.pages.groups == (begin, end)
                least, most = piece.first(piece.least), piece.first(piece.most)
                assert least.groups[1] % 4 == most.groups[1] % 4 == 0
                assert least.pages >= need or least.pages == (end - begin) * (
                    depth if not piece.by_layers else least.depth
                )
                assert piece.by_layers or (piece.first(5).groups[1] - begin) % 4 == 0, "of what a creditor has room for"
            assert not found or found[-1].step == 1, "less than a step, where no device has room for one"
    assert only(pieces("tokens", [rectangle((0, 2), (4, 7))], 1, 0, 14, 4)[:1]).first(3) == rectangle((0, 2), (4, 7))
    assert (cut_step(16, 64), cut_step(48, 64), cut_step(100, 64), cut_step(128, 64), cut_step(7, 1)) == (
        4,
        4,
        16,
        1,
        1,
    )


def test_page_sets_of_all_layers_are_lent_where_no_whole_step_is_in_all() -> None:
    here = [rectangle((0, 1), (0, 5)), rectangle((1, 2), (3, 7))]
    assert only(pieces("tokens", here, 1, 0, 9, 4)).first(9) == rectangle((0, 2), (3, 5))


def test_what_comes_back_begins_at_a_whole_step() -> None:
    assert (last_groups(0, 12, 5, 4), last_groups(0, 12, 8, 4), last_groups(4, 12, 99, 4)) == (8, 4, 4)
    assert last_groups(0, 12, 3, 4) == 9, "less than a step, if that is all that there is room for"
    assert (last_groups(3, 10, 7, 1), last_groups(3, 10, 2, 1)) == (3, 8)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
def test_the_cheaper_shape_is_that_of_the_formula(share: float) -> None:
    """L max(t + a x, a (1 - x)) beside L (x t + a): equal speeds, no other rows."""
    limit = 1_000_000
    for layer_bytes in (10_000, 500_000, 999_999, 1_000_001, 4_000_000):
        attention = layer_bytes / limit  # in units of a question
        tokens, layers = max(1 + attention * share, attention * (1 - share)), share + attention
        if tokens == 1 + attention * share:
            assert cheaper_shape(layer_bytes, limit) == ("layers" if layers < tokens else "tokens")
        else:  # the creditor's part is hidden behind what is here
            assert cheaper_shape(layer_bytes, limit) == "tokens" and tokens < layers
