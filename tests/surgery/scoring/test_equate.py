"""Lazy partitioning by equivalence: the paper's Figure 12 with derived counts, invariants as properties.

Also tested: blocks of models that are added and removed.
"""

from __future__ import annotations

import dataclasses
import shutil
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from surgery.partition.partition import partition
from surgery.partition.regroup import THRESHOLD, cuts_of
from surgery.scoring.compare import CompareSettings, score
from surgery.scoring.equate import equate
from surgery.scoring.runs import Span, equivalent_runs
from tests.checkpoints import make, make_lora
from tests.surgery.helpers import edit_weights, spans
from zoo import Zoo
from zoo.errors import Incomparable, InputError, NotFound
from zoo.manifest import block_digest
from zoo.records import Equivalence, ScoredRun

SMALL = CompareSettings(source=__file__, tokens=96, length=32, control=False)

# --------------------------------------------------------------------------------------- counting, by the rule itself


def distinct_blocks(chains, runs):
    """Count the blocks that there must be. `runs`: (model, lo, hi).

    An edge between two components is a boundary exactly when some chain has one of the two without the other next to
    it, or when an equivalent run ends there in some chain.
    """
    found = set()
    for chain in chains.values():
        block = [chain[0]]
        for left, right in pairwise(chain):
            neighbours = all(
                (left in other) == (right in other)
                and (left not in other or other.index(right) == other.index(left) + 1)
                for other in chains.values()
            )
            asked = any(
                edge and chains[name][edge - 1 : edge + 1] == [left, right]
                for name, lo, hi in runs
                for edge in (lo, hi)
            )
            if neighbours and not asked:
                block.append(right)
                continue
            found.add(tuple(block))
            block = [right]
        found.add(tuple(block))
    return len(found)


def marked(a, b, similarity=0.99):
    return Equivalence("equivalent", ScoredRun(*a), ScoredRun(*b), "0" * 64, similarity, None, {THRESHOLD: 0.98})


def count(blocks):
    return len({block.digest for row in blocks.values() for block in row})


def test_figure_12_as_drawn():
    """Figure 12: two layers of attention and FFN that are equivalent in both models, and the rest, R; then a LoRA.

    Foundation and fine-tune are both [A1 F1 A2 F2] R: 4 blocks, the first of each equivalent. The LoRA on both
    attentions keeps F1, F2 and R, so the foundation becomes A1, F1, A2, F2, R; with A1', A2' and the fine-tune's two
    blocks that makes 9.
    """
    chains = {"foundation": ["A1", "F1", "A2", "F2", "R"], "tuned": ["a1", "f1", "a2", "f2", "r"]}
    pair = marked(("foundation", 0, 4), ("tuned", 0, 4))
    runs = [("foundation", 0, 4), ("tuned", 0, 4)]
    assert count(partition(chains, cuts_of([pair], chains))) == distinct_blocks(chains, runs) == 4
    chains["lora"] = ["A1'", "F1", "A2'", "F2", "R"]
    blocks = partition(chains, cuts_of([pair], chains))
    assert count(blocks) == distinct_blocks(chains, runs) == 9
    assert [(block.lo, block.hi) for block in blocks["foundation"]] == [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)]
    assert [(block.lo, block.hi) for block in blocks["tuned"]] == [(0, 4), (4, 5)]


