"""`PageAccounting` agrees with a model that tracks every single page, and `PrefixIndex` with a plain search."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.chains import Hop
from runtime.messages import PROTOCOL, AgentHello
from runtime.policy.lending.shapes import PageRectangle
from runtime.policy.routing.paths import by_load, cheapest, path_cost
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.kv.page_accounting import PageAccounting, PageHolding
from runtime.scheduler.kv.prefix_index import CachedPrefix, PrefixIndex, marks_of

PLACES = (("d0", 2), ("d0", 0), ("d1", 3))


def devices_of(count: int = 3) -> Devices:
    devices = Devices()
    for number in range(count):
        devices.up(AgentHello(f"d{number}", PROTOCOL, "", 100_000, 64, 0, ""))
    return devices


class Pages:
    """A reference model of page accounting.

    `tables` has, by sequence and block, the device and the pages themselves of each page group.
    """

    def __init__(self) -> None:
        self.tables: dict[str, dict[int, list[tuple[str, tuple[int, ...]]]]] = {}
        self.prefix_cache: set[str] = set()
        self._next = 0

    def groups(self, device: str, pages: int, count: int) -> list[tuple[str, tuple[int, ...]]]:
        made = []
        for _ in range(count):
            made.append((device, tuple(range(self._next, self._next + pages))))
            self._next += pages
        return made

    def used(self, *, idle: bool = False) -> Counter[str]:
        """Return pages by device; with `idle`, those that only cached prefixes hold."""
        holders: dict[tuple[str, int], set[str]] = {}
        for seq, table in self.tables.items():
            for part in table.values():
                for device, group in part:
                    for page in group:
                        holders.setdefault((device, page), set()).add(seq)
        return Counter(device for (device, _), seqs in holders.items() if not idle or seqs <= self.prefix_cache)


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 1_000_000))
def test_it_counts_what_every_page_by_itself_would(seed: int) -> None:
    rng = random.Random(seed)
    devices, pages = devices_of(), Pages()
    page_accounting, holdings = PageAccounting(devices), dict[str, PageHolding]()
    for step in range(40):
        name, act = f"s{step}", rng.choice(("take", "take", "share", "share", "grow", "free", "keep", "move"))
        seq = rng.choice(sorted(holdings)) if holdings else ""
        running = seq and not holdings[seq].cached_prefix
        if act == "take" or not seq:
            groups = rng.randrange(1, 6)
            holdings[name] = page_accounting.allocate(PLACES, groups)
            pages.tables[name] = {
                at: pages.groups(device, count, groups) for at, (device, count) in enumerate(PLACES) if count
            }
        elif act == "share":
            places = [("", 0)] * len(PLACES)
            for at, part in pages.tables[seq].items():
                places[at] = part[0][0], len(part[0][1])
            shared = rng.randrange(1, holdings[seq].groups + 1)
            groups = shared + rng.randrange(1, 4)
            holdings[name] = page_accounting.allocate(places, groups, holdings[seq], shared)
            pages.tables[name] = {
                at: [*part[:shared], *pages.groups(part[0][0], len(part[0][1]), groups - shared)]
                for at, part in pages.tables[seq].items()
            }
        elif act == "grow" and running:
            more = rng.randrange(1, 3)
            page_accounting.grow(holdings[seq], more)
            for part in pages.tables[seq].values():
                part.extend(pages.groups(part[0][0], len(part[0][1]), more))
        elif act == "free":
            page_accounting.free(holdings.pop(seq))
            del pages.tables[seq]
        elif act == "keep" and running:
            kept = rng.randrange(1, holdings[seq].groups + 1)
            holdings[name] = page_accounting.share_groups(holdings[seq], kept)
            pages.tables[name] = {at: part[:kept] for at, part in pages.tables[seq].items()}
            pages.prefix_cache.add(name)
        elif act == "move" and running:
            places = [(rng.choice(("d0", "d1", "d2")), count) for _, count in PLACES]
            there, groups, other = None, 0, rng.choice(sorted(holdings))
            table = pages.tables[other]
            if rng.random() < 0.7:  # another one has the first page sets there; it may go before they are taken over
                for at in table:
                    places[at] = table[at][0][0], places[at][1]
                moved = [at for at in table if places[at][0] != pages.tables[seq][at][0][0]]
                groups = rng.randrange(1, min(holdings[other].groups, holdings[seq].groups) + 1)
                there = page_accounting.pin(holdings[other], groups, moved)
                if other != seq and rng.random() < 0.5:
                    page_accounting.check([*holdings.values(), there], {})
                    page_accounting.free(holdings.pop(other))
                    del pages.tables[other]
                    pages.prefix_cache.discard(other)
            page_accounting.rehouse(holdings[seq], places, there)
            for at, part in pages.tables[seq].items():
                if part[0][0] != places[at][0]:
                    fresh = pages.groups(places[at][0], places[at][1], len(part) - groups)
                    pages.tables[seq][at] = [*table[at][:groups], *fresh]
            assert there is None or not there.ends
        page_accounting.check(holdings.values(), {})
        used, idle = pages.used(), pages.used(idle=True)
        assert [(device.pages.used, device.pages.idle) for device in devices] == [
            (used[device.name], idle[device.name]) for device in devices
        ]
        for device in devices:
            views = [
                page_accounting.mover(seq, holding, holding.groups, device.name).pages
                for seq, holding in holdings.items()
            ]
            assert len(frozenset().union(*views)) == device.pages.used
    for holding in holdings.values():
        page_accounting.free(holding)
    assert all((device.pages.used, device.pages.idle) == (0, 0) for device in devices)


def test_a_device_that_dies_takes_its_extents_along_and_its_next_life_begins_empty() -> None:
    devices = devices_of(2)
    page_accounting = PageAccounting(devices)
    one = page_accounting.allocate(PLACES, 4)
    two = page_accounting.allocate(PLACES, 6, one, 3)
    devices.down("d0")
    page_accounting.bereft(two, "d0")
    devices.up(AgentHello("d0", PROTOCOL, "", 100, 64, 0, ""))
    page_accounting.rehouse(two, PLACES)
    page_accounting.free(one)
    page_accounting.check([two], {})
    assert [device.pages.used for device in devices] == [12, 18]


def test_tentative_groups_are_not_in_the_order_of_moves() -> None:
    page_accounting = PageAccounting(devices_of())
    one = page_accounting.allocate(PLACES, 4)
    two = page_accounting.allocate(PLACES, 6, one, 3)
    views = [page_accounting.mover("a", one, 2, "d1").pages, page_accounting.mover("b", two, 5, "d1").pages]
    assert [len(view) for view in views] == [6, 15] and len(views[0] & views[1]) == 6


PATHS = [(Hop(name, 0, 4, (0, 2)),) for name in ("d0", "d1")]


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1_000_000))
def test_the_longest_beginning_is_found_on_each_path(seed: int) -> None:
    rng = random.Random(seed)
    prefixes, standing = PrefixIndex(), list[tuple[CachedPrefix, tuple[int, ...]]]()
    for step in range(30):
        tokens = tuple(rng.randrange(2) for _ in range(rng.randrange(12)))
        realm = rng.choice((("v", ""), ("v", "t"), ("w", "")))
        if rng.random() < 0.6:
            made = CachedPrefix(
                f"s{step}", PageHolding(), marks_of(tokens, 2), prefixes.shelf(realm, rng.choice(PATHS))
            )
            prefixes.reaches(made, rng.randrange(len(tokens) // 2 + 1))
            standing.append((made, tokens))
        elif standing:
            prefixes.remove_prefix(standing.pop(rng.randrange(len(standing)))[0])
        prefixes.check([each for each, _ in standing])
        most = rng.randrange(6)
        found = {match.path: match.groups for match in prefixes.matches(realm, marks_of(tokens, 2), most)}
        on_each = [(path, prefixes.match_on(realm, path, marks_of(tokens, 2)[:most])) for path in PATHS]
        assert found == {path: match.groups for path, match in on_each if match is not None}
        best: dict[tuple[Hop, ...], int] = {}
        for each, others in standing:
            common = next(
                (at for at, (x, y) in enumerate(zip(tokens, others, strict=False)) if x != y),
                min(len(tokens), len(others)),
            )
            groups = min(common // 2, each.known, most)
            if each.shelf.realm == realm and groups:
                best[each.path] = max(best.get(each.path, 0), groups)
        assert found == best


def test_marks_go_on_where_others_end() -> None:
    tokens = tuple(range(11))
    assert marks_of(tokens, 4) == [*marks_of(tokens[:4], 4), *marks_of(tokens[4:], 4, marks_of(tokens[:4], 4)[-1])]
    assert marks_of(tokens[4:8], 4) != marks_of(tokens, 4)[1:]


@given(
    st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3, unique=True), min_size=1, max_size=4),
    st.integers(0, 8),
)
def test_the_chosen_path_is_the_cheapest(candidates: list[list[str]], hop_cost: int) -> None:
    loads = {"a": 1.0, "b": 3.0, "c": 0.5}
    chosen = cheapest(by_load(candidates, loads, hop_cost))
    assert chosen is not None
    every: list[tuple[str, ...]] = [()]
    for some in candidates:
        every = [(*path, name) for path in every for name in some]
    least = min(path_cost(path, loads, hop_cost) for path in every)
    assert abs(path_cost(chosen, loads, hop_cost) - least) < 1e-9


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1_000_000))
def test_pages_of_some_layers_change_their_place_as_every_page_by_itself_would(seed: int) -> None:
    """On a path of one device, cut by blocks at first: what is lent, comes back and is lost is a rectangle of pages."""
    rng = random.Random(seed)
    devices = devices_of()
    accounting = PageAccounting(devices)
    blocks, groups = [rng.randrange(4) for _ in range(rng.randrange(1, 4))], rng.randrange(2, 7)
    layers = sum(blocks)
    holding = accounting.allocate([("d0", pages) for pages in blocks], groups)
    where = {(layer, group): "d0" for layer in range(layers) for group in range(groups)}
    for _ in range(12):
        if rng.random() < 0.3:
            accounting.grow(holding, 1)
            where |= {(layer, holding.groups - 1): "d0" for layer in range(layers)}
        free = {at for each in accounting.lendable(holding, "d0", layers) for at in _places(each)}
        # The first run of page sets of each layer, the last one of all never.
        for layer in range(layers):
            here = [group for group in range(holding.groups - 1) if where[layer, group] == "d0"]
            run = [group for at, group in enumerate(here) if group == here[0] + at]
            assert {group for lay, group in free if lay == layer} == set(run)
        if layers and holding.groups > 1:
            cut = sorted(rng.sample(range(layers + 1), 2))
            first, last = sorted(rng.sample(range(holding.groups), 2))
            target = rng.choice(["d0", "d1", "d2", ""])
            rectangle = PageRectangle((cut[0], cut[1]), (first, last))
            accounting.change_place(holding, "d0", target, first, last, rectangle.layers)
            where |= dict.fromkeys(_places(rectangle), target)
        accounting.check([holding], {})
        used = Counter(where.values())
        assert {each.name: each.pages.used for each in devices} == {name: used[name] for name in ("d0", "d1", "d2")}
        assert accounting.lost_pages(holding) == {place for place, name in where.items() if not name}
    accounting.free(holding)
    assert not any(each.pages.used for each in devices)


def test_a_path_of_several_devices_is_not_cut() -> None:
    accounting = PageAccounting(devices_of())
    holding = accounting.allocate(PLACES, 3)
    accounting.change_place(holding, "d1", "d2", 0, 2, (0, 3))
    with pytest.raises(ValueError, match="several devices"):
        accounting.change_place(holding, "d1", "d2", 0, 2, (0, 2))


def _places(rectangle: PageRectangle) -> set[tuple[int, int]]:
    return {(layer, group) for layer in range(*rectangle.layers) for group in range(*rectangle.groups)}
