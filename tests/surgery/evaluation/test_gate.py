"""Conditions of a promotion, judged on documents as lm-eval gives them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from surgery.evaluation.gate import judge, parse_conditions
from zoo.errors import InputError


def document(acc: float, perplexity: float = 10.0) -> dict[str, Any]:
    return {
        "results": {
            "results": {
                "cloze": {"alias": "cloze", "acc,none": acc, "acc_stderr,none": 0.5, "acc_norm,none": acc / 2},
                "ppl": {"alias": "ppl", "word_perplexity,none": perplexity, "word_perplexity_stderr,none": "N/A"},
                "empty": {"alias": "empty"},
            },
            "higher_is_better": {"cloze": {"acc": True, "acc_norm": True}, "ppl": {"word_perplexity": False}},
        }
    }


def met(condition: str, candidate: dict[str, Any], live: dict[str, Any] | None = None) -> bool:
    (figure,) = judge(parse_conditions([condition]), candidate, live)
    return figure.met


def test_bounds_hold_at_their_value() -> None:
    assert met("cloze>=0.5", document(0.5)) and not met("cloze>=0.5", document(0.4999))
    assert met("ppl<=10", document(0, 10.0)) and not met("ppl<=10", document(0, 10.1))
    assert met("cloze : acc_norm >= 0.25", document(0.5)) and not met("cloze:acc_norm>=0.3", document(0.5))
    assert met("cloze>=-1e3", document(0.0))


def test_live_is_the_bound_or_nothing_is() -> None:
    assert met("cloze>=live", document(0.5), document(0.5)) and not met("cloze>=live", document(0.4), document(0.5))
    assert met("ppl<=live", document(0, 9.0), document(0, 9.5)) and not met(
        "ppl<=live", document(0, 9.6), document(0, 9)
    )
    assert met("cloze>=live", document(0.0))
    (figure,) = judge(parse_conditions(["cloze>=0.9"]), document(0.5), document(0.7))
    assert (figure.metric, figure.candidate, figure.live, figure.bound) == ("acc", 0.5, 0.7, 0.9)


def test_what_is_no_number_passes_nothing() -> None:
    for condition in ("cloze>=live", "cloze>=0.0", "cloze>=-1"):
        assert not met(condition, document(math.nan), document(0.1)), condition
    assert not met("cloze>=live", document(0.5), document(math.nan))
    assert not met("cloze>=live", document(math.nan))


@pytest.mark.parametrize(
    "text",
    ["", "cloze", "cloze>0.5", "cloze==1", "cloze>=", ">=0.5", "cloze>=much", "cloze>=nan", "cloze>=inf", "a:b:c>=1"],
)
def test_what_is_no_condition(text: str) -> None:
    with pytest.raises(InputError, match="a condition is TASK>=X"):
        parse_conditions([text])


def test_one_is_needed() -> None:
    with pytest.raises(InputError, match="needs a condition"):
        parse_conditions([])


@pytest.mark.parametrize(
    ("condition", "said"),
    [
        ("other>=1", "no result of a task 'other'; there are cloze, empty, ppl"),
        ("cloze:f1>=1", "no metric 'f1'; it has acc, acc_norm"),
        ("empty>=1", "no number"),
        ("ppl>=live", "less is better: use <="),
        ("cloze<=live", "more is better: use >="),
    ],
)
def test_what_the_results_cannot_answer(condition: str, said: str) -> None:
    with pytest.raises(InputError, match=said):
        judge(parse_conditions([condition]), document(0.5), document(0.5))