# -------------------------------------------------------------------------------------------------------- real models


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Checkpoints: a base of four layers (10 components), a full fine-tune and a LoRA.

    The fine-tune changes all weights slightly, those from layer 2 on strongly; the LoRA is on attention of layers 1 and
    2.
    """
    root = tmp_path_factory.mktemp("figure12")
    base, tuned = make("llama", root / "base", num_hidden_layers=4), make("llama", root / "tuned", num_hidden_layers=4)
    generator = torch.Generator().manual_seed(0)

    def move(key, tensor):
        scale = 1.0 if ".layers.2." in key or ".layers.3." in key else 0.005
        return tensor + scale * tensor.std().clamp_min(1e-3) * torch.randn(tensor.shape, generator=generator)

    assert len(edit_weights(tuned, move)) == 3 + 9 * 4
    make_lora(base, root / "lora", layers_to_transform=[1, 2], target_modules=["q_proj", "v_proj"])
    return root


@pytest.fixture
def zoo(made, tmp_path):
    with Zoo(tmp_path / "store") as opened:
        opened.ingest(made / "base", name="base")
        opened.ingest(made / "tuned", name="tuned", base="base")
        yield opened


def chains_of(zoo):
    return {
        model.name: [placed.component.digest for placed in zoo.model(model.name).manifest.components]
        for model in zoo.models()
    }


def digests(zoo):
    return {block.digest for model in zoo.models() for block in zoo.model(model.name).chain}


def answers(zoo):
    """Return the engine's greedy tokens for every model."""
    from cli.serving.models import choose
    from cli.serving.one_device import start_one_device
    from runtime.config import EngineConfig
    from runtime.types import SamplingParams, SequenceRequest

    chosen = choose(zoo, [model.name for model in zoo.models()])
    names = chosen.names
    with start_one_device(zoo, EngineConfig(kv_cache_memory_bytes=1 << 22), chosen) as driver:
        sampling = SamplingParams(max_tokens=8)
        requests = [SequenceRequest(name, name, name, tuple(range(5, 17)), sampling) for name in names]
        found = {name: [] for name in names}
        for event in driver.run(requests):
            assert event.error is None
            found[event.seq] += [] if event.token is None else [event.token]
    return found


def test_figure_12_on_models(zoo, made):
    before = answers(zoo)
    assert spans(zoo, "base") == spans(zoo, "tuned") == [(0, 10)]
    (pair,) = zoo.equate("tuned", settings=SMALL)
    run = (pair.a.lo, pair.a.hi)
    assert run == (pair.b.lo, pair.b.hi) == (0, 5)  # the embedding and the first two layers
    assert 0.98 < pair.metrics["lowest"] <= pair.similarity
    runs = [("base", *run), ("tuned", *run)]
    assert len(digests(zoo)) == distinct_blocks(chains_of(zoo), runs) == 4
    for name, other in (("base", "tuned"), ("tuned", "base")):
        first, second = zoo.model(name).chain
        (found,) = first.equivalents
        assert (found.model, found.block, found.similarity) == (
            other,
            zoo.model(other).chain[0].digest,
            pair.similarity,
        )
        assert not second.equivalents

    zoo.ingest(made / "lora", name="lora", base="base")
    assert len(digests(zoo)) == distinct_blocks(chains_of(zoo), runs) == 9
    assert spans(zoo, "base") == [(0, 3), (3, 4), (4, 5), (5, 6), (6, 10)]
    assert spans(zoo, "tuned") == [(0, 5), (5, 10)]
    chain = [block.digest for block in zoo.model("base").chain]
    (found,) = zoo.model("tuned").chain[0].equivalents  # the run is now a chain of three blocks
    assert list(found.blocks) == chain[:3]
    after = answers(zoo)
    assert {name: after[name] for name in before} == before
    assert len(set(map(tuple, after.values()))) == 3


def test_the_ends_of_runs_move_with_the_threshold(zoo):
    scores = [
        pair.similarity
        for pair in zoo.compare("base", "tuned", CompareSettings(**{**vars(SMALL), "granularity": "component"})).pairs
    ]
    seen = []
    for threshold in (0.0, scores[6], 0.98, 0.9999999, 1.0, 0.98):
        pairs = zoo.equate("tuned", threshold=threshold, settings=SMALL)
        expected = equivalent_runs(*chains_of(zoo).values(), scores, threshold)
        assert [Span(pair.a.lo, pair.a.hi) for pair in pairs] == expected
        runs = [(run.model, run.lo, run.hi) for pair in pairs for run in (pair.a, pair.b)]
        assert len(digests(zoo)) == distinct_blocks(chains_of(zoo), runs)
        seen.append(spans(zoo, "base"))
        assert spans(zoo, "tuned") == seen[-1]
    assert seen[0] == seen[4] == [(0, 10)]  # everything equivalent, or only identical weights: one block each
    assert seen[2] == seen[5] == [(0, 5), (5, 10)]
    assert len({tuple(each) for each in seen}) >= 3


