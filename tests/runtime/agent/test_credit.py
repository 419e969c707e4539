"""A device decodes several tokens on credit before it reports.

Every token is reported once; nothing after an end, an abort or a fault counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runtime.control.scheduler_io import AbortSequence
from runtime.engine.fakes.integer_model import counting_model, expected
from runtime.messages import LoadStages, RowsDone
from runtime.types import SamplingParams, SequenceRequest
from tests.runtime.agent.counted import CountedDevice
from tests.runtime.engine.driven import Driven, Limits, name_of

MODEL = counting_model("m", "1 2* 3 4* 5", eos_token_ids=(11,), max_model_len=64)
OTHER = counting_model("n", "1 2* 6", page_tokens=3, max_model_len=64)
AHEAD = [False, True]


def ask(
    seq: str, prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 20, model: str = "m", **how: Any
) -> SequenceRequest:
    return SequenceRequest(seq, f"r-{seq}", model, tuple(prompt), SamplingParams(max_tokens, **how))


def device(ahead: bool, pages: int = 200, **options: Any) -> CountedDevice:
    return CountedDevice((MODEL, OTHER), pages, ahead=ahead, **options)


def play(
    asked: Sequence[SequenceRequest], ahead: bool, credit: int, engine: CountedDevice | None = None, **limits: Any
) -> Driven:
    made = Driven(engine or device(ahead), Limits(**limits), credit=credit)
    for one in asked:
        made.arrive(one)
    while made.busy:
        assert made.step(), "nothing runs, and sequences are alive"
    made.end()
    return made


def dones(made: Driven) -> list[RowsDone]:
    return [message for message in made.heard if isinstance(message, RowsDone)]


def rows_of(made: Driven, seq: str) -> int:
    return sum(name_of(row.seq) == seq for plan in made.out.plans for row in plan.rows)


def answer(one: SequenceRequest) -> list[int]:
    return expected(MODEL if one.model == "m" else OTHER, one.prompt, one.sampling)


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_credit_is_one_report(ahead: bool) -> None:
    """One token from the prompt's step, then 20 more on credits of 8: 8, 8 and 4."""
    one = ask("a", max_tokens=21, ignore_eos=True)
    made = play([one], ahead, 8)
    assert made.out.tokens("a") == answer(one)
    assert [done.counts for done in dones(made)] == [(3,), (8,), (8,), (4,)]
    assert [len(done.earlier[0]) if done.earlier else 0 for done in dones(made)] == [0, 7, 7, 3]
    assert made.out.awaited == (17 if ahead else 0), "all but the first of each credit"


