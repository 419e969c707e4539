"""Boundaries of chains: where they part, the deepest ones, whatever order the chains come in."""

from __future__ import annotations

import random
from dataclasses import replace

from runtime.chains import Boundary, Chain
from runtime.policy.kv.boundaries import parting_boundaries, worth_waiting
from runtime.types import ModelSpec


def chain(name: str, layers: str, page_tokens: int = 16) -> Chain:
    """Return a chain with one layer per letter; equal beginnings are equal domains."""
    spec = ModelSpec(name, len(layers), page_tokens, 100, 10)
    boundaries = tuple(Boundary(at, at, layers[:at], 8) for at in range(1, len(layers)))
    return Chain(spec, name, (), boundaries=boundaries)


def depths(*chains: Chain, most: int = 4) -> dict[str, list[int]]:
    found = parting_boundaries(chains, most)
    return {version: [each.layers for each in boundaries] for version, boundaries in found.items()}


def test_each_chain_has_a_boundary_where_another_one_parts() -> None:
    a, b, c, d = chain("a", "xxxxxx"), chain("b", "xxxxyx"), chain("c", "xxyxxx"), chain("d", "yxxxxx")
    assert depths(a, b, c, d) == {"a": [2, 4], "b": [2, 4], "c": [2]}
    assert depths(a, d) == {} == depths(a) == depths()


def test_equal_chains_part_before_their_last_layer() -> None:
    assert depths(chain("a", "xxxx"), chain("b", "xxxx"), chain("c", "xxxy")) == {"a": [3], "b": [3], "c": [3]}


def test_the_deepest_are_chosen_and_pages_must_be_alike() -> None:
    many = [chain(str(at), "x" * at + "y" * (9 - at)) for at in range(1, 8)]
    assert depths(chain("a", "x" * 9), *many)["a"] == [4, 5, 6, 7]
    assert depths(chain("a", "x" * 9), *many, most=1)["a"] == [7]
    assert depths(chain("a", "xxx"), chain("b", "xxx", 32)) == {}


def test_one_version_under_two_names_is_one_chain() -> None:
    a = chain("a", "xxx")
    assert depths(a, replace(a, source="other")) == {}


def test_as_pairs_give_it() -> None:
    """The boundaries are those of all pairs, each at the deepest common one, in any order of the chains."""
    rng = random.Random(0)
    for _ in range(50):
        words = {"".join(rng.choice("xy") for _ in range(6)) for _ in range(6)}
        chains = [chain(word, word) for word in words]
        rng.shuffle(chains)
        found = depths(*chains, most=9)
        for one in words:
            common = {next((at for at in range(6) if one[at] != two[at]), 6) for two in words - {one}}
            assert found.get(one, []) == sorted({min(depth, 5) for depth in common if depth})


def test_a_prompt_waits_for_a_quarter_of_its_work() -> None:
    assert worth_waiting(0, 25, 100) and not worth_waiting(0, 24, 100)
    assert worth_waiting(50, 75, 100) and not worth_waiting(60, 75, 100)
    assert not worth_waiting(0, 0, 0) and not worth_waiting(9, 3, 100)