def test_a_pair_of_blocks_is_scored_by_what_the_next_block_gets_to_see(zoo, monkeypatch):
    found = score(zoo.store, zoo.model("base"), zoo.model("tuned"), dataclasses.replace(SMALL, granularity="component"))
    similar = [0.99, 0.985, 0.999, 0.5, 0.981, 0.99, 0.5, 0.5, 0.5, 0.5]
    parts = [
        dataclasses.replace(part, similarity=each, control=each / 2)
        for part, each in zip(found.pairs, similar, strict=True)
    ]
    monkeypatch.setattr("surgery.scoring.equate.score", lambda *_, **__: dataclasses.replace(found, pairs=tuple(parts)))
    pairs = zoo.equate("tuned", settings=SMALL)
    assert [(pair.a.lo, pair.a.hi, pair.b.lo, pair.b.hi) for pair in pairs] == [(0, 3, 0, 3), (4, 6, 4, 6)]
    assert [(pair.similarity, pair.control, pair.metrics["lowest"]) for pair in pairs] == [
        (0.999, 0.4995, 0.985),
        (0.99, 0.495, 0.981),
    ]
    assert spans(zoo, "base") == spans(zoo, "tuned") == [(0, 3), (3, 4), (4, 6), (6, 10)]


def test_removing_a_side_joins_the_other_again(zoo):
    zoo.equate("tuned", settings=SMALL)
    assert len(spans(zoo, "base")) == 2
    zoo.remove("tuned")
    assert spans(zoo, "base") == [(0, 10)]
    assert zoo.model("base").chain[0].equivalents == ()


def test_a_stored_equivalence_is_kept_when_others_come_and_go(zoo, made):
    zoo.equate("tuned", settings=SMALL)
    zoo.ingest(made / "lora", name="lora", base="base")
    zoo.remove("lora")
    assert spans(zoo, "base") == spans(zoo, "tuned") == [(0, 5), (5, 10)]


def test_one_fine_tune_scored_again_leaves_anothers_blocks_and_all_scores(zoo, made, tmp_path):
    shutil.copytree(made / "tuned", tmp_path / "other")
    edit_weights(tmp_path / "other", lambda key, tensor: tensor * 1.0005)
    zoo.ingest(tmp_path / "other", name="other", base="base")
    for name in ("tuned", "other", "tuned"):
        zoo.equate(name, settings=SMALL)
        with zoo.store.catalog.reading() as reader:
            mere = [pair for pair in reader.equivalences([name]) if THRESHOLD not in pair.metrics]
        assert [(pair.a.lo, pair.a.hi) for pair in sorted(mere, key=lambda pair: pair.a.lo)] == [
            (at, at + 1) for at in range(10)
        ]
    assert spans(zoo, "tuned") == spans(zoo, "other") == [(0, 5), (5, 10)]
    assert all(zoo.model(name).chain[0].equivalents for name in ("tuned", "other"))


def test_a_mere_score_cuts_nothing(zoo, made):
    zoo.compare("base", "tuned", SMALL)
    zoo.ingest(made / "lora", name="lora", base="base")
    assert spans(zoo, "tuned") == [(0, 10)]


def test_what_is_shared_exactly_needs_no_equivalence(zoo, made, tmp_path):
    """A fine-tune with frozen first layers: the frozen part is shared, and the equivalent run begins behind it."""
    shutil.copytree(made / "base", tmp_path / "frozen")
    edit_weights(
        tmp_path / "frozen",
        lambda key, tensor: tensor * 1.001 if ".layers.2." in key or ".layers.3." in key else tensor,
    )
    zoo.ingest(tmp_path / "frozen", name="frozen")
    (pair,) = zoo.equate("frozen", settings=SMALL)
    assert (pair.a.lo, pair.a.hi) == (5, 9)
    assert spans(zoo, "frozen") == [(0, 5), (5, 9), (9, 10)]
    assert [bool(block.shared_with) for block in zoo.model("frozen").chain] == [True, False, True]