@pytest.mark.parametrize("ahead", AHEAD)
def test_every_token_has_its_own_scores(ahead: bool) -> None:
    one = ask("a", max_tokens=12, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    events = play([one], ahead, 5).out.events["a"]
    assert [event.token for event in events] == answer(one) and [event.index for event in events] == list(range(12))
    assert [[top.token for top in event.top] for event in events] == [
        [token, (token + 1) % 97] for token in answer(one)
    ]
    assert [bool(event.prompt_logprobs) for event in events] == [True] + [False] * 11


@pytest.mark.parametrize("ahead", AHEAD)
@pytest.mark.parametrize("at", range(1, 10))
def test_a_stop_within_a_credit_is_the_end(ahead: bool, at: int) -> None:
    """Tokens decoded after the stop are discarded, and their pages are freed (`Driven.end`)."""
    plain = answer(ask("a", ignore_eos=True))
    one = ask("a", ignore_eos=True, stop_token_ids=(plain[at],))
    wanted = plain[: plain.index(plain[at]) + 1]
    made = play([one, ask("b", (4, 5), ignore_eos=True)], ahead, 6)
    assert made.out.tokens("a") == wanted and made.out.events["a"][-1].finish == "stop"
    assert rows_of(made, "a") <= len(wanted) + ahead, "one row is under way behind the end at most"
    assert made.out.tokens("b") == answer(ask("b", (4, 5), ignore_eos=True))


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_stop_counts_from_the_least_number_of_tokens_on(ahead: bool) -> None:
    plain = answer(ask("a", ignore_eos=True))
    one = ask("a", ignore_eos=True, stop_token_ids=(plain[1], plain[2]), min_tokens=5)
    made = play([one], ahead, 8)
    assert made.out.tokens("a") == answer(one) and len(answer(one)) >= 5
    assert dones(made)[1].counts == (min(8, len(answer(one)) - 1),), "it went on behind what is no end yet"


@pytest.mark.parametrize("ahead", AHEAD)
def test_an_end_is_told_once_however_late_the_scheduler_answers(ahead: bool) -> None:
    plain = answer(ask("a", ignore_eos=True))
    one = ask("a", ignore_eos=True, stop_token_ids=(plain[3],))
    made = Driven(device(ahead), credit=8, late=15)
    made.arrive(one)
    while made.busy or made.step():
        made.step()
    made.end()
    assert made.out.tokens("a") == answer(one)
    assert sum(sum(done.counts) for done in dones(made)) == len(one.prompt) + len(answer(one)) - 1


def test_a_row_that_waits_longer_has_its_token_by_then() -> None:
    """From now on only one of two sequences on credit fits a block, so the other's next row is planned a step later."""
    made = Driven(device(True), credit=9)
    asked = [ask(seq, (number,), 12, ignore_eos=True) for number, seq in enumerate("ab")]
    for one in asked:
        made.arrive(one)
    for _ in range(4):
        made.step()
    block = MODEL.chain().uses[0].block
    made.agent.handle(LoadStages((), (), ((block, 1),)), (), made.now)
    for _ in range(6):
        made.step()
    made.agent.handle(LoadStages((), (), ((block, 9),)), (), made.now)
    while made.busy:
        assert made.step()
    made.end()
    for one in asked:
        assert made.out.tokens(one.seq) == answer(one)


@pytest.mark.parametrize("ahead", AHEAD)
def test_an_abort_within_a_credit_ends_it_at_once(ahead: bool) -> None:
    made = Driven(device(ahead), credit=16)
    for one in (ask("a", ignore_eos=True), ask("b", (7,), ignore_eos=True)):
        made.arrive(one)
    for _ in range(5):
        made.step()
    made.tell(AbortSequence("a"))
    assert made.out.events["a"][-1].finish == "abort"
    while made.busy:
        made.step()
    made.end()
    assert made.out.tokens("b") == answer(ask("b", (7,), ignore_eos=True))
    rows = [row.seq.split("#")[0] for plan in made.out.plans for row in plan.rows]
    assert rows.count("a") <= 6, "it was decoded on behind its end"


@pytest.mark.parametrize("ahead", AHEAD)
def test_a_failed_step_costs_its_own_tokens_only(ahead: bool) -> None:
    """Tokens decoded before the failed step are reported; rows launched in the step after it run again."""
    one, late = ask("a", ignore_eos=True), ask("b", (9, 9), ignore_eos=True)
    made = Driven(device(ahead, fail_at=(5,)), credit=16)
    made.arrive(one)
    while made.busy:
        assert made.step()
        if len(made.out.plans) == 5:
            made.arrive(late)
    made.end()
    events = made.out.events["a"]
    assert events[-1].finish == "error" and "the engine failed" in (events[-1].error or "")
    assert made.out.tokens("a") == answer(one)[:4]
    assert made.out.tokens("b") == answer(late)


def test_a_report_that_is_no_credit_is_refused() -> None:
    made = Driven(device(False), credit=4)
    made.arrive(ask("a", ignore_eos=True))
    made.step()
    member = made.scheduler.sequences["a"]
    made.tell(RowsDone("here", ("a",), (member.epoch,), (5,), (None,)))
    assert made.out.events["a"][-1].finish == "error"


@settings(max_examples=60, deadline=None)
@given(data=st.data(), ahead=st.booleans())
def test_whatever_comes_and_goes(data: st.DataObject, ahead: bool) -> None:
    """With few pages, few tokens a step, stops and aborts, each sequence gets its own tokens; all pages are freed."""
    asked = []
    for number in range(data.draw(st.integers(1, 6))):
        prompt = data.draw(st.lists(st.integers(0, 96), min_size=1, max_size=9))
        stops = tuple(data.draw(st.lists(st.integers(0, 96), max_size=12)))
        params = dict(
            max_tokens=data.draw(st.integers(0, 20)), stop_token_ids=stops, ignore_eos=data.draw(st.booleans())
        )
        asked.append(ask(f"s{number}", prompt, model=data.draw(st.sampled_from("mn")), **params))
    due = {one.seq: data.draw(st.integers(0, 12)) for one in asked}
    aborted = {data.draw(st.integers(1, 20)): one.seq for one in asked if data.draw(st.integers(0, 4)) == 0}
    limits = Limits(data.draw(st.integers(1, 24)), data.draw(st.integers(1, 6)), 0.0)
    made = Driven(
        device(ahead, data.draw(st.integers(20, 60))),
        limits,
        data.draw(st.sampled_from(["off", "active", "cached"])),
        data.draw(st.integers(1, 9)),
        data.draw(st.integers(0, 3)),
    )
    step = 0
    while made.busy or step <= 20:
        for one in asked:
            if due[one.seq] == step:
                made.arrive(one)
        if step in aborted:
            made.tell(AbortSequence(aborted[step]))
        made.step()
        step += 1
        assert step < 3000
    made.end()
    for one in asked:
        events, tokens = made.out.events[one.seq], made.out.tokens(one.seq)
        assert [event.finish is not None for event in events] == [False] * (len(events) - 1) + [True]
        if events[-1].finish in ("stop", "length"):
            assert tokens == answer(one)
        else:
            assert tokens == answer(one)[: len(tokens)] and events[-1].finish == "abort"


def test_nothing_but_reports_goes_to_the_scheduler() -> None:
    made = play([ask("a", max_tokens=9, ignore_eos=True)], True, 8)
    assert {type(message).__name__ for message in made.heard} == {"StageReady", "RowsDone"}


@pytest.mark.parametrize("sharing", ["active", "cached"])
def test_whoever_wants_scores_of_its_prompt_shares_it_with_others(sharing: Any) -> None:
    """It shares no prefix itself, since scores need a run; later sequences share its pages, also after its end."""
    made = Driven(device(False), sharing=sharing)
    made.arrive(ask("a", range(20), 8, ignore_eos=True, prompt_logprobs=1))
    for _ in range(20 if sharing == "cached" else 4):
        made.step()
    made.arrive(ask("b", range(20), 8, ignore_eos=True))
    while made.busy:
        assert made.step()
    made.end()
    assert made.out.shared == 16 and made.out.tokens("b") == made.out.tokens("a")
