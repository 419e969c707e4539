"""The scheduler's features hold for the dense executor: copied prefixes, pauses, versions, refusals."""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.chains import Stage
from runtime.control.scheduler_io import PauseSequence, ResumeSequence, ServeModel, WithdrawModel
from runtime.engine.catalog.describe import describe_chain
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.engine.dense.test_executor import MODES, dense, known
from tests.runtime.engine.drive import Driven, Limits, drive
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import prompts
from zoo.errors import NotServable

COUNT = 12


def ask(model: str, prompt: tuple[int, ...], seq: str, count: int = COUNT, **params) -> SequenceRequest:
    return SequenceRequest(seq, seq, model, prompt, SamplingParams(count, ignore_eos=True, **params))


def exact(bench, name: str, wanted: list[SequenceRequest], tokens: dict[str, list[int]]) -> None:
    model = reference(bench.folders[name])
    for one in wanted:
        expected = greedy(model, one.prompt, one.sampling.max_tokens, eos_token_id=[])
        assert same_tokens(model, one.prompt, expected, tokens[one.seq]) == len(expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "bloom"])
def test_a_prefix_is_copied_and_not_computed(bench, family, mode):
    """Cached prefixes are copied in whole pages.

    The page width is 4 and a prompt of 21 tokens runs: a prompt with the same 21 tokens starts with 20 of them, one
    with the first 10 with 8.
    """
    name = known(bench, family)
    (first,) = prompts(11, (21,))
    wanted = [ask(name, first, "a", 30), ask(name, first, "b"), ask(name, (*first[:10], 5, 6), "c")]
    made = dense(bench, name, mode=mode)
    out = drive(made, {0: wanted[:1], 3: wanted[1:]}, sharing="active")
    exact(bench, name, wanted, {seq: out.tokens(seq) for seq in "abc"})
    assert out.shared == 20 + 8
    assert made.pages_used == 0 or mode in ("run-to-completion", "pd")
    assert made.idle.useful == sum(len(one.prompt) + one.sampling.max_tokens - 1 for one in wanted) - 28


@pytest.mark.parametrize("mode", ["baton", "baton-pd"])
def test_a_prefix_outlives_the_sequence_that_it_is_of(bench, mode):
    name = known(bench, "llama")
    (first,) = prompts(12, (18,))
    wanted = [ask(name, first, "a", 7), ask(name, (*first, 9), "b"), ask(name, (*first, 8), "c")]
    made = dense(bench, name, mode=mode)
    out = drive(made, {0: wanted[:1], 20: wanted[1:2], 50: wanted[2:]}, sharing="cached")
    exact(bench, name, wanted, {seq: out.tokens(seq) for seq in "abc"})
    assert out.shared == 16 + 16
    assert made.pages_used == 0, "donors that have gone keep nothing"


@pytest.mark.parametrize("sharing", ["active", "cached"])
@pytest.mark.parametrize("mode", MODES)
def test_copies_never_exceed_the_memory(bench, sharing, mode):
    """Few pages and a common prefix: a sequence without room for its copy waits; all get their tokens."""
    name = known(bench, "llama")
    (first,) = prompts(13, (24,))
    wanted = [
        ask(name, (*first[: 8 + 4 * (i % 5)], *prompts(20 + i, (3,))[0]), f"{i}", (4, 19)[i % 2]) for i in range(9)
    ]
    made = dense(bench, name, mode=mode, slots=3, pages=3 * 24)
    out = drive(made, {3 * i: [one] for i, one in enumerate(wanted)}, sharing=sharing)
    exact(bench, name, wanted, {one.seq: out.tokens(one.seq) for one in wanted})
    assert 0 < made.peak_pages <= made.page_capacity and out.shared > 0


@pytest.mark.parametrize("model", ["llama", "bloom"])
@pytest.mark.parametrize("mode", MODES)
def test_rows_that_give_way_come_back_from_host_memory(bench, model, mode):
    """BA-15: nothing is prefilled again, and all tokens are those of the model alone."""
    name = known(bench, model)
    wanted = [ask(name, text, f"{at}", 20) for at, text in enumerate(prompts(31, (9, 12, 7, 10, 11)))]
    found = {}
    for host in (0, 1 << 20):
        made = dense(bench, name, mode=mode, slots=5, pages=3 * 15)
        found[host] = drive(made, {0: wanted}, Limits(host_memory=host, watermark=0.0))
        exact(bench, name, wanted, {one.seq: found[host].tokens(one.seq) for one in wanted})
        assert 0 < made.peak_pages <= made.page_capacity
    assert found[0].preemptions and found[0].resumed and not found[0].swapped
    kept = found[1 << 20]
    assert kept.swapped == kept.preemptions > 0 == kept.resumed


def test_other_tenants_prefixes_are_not_copied(bench):
    name = known(bench, "llama")
    (first,) = prompts(14, (17,))
    mine = [replace(ask(name, first, seq, 20), tenant="a") for seq in "ab"]
    theirs = replace(ask(name, first, "c"), tenant="b")
    out = drive(dense(bench, name), {0: mine[:1], 3: [mine[1], theirs]}, sharing="active")
    assert out.shared == 16 and out.tokens("c") == out.tokens("a")[:COUNT]


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_holds_a_sequence_and_no_other(bench, mode):
    name = known(bench, "llama")
    wanted = [ask(name, prompt, seq, 15) for seq, prompt in zip("ab", prompts(15, (5, 9)), strict=True)]
    made = Driven(dense(bench, name, mode=mode))
    for one in wanted:
        made.arrive(one)
    for _ in range(4):
        made.step()
    made.tell(PauseSequence("a"))
    made.step()
    before = len(made.out.tokens("a"))
    for _ in range(6):
        made.step()
    assert len(made.out.tokens("a")) == before and len(made.out.tokens("b")) > before + 2
    made.tell(ResumeSequence("a"))
    while made.busy:
        assert made.step()
    made.end()
    exact(bench, name, wanted, {seq: made.out.tokens(seq) for seq in "ab"})


def test_a_new_version_is_served_while_the_old_one_ends(bench):
    """Running sequences keep their weights, new ones get the new weights, then the old ones are unloaded."""
    old, new = known(bench, "llama"), known(bench, "llama", "llama-second", seed=9)
    engine = dense(bench, old)
    made = Driven(engine)
    one, two = ask(old, prompts(16, (7,))[0], "one", 25), ask(old, prompts(16, (7,))[0], "two")
    made.arrive(one)
    for _ in range(3):
        made.step()
    store, config, half = engine._of
    found = describe_chain(store, new, config, half, 1 << 62, old, "dense")
    made.tell(ServeModel(found.chain, found.blocks))
    made.arrive(two)
    while made.busy:
        assert made.step()
    made.end()
    exact(bench, old, [one], {"one": made.out.tokens("one")})
    exact(bench, new, [two], {"two": made.out.tokens("two")})
    assert [stage for stage in engine._lanes if stage.startswith("llama#")] == [], "the old version is still there"
    made.tell(WithdrawModel(old))
    made.step()
    assert not engine._lanes and engine.memory().weights == 0


def test_parts_of_chains_and_pages_are_refused_with_the_reason(bench):
    made = dense(bench, known(bench, "llama"))
    with pytest.raises(NotServable, match="whole chains only"):
        made.load(Stage("llama", 0, 3))
    with pytest.raises(NotServable, match="by sequence"):
        made.read_pages([0])
    assert made.lacks == {"parts", "pages"} and len(made._lanes) == 1