def test_an_error_leaves_chains_as_they_were(zoo, made):
    zoo.ingest(made / "lora", name="lora", base="base")
    before = {name: spans(zoo, name) for name in ("base", "tuned", "lora")}
    with pytest.raises(Incomparable, match="only full fine-tunes"):
        zoo.equate("lora", settings=SMALL)
    with pytest.raises(Incomparable, match="--base"):
        zoo.equate("base", settings=SMALL)
    with pytest.raises(InputError, match="between 0 and 1"):
        zoo.equate("tuned", threshold=1.5, settings=SMALL)
    stale = zoo.model("tuned")

    def gone(done, total):
        if done == total:
            zoo.remove("tuned")

    with pytest.raises(NotFound, match="removed or replaced"):
        equate(zoo.store, zoo.model("base"), stale, 0.98, SMALL, gone)
    assert spans(zoo, "base") == before["base"]


# --------------------------------------------------------------------------------------------------------- properties


@st.composite
def situations(draw):
    """Draw a base, fine-tunes that changed some of its components, and runs found equivalent."""
    size = draw(st.integers(1, 10))
    chains = {"base": [f"{at}" for at in range(size)]}
    pairs = []
    for number in range(draw(st.integers(1, 3))):
        moved = draw(st.sets(st.integers(0, size - 1)))
        name = f"tuned{number}"
        chains[name] = [f"{at}:{name}" if at in moved else f"{at}" for at in range(size)]
        scores = draw(st.lists(st.sampled_from([0.9, 0.97, 0.99, 1.0]), min_size=size, max_size=size))
        runs = equivalent_runs(chains["base"], chains[name], scores, 0.98)
        pairs += [marked(("base", run.lo, run.hi), (name, run.lo, run.hi)) for run in runs]
    return chains, pairs


@given(situations())
def test_chains_are_covered_and_equal_components_lie_in_equal_blocks(situation):
    chains, pairs = situation
    homes = {}
    for name, blocks in partition(chains, cuts_of(pairs, chains)).items():
        assert [at for block in blocks for at in range(block.lo, block.hi)] == list(range(len(chains[name])))
        for block in blocks:
            assert block.digest == block_digest(chains[name][block.lo : block.hi])
            for offset in range(block.hi - block.lo):
                homes.setdefault(chains[name][block.lo + offset], set()).add((block.digest, offset))
    assert all(len(places) == 1 for places in homes.values())


@given(situations())
def test_every_run_is_whole_blocks_and_no_boundary_is_idle(situation):
    """Joining any two neighbours would lose a shared block or an equivalence."""
    chains, pairs = situation
    blocks = partition(chains, cuts_of(pairs, chains))
    edges = {name: {block.lo for block in row} | {len(chains[name])} for name, row in blocks.items()}
    runs = [(run.model, run.lo, run.hi) for pair in pairs for run in (pair.a, pair.b)]
    assert all({lo, hi} <= edges[name] for name, lo, hi in runs)
    assert count(blocks) == distinct_blocks(chains, runs)


@given(situations(), st.data())
def test_dropping_an_equivalence_only_joins(situation, data):
    chains, pairs = situation
    if not pairs:
        return
    gone = data.draw(st.sampled_from(pairs))
    rest = [pair for pair in pairs if pair is not gone]
    blocks = partition(chains, cuts_of(rest, chains))
    assert count(blocks) <= count(partition(chains, cuts_of(pairs, chains)))
    assert count(blocks) == distinct_blocks(
        chains, [(run.model, run.lo, run.hi) for pair in rest for run in (pair.a, pair.b)]
    )


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), min_size=1, max_size=20), st.floats(0, 1), st.floats(0, 1))
def test_runs_are_maximal_and_shrink_as_the_threshold_rises(parts, low, high):
    low, high = sorted((low, high))
    a, b = [f"{n}" for n in range(len(parts))], [f"{n}" if same else f"{n}'" for n, (same, _) in enumerate(parts)]
    scores = [score for _, score in parts]

    def covered(threshold):
        runs = equivalent_runs(a, b, scores, threshold)
        assert all(left.hi < right.lo for left, right in pairwise(runs))  # otherwise they would be one run
        return {at for run in runs for at in range(run.lo, run.hi)}

    assert covered(low) == {n for n, (same, score) in enumerate(parts) if not same and score > low}
    assert covered(high) <= covered(low)
    assert covered(1.0) == set()
