"""The integer engine: values computed by hand, tokens that depend on all state, and every kind of wrong plan caught."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from runtime.chains import Array, Stage
from runtime.engine.fakes.faults import FakeFault, PlanViolation
from runtime.engine.fakes.integer_engine import IntegerEngine
from runtime.engine.fakes.integer_model import PRIME, counting_model, expected
from runtime.types import EngineMemory, Logprob, Opened, Row, SamplingParams, StepPlan
from tests.runtime.engine.carry import Carrier
from tests.runtime.virtual import request
from zoo.errors import NotFound, NotServable

M = counting_model("m", "1 2* 3 4* 5* 6")
#: Shares components with M, at other places.
OTHER = counting_model("o", "1 2* 7 4* 9 6", page_tokens=2, virtual_tokens=3)
PROMPTS = ((5, 6, 7, 8, 9), (1,), tuple(range(11)))
EIGHT = SamplingParams(8)


def engines(count: int, pages: int = 64) -> list[IntegerEngine]:
    return [IntegerEngine([M, OTHER], pages, device=f"d{number}") for number in range(count)]


def test_a_token_can_be_worked_out_by_hand() -> None:
    tiny = counting_model("t", "0 1* 0")
    # token 4 at 0:   3*4 + 7 + 0 = 19;   5*19 + 12 + 0 + 1*(19 + 361) = 487;   3*487 + 7 = 1468 = 15*97 + 13
    # token 13 at 1:  3*13 + 7 + 13 = 59; 5*59 + 12 + 24 + 380 + 2*(59 + 3481) = 7791;  3*7791 + 7 + 13 = 23393 = 241*97
    #                 + 16
    assert expected(tiny, (4,), SamplingParams(2)) == [13, 16]


@pytest.mark.parametrize("chunk", [1000, 3, 1])
@pytest.mark.parametrize("cut", range(1, 6))
def test_stages_over_two_engines_are_the_whole(cut: int, chunk: int) -> None:
    carrier = Carrier(*engines(2))
    wanted = {}
    for number, prompt in enumerate(PROMPTS):
        for model in (M, OTHER):
            name = model.spec.name
            carrier.add(f"{name}{number}", name, prompt, EIGHT, [(number % 2, 0, cut), (1 - number % 2, cut, 6)])
            wanted[f"{name}{number}"] = expected(model, prompt, EIGHT)
    carrier.run(chunk)
    assert {seq: one.produced for seq, one in carrier.seqs.items()} == wanted


def test_a_sequence_may_come_back_to_a_device() -> None:
    carrier = Carrier(*engines(2))
    one = carrier.add("a", "m", PROMPTS[0], EIGHT, [(0, 0, 2), (1, 2, 4), (0, 4, 6)])
    carrier.run()
    assert one.produced == expected(M, PROMPTS[0], EIGHT)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), st.integers(0, 3))
def test_moved_pages_continue_where_they_were(moves: list[tuple[int, int]], chunk: int) -> None:
    carrier = Carrier(*engines(3))
    one = carrier.add("a", "m", PROMPTS[2], EIGHT, [(0, 0, 2), (1, 2, 4), (2, 4, 6)])
    for hop, to in moves:
        carrier.step(chunk + 1)
        if one.hops[hop][0] is not carrier.places[to]:
            carrier.move("a", hop, to)
    carrier.run()
    assert one.produced == expected(M, PROMPTS[2], EIGHT)


def test_a_page_that_was_not_copied_changes_the_tokens() -> None:
    carrier = Carrier(*engines(2))
    one = carrier.add("a", "m", PROMPTS[0], EIGHT, [(0, 0, 3), (1, 3, 6)])
    carrier.step()
    carrier.move("a", 0, 1, copy=False)
    carrier.run()
    wanted = expected(M, PROMPTS[0], EIGHT)
    assert one.produced[0] == wanted[0] and one.produced[1] != wanted[1]


@pytest.mark.parametrize("word", range(8))
def test_every_word_of_a_full_page_counts(word: int) -> None:
    """K and V of every token matter: a page of four tokens holds eight words and nothing else."""
    large = counting_model("large", "1 2* 3 4* 5* 6", vocab_size=PRIME)  # its token is the whole value
    tokens = []
    for flipped in (0, 1):
        engine = IntegerEngine([large], 8)
        carrier = Carrier(engine)
        one = carrier.add("a", "large", PROMPTS[0], EIGHT, [(0, 0, 6)])
        carrier.step()
        page = carrier.places[0].book.groups_of("a@0")[0][1]
        data = bytearray(engine.read_pages([page]).data)
        data[8 * word] ^= flipped
        engine.write_pages([page], Array("uint8", (1, 64), data))
        carrier.step()
        tokens.append(one.produced[1])
    assert tokens[0] != tokens[1]


def test_prompts_that_share_full_pages() -> None:
    (engine,) = engines(1)
    stage = Stage("m", 0, 6)
    engine.load(stage)
    prompt = (1, 2, 3, 4, 5)
    opened = [Opened(replace(request(f"{seq}@0", prompt), model=stage.id)) for seq in "ab"]
    engine.run(StepPlan(1, (Row("a@0", stage.id, prompt, 0, ((0, 1, 2), (3, 4, 5))),), (opened[0],)), {})
    row = Row("b@0", stage.id, (5,), 4, ((0, 1, 2), (6, 7, 8)))
    result = engine.run(StepPlan(2, (row,), (opened[1],)), {})
    assert [one.token for one in result.result.sampled] == expected(M, prompt, SamplingParams(1))
    engine.run(StepPlan(3, (), (), ("a@0",)), {})
    with pytest.raises(PlanViolation, match="writes page 0, which is b@0's, too"):
        engine.run(StepPlan(4, (Row("a@0", stage.id, prompt, 0, ((0, 1, 2), (3, 4, 5))),), (opened[0],)), {})


def test_ends_are_the_fake_engines() -> None:
    wanted = expected(M, PROMPTS[0], EIGHT)
    ending = replace(M, spec=replace(M.spec, eos_token_ids=(wanted[2],)))
    assert expected(ending, PROMPTS[0], EIGHT) == wanted[:3]
    assert expected(ending, PROMPTS[0], replace(EIGHT, ignore_eos=True)) == wanted
    assert expected(ending, PROMPTS[0], replace(EIGHT, min_tokens=4))[2] == (wanted[2] + 1) % 97
    assert len(expected(M, range(60), EIGHT)) == 4  # the context has 64


def test_log_probabilities_are_the_fake_engines() -> None:
    carrier = Carrier(*engines(2))
    one = carrier.add("a", "m", (5, 6), SamplingParams(1, logprobs=1, prompt_logprobs=0), [(0, 0, 3), (1, 3, 6)])
    carrier.run()
    assert one.sampled[0].logprob == -1.0 and one.sampled[0].top == (Logprob(one.produced[0], -1.0),)
    assert [part.chosen for part in one.prompts] == [(Logprob(6, -1.0),)]


def test_memory_counts_shared_parts_once() -> None:
    (engine,) = engines(1)
    engine.load(Stage("m", 0, 2))
    engine.load(Stage("o", 1, 3))
    assert engine.memory() == EngineMemory(weights=3000, weights_unshared=4000, kv_pool=64 * 64)
    engine.unload(Stage("m", 0, 2))
    assert engine.memory().weights == 2000


def test_specs_and_chains() -> None:
    (engine,) = engines(1)
    assert engine.load(Stage("m", 2, 5)) == replace(M.spec, name="m[2:5]", kv_layers=2)
    assert engine.load(Stage("m", 0, 1)).kv_layers == 0
    chain, other = M.chain(2, 3), OTHER.chain(2, 3)
    assert [(use.lo, use.hi, use.kv_layers) for use in chain.uses] == [(0, 2, 1), (2, 3, 0), (3, 6, 2)]
    assert [a.block == b.block for a, b in zip(chain.uses, other.uses, strict=True)] == [True, False, False]
    assert [block.nbytes for block in M.blocks(2, 3)] == [2000, 1000, 3000]


@pytest.mark.parametrize(
    ("stage", "error"), [(Stage("x", 0, 1), NotFound), (Stage("m", 3, 7), NotServable), (Stage("m", 2, 2), NotServable)]
)
def test_stages_that_cannot_be(stage: Stage, error: type[Exception]) -> None:
    with pytest.raises(error):
        engines(1)[0].load(stage)


def test_pages_hold_no_more_tokens_than_fit() -> None:
    with pytest.raises(NotServable, match="4 tokens do not fit"):
        IntegerEngine([M], 4, page_bytes=48).load(Stage("m", 0, 2))


STAGE = Stage("m", 1, 4)
ROW = Row("a@1", STAGE.id, (0,), 2, (), sample=False)
HIDDEN = Array("int64", (1, 1), array("q", [7]).tobytes())
HEAD = Row("h@4", "m[4:6]", (0,), 0, ((20,),))


def started() -> IntegerEngine:
    """Return an engine with three stages loaded, three sequences open, and one step run."""
    (engine,) = engines(1)
    for stage in (STAGE, Stage("m", 0, 1), Stage("m", 4, 6)):
        engine.load(stage)
    opened = tuple(
        Opened(replace(request(seq, (1, 2, 3), max_tokens=4), model=model))
        for seq, model in (("a@1", STAGE.id), ("e@0", "m[0:1]"), ("h@4", "m[4:6]"))
    )
    rows = (Row("a@1", STAGE.id, (0, 0), 0, ((0, 1),), sample=False),)
    engine.run(StepPlan(1, rows, opened), {"a@1": Array("int64", (2, 1), array("q", [5, 6]).tobytes())})
    return engine


@pytest.mark.parametrize(
    ("plan", "inputs", "what"),
    [
        (StepPlan(1, (ROW,)), {"a@1": HIDDEN}, "comes after"),
        (StepPlan(2, (ROW, ROW)), {"a@1": HIDDEN}, "two rows"),
        (StepPlan(2, (structs.replace(ROW, seq="b@1"),)), {"b@1": HIDDEN}, "unknown"),
        (StepPlan(2, (structs.replace(ROW, model="m[0:1]"),)), {"a@1": HIDDEN}, "belongs to"),
        (StepPlan(2, (structs.replace(ROW, start=1),)), {"a@1": HIDDEN}, "starts at 1"),
        (StepPlan(2, (structs.replace(ROW, start=3),)), {"a@1": HIDDEN}, "starts at 3"),
        (StepPlan(2, (structs.replace(ROW, start=4),)), {"a@1": HIDDEN}, "1 groups for 5"),
        (StepPlan(2, (structs.replace(ROW, tokens=()),)), {"a@1": HIDDEN}, "no tokens"),
        (StepPlan(2, (structs.replace(ROW, tokens=(3,)),)), {"a@1": HIDDEN}, "tokens where"),
        (StepPlan(2, (structs.replace(ROW, sample=True),)), {"a@1": HIDDEN}, "without a head"),
        (StepPlan(2, (structs.replace(ROW, new_pages=((2,),)),)), {"a@1": HIDDEN}, "one page per layer"),
        (StepPlan(2, (structs.replace(ROW, new_pages=((2, 2),)),)), {"a@1": HIDDEN}, "given twice"),
        (StepPlan(2, (structs.replace(ROW, new_pages=((1, 2),)),)), {"a@1": HIDDEN}, "has page 1 already"),
        (StepPlan(2, (structs.replace(ROW, new_pages=((2, 64),)),)), {"a@1": HIDDEN}, "out of range"),
        (StepPlan(2, (ROW,)), {}, "no hidden states"),
        (StepPlan(2, ()), {"a@1": HIDDEN}, "no row"),
        (StepPlan(2, (ROW,)), {"a@1": structs.replace(HIDDEN, shape=(1, 2))}, "hidden states are"),
        (StepPlan(2, (ROW,)), {"a@1": structs.replace(HIDDEN, dtype="float64")}, "hidden states are"),
        (StepPlan(2, (Row("e@0", "m[0:1]", (1,), 0, ((),), sample=False),)), {"e@0": HIDDEN}, "starts from tokens"),
        (StepPlan(2, (Row("e@0", "m[0:1]", (2,), 0, (), sample=False),)), {}, "not its tokens"),
        (StepPlan(2, (Row("e@0", "m[0:1]", (97,), 5, (), sample=False),)), {}, "vocabulary"),
        (StepPlan(2, (Row("e@0", "m[0:1]", (7,), 64, (), sample=False),)), {}, "too many"),
        (StepPlan(2, (HEAD,)), {"h@4": HIDDEN}, "not its prompt"),
        (
            StepPlan(2, (structs.replace(HEAD, sample=False, new_pages=((1,),)),)),
            {"h@4": HIDDEN},
            "writes page 1, which is a@1's",
        ),
        (StepPlan(2, (), (Opened(replace(request("a@1"), model=STAGE.id)),)), {}, "opened twice"),
        (StepPlan(2, (), (Opened(replace(request("b@2"), model=STAGE.id)),)), {}, "not named"),
        (StepPlan(2, (), (Opened(replace(request("b@1"), model="m[1:3]")),)), {}, "not loaded"),
        (StepPlan(2, (), (), ("b@1",)), {}, "unknown"),
    ],
)
def test_wrong_plans_are_caught(plan: StepPlan, inputs: dict[str, Array], what: str) -> None:
    with pytest.raises(PlanViolation, match=what):
        started().run(plan, inputs)


def test_what_is_right_about_them() -> None:
    result = started().run(StepPlan(2, (ROW,)), {"a@1": HIDDEN})
    assert result.outputs["a@1"].shape == (1, 1) and len(result.outputs["a@1"].data) == 8
    assert result.result.busy == 1_000_000 + 10_000


def test_a_fault_lets_sequences_be_released_again() -> None:
    engine = IntegerEngine([M], 8, fail_at=[1])
    engine.load(Stage("m", 0, 1))
    opened = [Opened(replace(request(seq), model="m[0:1]")) for seq in ("a@0#1", "b@0#2")]
    with pytest.raises(FakeFault):
        engine.run(StepPlan(1, (), tuple(opened)), {})
    engine.run(StepPlan(2, (), (), ("a@0#1",)), {})
    assert engine.sequences == 1
    engine.run(StepPlan(3, (), (), ("a@0#1", "b@0#2")), {})
    with pytest.raises(PlanViolation, match="c@0 is unknown"):
        engine.run(StepPlan(4, (), (), ("c@0",)), {})


def test_rows_go_on_behind_what_was_brought() -> None:
    """Two tokens of a page of four are recomputed; then the whole page arrives with all four."""
    source, target = started(), started()
    four = Array("int64", (4, 1), array("q", [5, 6, 7, 8]).tobytes())
    fifth = {"b@1": Array("int64", (1, 1), array("q", [9]).tobytes())}
    opened = (Opened(replace(request("b@1", (1, 2, 3, 4, 5)), model=STAGE.id)),)
    row = Row("b@1", STAGE.id, (0,) * 4, 0, ((8, 9),), sample=False)
    last = Row("b@1", STAGE.id, (0,), 4, ((6, 7),), sample=False)
    source.run(StepPlan(2, (row,), opened), {"b@1": four})
    target.run(
        StepPlan(2, (structs.replace(row, tokens=(0, 0)),), opened), {"b@1": Array("int64", (2, 1), four.data[:16])}
    )
    with pytest.raises(PlanViolation, match="starts at 4, 2 tokens"):
        target.run(StepPlan(3, (last,)), fifth)
    target.write_pages([8, 9], source.read_pages([8, 9]))
    wanted = source.run(StepPlan(3, (last,)), fifth).outputs["b@1"]
    assert target.run(StepPlan(4, (last,)), fifth).outputs["b@1"] == wanted


def test_stages_in_use_stay() -> None:
    with pytest.raises(PlanViolation, match="still has sequences"):
        started().unload(STAGE)


def test_arrays_of_other_shapes_are_no_pages() -> None:
    with pytest.raises(ValueError, match="2 pages of 64 bytes"):
        engines(1)[0].write_pages([0, 1], Array("uint8", (1, 64), bytes(64)))
