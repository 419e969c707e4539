"""Decode steps that reuse the previous step's call give the very bits of steps prepared from scratch.

That holds when sequences arrive, end, move or are rolled back.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from runtime.types import SamplingParams
from surgery.modules.components import LmHead
from tests.runtime.engine.carry import Carrier
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.executors.test_stage import add, engines, length
from tests.runtime.engine.test_equality import prompts

pytestmark = needs_kernels

TOKENS = 14
#: Greedy rows alone are computed without the modules of embedding and head (`engine.step.decode_ends`).
SAMPLINGS = {
    "greedy": SamplingParams(TOKENS, ignore_eos=True),
    "logprobs": SamplingParams(TOKENS, ignore_eos=True, logprobs=2),
    "drawn": SamplingParams(TOKENS, ignore_eos=True, temperature=0.8, seed=5),
    "penalised": SamplingParams(TOKENS, ignore_eos=True, repetition_penalty=1.5, frequency_penalty=0.5),
}


@pytest.fixture(params=SAMPLINGS)
def sampling(request) -> SamplingParams:
    return SAMPLINGS[request.param]


@pytest.fixture(scope="module")
def family(bench):
    add(bench, "float32")
    return bench


def carriers(family, count: int) -> tuple[Carrier, Carrier]:
    """Return two carriers: the first's engines reuse the previous step, the second's prepare each anew."""
    made = Carrier(*engines(family, count, kernels="native")), Carrier(*engines(family, count, kernels="native"))
    for place in made[1].places:
        place.engine._decode_reuse = None
    return made


def followed(carrier: Carrier) -> list[int]:
    return [place.engine._decode_reuse.followed for place in carrier.places]


def sampled(carrier: Carrier):
    return {seq: one.sampled for seq, one in carrier.seqs.items()}


def test_rows_that_go_on_over_pages_and_over_devices(family, sampling):
    """Rows get new pages of four tokens at different steps. The path returns to the first device."""
    mine, anew = carriers(family, 2)
    end = length(family, "llama")
    for carrier in (mine, anew):
        for number, prompt in enumerate(prompts(1, (3, 9, 6, 4))):
            carrier.add(f"s{number}", "llama", prompt, sampling, [(0, 0, 3), (1, 3, 5), (0, 5, end)])
        carrier.run()
    assert sampled(mine) == sampled(anew)
    assert followed(mine) == [2 * (TOKENS - 2), TOKENS - 2], "all but the prompts' step and the first decode"


def test_models_that_run_the_same_units(family, sampling):
    """A base and its adapter run in one call; a third model splits the step, which is then prepared anew."""
    mine, anew = carriers(family, 1)
    for carrier in (mine, anew):
        first, second, third = prompts(2, (5, 7, 6))
        carrier.add("plain", "llama", first, sampling, [(0, 0, length(family, "llama"))])
        carrier.add("lora", "lora", second, sampling, [(0, 0, length(family, "lora"))])
        carrier.add("again", "llama", third, sampling, [(0, 0, length(family, "llama"))])
        for _ in range(6):
            carrier.step()
        if carrier is mine:
            together = followed(mine)
        carrier.add("other", "stitched", first, replace(sampling, max_tokens=3), [(0, 0, length(family, "stitched"))])
        for _ in range(3):
            carrier.step()
        if carrier is mine:
            assert followed(mine) == together == [4]
        carrier.run()
    assert sampled(mine) == sampled(anew) and followed(mine) > together


def test_sequences_that_come_and_go(family, sampling):
    mine, anew = carriers(family, 2)
    texts = prompts(3, (4, 6, 11, 5))
    hops = [(0, 0, 4), (1, 4, length(family, "llama"))]
    for carrier in (mine, anew):
        for number in (0, 1):
            carrier.add(f"s{number}", "llama", texts[number], sampling, hops)
        for step in range(12):
            if step == 4:
                carrier.add("s2", "llama", texts[2], sampling, hops)
            if step == 7:
                carrier.drop("s0")
            if step == 9:
                carrier.add("s0", "llama", texts[3], sampling, hops)  # the same name, another sequence
            carrier.step(6)
        carrier.run()
    assert sampled(mine) == sampled(anew) and min(followed(mine)) > 8


def test_a_row_that_turns_back(family, sampling):
    """The last token is dropped and computed again, as after a wrong prediction; pages added meanwhile are known."""
    mine, anew = carriers(family, 1)
    for carrier in (mine, anew):
        one = carrier.add("a", "llama", prompts(4, (6,))[0], sampling, [(0, 0, length(family, "llama"))])
        for step in range(10):
            if step in (4, 5, 8):
                one.computed -= 1
                one.tokens.pop()
                one.sampled.pop()
                carrier.places[0].book.rewind("a@0", one.computed)
            carrier.step()
    assert sampled(mine) == sampled(anew)


def test_prompts_of_one_token_at_a_time_beside_answers(family, sampling):
    """Rows of one token that do not sample come before one that does: the sample is that of the right row."""
    mine, anew = carriers(family, 1)
    for carrier in (mine, anew):
        for number, prompt in enumerate(prompts(7, (9, 2, 5))):
            carrier.add(f"s{number}", "llama", prompt, sampling, [(0, 0, length(family, "llama"))])
        carrier.run(1)
    assert sampled(mine) == sampled(anew) and followed(mine)[0] > 0


def test_a_piece_of_a_prompt_behind_one_of_a_single_token(family, sampling):
    """A chunk starts one token further, as a decode does; without a head only its length distinguishes it."""
    mine, anew = carriers(family, 2)
    for carrier in (mine, anew):
        carrier.add("a", "llama", prompts(8, (9,))[0], sampling, [(0, 0, 3), (1, 3, length(family, "llama"))])
        for chunk in (1, 4, 1, 1):
            carrier.step(chunk)
        carrier.run()
    assert sampled(mine) == sampled(anew) and min(followed(mine)) > 0


def test_rows_without_penalties_and_log_probabilities_do_without_the_heads_modules(family, sampling, monkeypatch):
    """The first decode step runs the modules; repeated ones do only where more than a choice of logits is needed."""
    calls = []
    whole = LmHead.forward
    monkeypatch.setattr(LmHead, "forward", lambda self, hidden: (calls.append(1), whole(self, hidden))[1])
    mine, _ = carriers(family, 1)
    for number, prompt in enumerate(prompts(1, (3, 9))):
        mine.add(f"s{number}", "llama", prompt, sampling, [(0, 0, length(family, "llama"))])
    mine.run()
    assert followed(mine) == [TOKENS - 2]
    assert len(calls) == (2 if sampling in (SAMPLINGS["greedy"], SAMPLINGS["drawn"]) else TOKENS)


def test_one_row_that_is_not_greedy_among_others(family):
    mine, anew = carriers(family, 1)
    for carrier in (mine, anew):
        for name, prompt in zip(SAMPLINGS, prompts(1, (3, 9, 6, 4)), strict=True):
            carrier.add(name, "llama", prompt, SAMPLINGS[name], [(0, 0, length(family, "llama"))])
        carrier.run()
    assert sampled(mine) == sampled(anew) and followed(mine) == [TOKENS - 2]


@pytest.mark.filterwarnings("ignore:Setting .save_embedding_layers")
def test_an_adapter_on_embedding_and_head_beside_its_base(family, sampling):
    """Embedding and head run outside the call, each with its own frame."""
    if "everywhere" not in family.folders:
        family.lora("llama", "everywhere", seed=8, target_modules=["q_proj", "embed_tokens", "lm_head"])
    mine, anew = carriers(family, 1)
    for carrier in (mine, anew):
        for name, prompt in zip(("llama", "everywhere"), prompts(9, (5, 7)), strict=True):
            carrier.add(name, name, prompt, sampling, [(0, 0, length(family, name))])
        carrier.run()
    assert sampled(mine) == sampled(anew) and followed(mine) == [TOKENS - 2]


def test_stages_that_come_and_go_between_steps(family, sampling):
    mine, anew = carriers(family, 1)
    for carrier in (mine, anew):
        carrier.add("a", "llama", prompts(5, (6,))[0], sampling, [(0, 0, length(family, "llama"))])
        for step in range(8):
            if step == 4:
                carrier.add("b", "lora", prompts(5, (3,))[0], sampling, [(0, 0, length(family, "lora"))])
                carrier.step()
                carrier.drop("b")
            carrier.step()
    assert sampled(mine) == sampled(anew)


def test_a_failed_step_is_not_gone_on_from(family, sampling):
    """A step that would reuse the previous one fails on wrong hidden states; the next is prepared anew."""
    mine, anew = carriers(family, 2)
    for carrier in (mine, anew):
        carrier.add("a", "llama", prompts(6, (6,))[0], sampling, [(0, 0, 3), (1, 3, length(family, "llama"))])
        for _ in range(4):
            carrier.step()
        engine = carrier.places[1].engine
        run, engine.run = engine.run, lambda plan, inputs, run=engine.run: (_refused(run, plan), run(plan, inputs))[1]
        carrier.step()
        engine.run = run
        carrier.run()
    assert sampled(mine) == sampled(anew)


def _refused(run, plan):
    with pytest.raises(ValueError):
        run(plan, {})
