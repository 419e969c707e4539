"""Test questions are deterministic; the right answer is the line that follows, wrong answers come from other files."""

from __future__ import annotations

import random

from surgery.evaluation.builtin import builtins
from surgery.evaluation.items import CHOICES, cloze_items, recall_items


def source(seed: int, lines: int = 60) -> str:
    """Return a file of statements at two depths; every line names its file, so that it can be found again."""
    draw = random.Random(seed)
    body = [
        f"{'    ' * draw.randrange(2)}value_{seed}_{at} = self.{draw.choice(['alpha', 'gamma'])}.run({at})"
        for at in range(lines)
    ]
    return "\n".join(body) + "\n"


TEXTS = [source(seed) for seed in range(5)]


def test_the_right_line_follows_its_context_and_wrong_ones_stand_elsewhere_at_the_same_depth():
    items = cloze_items(TEXTS, 100)
    assert len(items) == 100
    for item in items:
        right = item.choices[item.answer]
        home = next(text for text in TEXTS if item.context + right + "\n" in text)
        assert len(set(item.choices)) == CHOICES
        for wrong in item.choices[: item.answer] + item.choices[item.answer + 1 :]:
            assert wrong not in home and any(wrong in text for text in TEXTS)
            assert len(wrong) - len(wrong.lstrip()) == len(right) - len(right.lstrip())
    assert {item.answer for item in items} == set(range(CHOICES)), "no choice is always the right one"


def test_questions_do_not_change_from_run_to_run_and_fewer_are_the_first_of_more():
    assert cloze_items(TEXTS, 20) == cloze_items(TEXTS, 100)[:20]
    assert recall_items(TEXTS, 5) == recall_items(TEXTS, 50)[:5]
    assert cloze_items(TEXTS, 20) != cloze_items([text.replace("run", "fly") for text in TEXTS], 20)


def test_one_file_alone_borrows_wrong_choices_but_no_questions():
    assert cloze_items(TEXTS[:1], 50) == []
    items = cloze_items(TEXTS[:1], 50, TEXTS)
    assert len(items) == 50
    assert all(item.choices[item.answer] in TEXTS[0] for item in items)


def test_a_name_to_recall_stands_behind_a_dot_and_once_more_before():
    items = recall_items(TEXTS, 30)
    assert len(items) == 30
    for item in items:
        assert item.context.endswith(".") and item.target in item.context
        assert any(item.context + item.target in text for text in TEXTS)


def test_every_subject_has_its_tasks():
    known = builtins()
    assert list(known)[:3] == ["library_ppl", "library_cloze", "library_recall"]
    assert {f"library_{kind}_mail" for kind in ("ppl", "cloze", "recall")} < set(known)
