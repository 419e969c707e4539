"""Lazy partitioning: its invariants as properties, and examples worked out by hand."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from surgery.partition.partition import partition
from zoo.manifest import block_digest

_chain = st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=10)


def _variant(base: list[str], at: list[int]) -> list[str]:
    return [f"{component}'" if index in at else component for index, component in enumerate(base)]


_families = st.one_of(
    st.lists(_chain, min_size=1, max_size=4),
    st.builds(
        lambda size, edits: (
            [list(map(str, range(size)))] + [_variant(list(map(str, range(size))), edit) for edit in edits]
        ),
        st.integers(1, 12),
        st.lists(st.lists(st.integers(0, 11), max_size=4), max_size=3),
    ),
)


def _named(chains: list[list[str]]) -> dict[str, list[str]]:
    return {f"m{index}": chain for index, chain in enumerate(chains)}


def _cut_points(chains: dict[str, list[str]], blocks: dict) -> dict[str, set[int]]:
    return {name: {block.lo for block in blocks[name]} - {0} for name in chains}


@given(_families)
def test_blocks_cover_each_chain_once_and_in_order(families):
    chains = _named(families)
    for name, blocks in partition(chains).items():
        covered = [index for block in blocks for index in range(block.lo, block.hi)]
        assert covered == list(range(len(chains[name])))
        assert all(block.digest == block_digest(chains[name][block.lo : block.hi]) for block in blocks)


@given(_families)
def test_equal_components_lie_in_equal_blocks_at_equal_offsets(families):
    chains = _named(families)
    homes: dict[str, set[tuple[str, int]]] = {}
    for name, blocks in partition(chains).items():
        for block in blocks:
            for offset in range(block.hi - block.lo):
                homes.setdefault(chains[name][block.lo + offset], set()).add((block.digest, offset))
    assert all(len(places) == 1 for places in homes.values())


@given(_families)
def test_no_two_neighbouring_blocks_could_be_joined(families):
    """Joining two blocks in every chain where they meet would break the sharing invariant."""
    chains = _named(families)
    blocks = partition(chains)
    whole = {name: [block.digest for block in row] for name, row in blocks.items()}
    for row in whole.values():
        for left, right in pairwise(row):
            follows = {
                tuple(other[at : at + 2])
                for other in whole.values()
                for at, digest in enumerate(other)
                if digest == left
            }
            leads = {
                tuple(other[max(at - 1, 0) : at + 1])
                for other in whole.values()
                for at, digest in enumerate(other)
                if digest == right
            }
            assert follows != {(left, right)} or leads != {(left, right)}


@given(_families, st.randoms(use_true_random=False))
def test_the_order_of_ingest_does_not_matter(families, random):
    chains = _named(families)
    names = list(chains)
    random.shuffle(names)
    assert partition({name: chains[name] for name in names}) == partition(chains)


@given(_families, st.data())
def test_an_asked_cut_is_made_wherever_the_pair_stands_and_only_adds_boundaries(families, data):
    chains = _named(families)
    pairs = sorted({pair for chain in chains.values() for pair in pairwise(chain)})
    if not pairs:
        return
    cut = data.draw(st.sampled_from(pairs))
    without, with_cut = _cut_points(chains, partition(chains)), _cut_points(chains, partition(chains, [cut]))
    for name, chain in chains.items():
        wanted = {at for at in range(1, len(chain)) if (chain[at - 1], chain[at]) == cut}
        assert with_cut[name] == without[name] | wanted


def test_a_model_alone_is_one_block():
    (block,) = partition({"foundation": list("abcdef")})["foundation"]
    assert (block.lo, block.hi) == (0, 6)


def test_an_empty_chain_has_no_blocks():
    assert partition({"nothing": []}) == {"nothing": ()}


def test_a_full_fine_tune_of_the_middle_layers_cuts_twice():
    base = [str(index) for index in range(10)]
    chains = {"base": base, "tuned": _variant(base, [4, 5, 6, 7])}
    spans = {name: [(block.lo, block.hi) for block in row] for name, row in partition(chains).items()}
    assert spans == {"base": [(0, 4), (4, 8), (8, 10)], "tuned": [(0, 4), (4, 8), (8, 10)]}


def test_lora_on_the_attention_of_two_layers():
    """A LoRA on two attentions of a 4-layer model gives 5 blocks per chain, 3 of them common: 7 distinct ones.

    Components: 0 embedding, 1 a0, 2 f0, 3 a1, 4 f1, 5 a2, 6 f2, 7 a3, 8 f3, 9 head; LoRA on a1 and a2.
    Runs used by both: [0..2], [4], [6..9]; runs of one model: a1 and a2, plain and adapted.
    """
    base = [str(index) for index in range(10)]
    blocks = partition({"base": base, "lora": _variant(base, [3, 5])})
    assert [len(row) for row in blocks.values()] == [5, 5]
    digests = [{block.digest for block in row} for row in blocks.values()]
    assert len(digests[0] & digests[1]) == 3
    assert len(digests[0] | digests[1]) == 7


def test_removing_a_model_joins_its_cuts_again():
    base = [str(index) for index in range(6)]
    assert len(partition({"base": base, "tuned": _variant(base, [2])})["base"]) == 3
    assert len(partition({"base": base})["base"]) == 1


def test_a_component_repeated_in_one_chain_is_a_block_of_its_own():
    spans = [(block.lo, block.hi) for block in partition({"m": ["e", "x", "x", "h"]})["m"]]
    assert spans == [(0, 1), (1, 2), (2, 3), (3, 4)]
