"""A stopped evaluation resumes: no question is run twice, and the document equals that of an uninterrupted run."""

from __future__ import annotations

import pytest

from surgery.evaluation import language_model
from surgery.evaluation.answers import Answers
from surgery.evaluation.harness import EvalOptions
from surgery.evaluation.record import evaluate_stored
from tests.checkpoints import make
from tests.surgery.evaluation.test_harness import ALL, texts
from zoo import Zoo

pytest.importorskip("lm_eval", reason="the eval extra is not installed")

OPTIONS = EvalOptions(limit=6, batch_size=4)
METHODS = ("loglikelihood", "loglikelihood_rolling", "generate_until")


@pytest.fixture(scope="module")
def zoo(tmp_path_factory):
    root = tmp_path_factory.mktemp("resume")
    with Zoo(root / "store") as opened:
        opened.ingest(make("llama", root / "base"), name="base")
        yield opened


@pytest.fixture
def asked(monkeypatch):
    """Record what lm-eval's own class is asked, lot by lot; `asked.stop` is the lot at which Ctrl-C is pressed."""

    class Log(list):
        stop = -1

    log = Log()
    monkeypatch.setattr(language_model, "LOT", 4)
    for name in METHODS:
        usual = getattr(language_model.HFLM, name)

        def counted(self, requests, disable_tqdm=False, *, name=name, usual=usual):
            if len(log) == log.stop:
                raise KeyboardInterrupt
            log.append((name, [request.args for request in requests]))
            return usual(self, requests, disable_tqdm)

        monkeypatch.setattr(language_model.HFLM, name, counted)
    return log


def left(zoo):
    return list((zoo.store.root / "work").glob("eval-*"))


def run(zoo):
    return evaluate_stored(zoo, "base", ALL, OPTIONS, texts=texts)


@pytest.mark.parametrize("stop", [1, 5, 9])
def test_stopped_and_started_again(zoo, asked, stop):
    straight = run(zoo)
    lots = list(asked)
    assert len(lots) == 10 and {name for name, _ in lots} == set(METHODS) and left(zoo) == []
    asked.clear()
    asked.stop = stop
    with pytest.raises(KeyboardInterrupt):
        run(zoo)
    assert len(left(zoo)) == 1
    asked.stop = -1
    again = run(zoo)
    assert list(asked) == lots, "each lot once, in two runs"
    assert {**again, "seconds": 0} == {**straight, "seconds": 0}
    assert left(zoo) == []


def test_other_settings_start_anew(zoo, asked):
    asked.stop = 5
    with pytest.raises(KeyboardInterrupt):
        run(zoo)
    asked.stop = -1
    asked.clear()
    evaluate_stored(zoo, "base", ALL, EvalOptions(limit=6, batch_size=2), texts=texts)
    assert len(asked) == 10
    run(zoo)
    assert left(zoo) == []


def test_what_is_drawn_is_asked_in_one_go(monkeypatch):
    drawn = [type("Request", (), {"args": ("a", {"do_sample": True, "temperature": 1.0})})()] * 6
    said = []
    model = language_model.ZooLM.__new__(language_model.ZooLM)
    usual = lambda self, requests, disable_tqdm=False: said.append(len(requests)) or ["x"] * len(requests)  # noqa: E731
    monkeypatch.setattr(language_model.HFLM, "generate_until", usual)
    assert model.generate_until(drawn) == ["x"] * 6 and said == [6]


def test_a_line_that_a_kill_has_cut_counts_as_none(tmp_path):
    first = Answers(tmp_path, {"a": 1})
    first.append_answers("q1", [[-1.5, True]])
    path = next((tmp_path / "work").iterdir())
    path.write_text(path.read_text() + '\n{"asked": "q2", "ans')
    first.append_answers("q3", ["text", "ü"])
    again = Answers(tmp_path, {"a": 1})
    assert (again.load_answers("q1"), again.load_answers("q2"), again.load_answers("q3")) == (
        [[-1.5, True]],
        None,
        ["text", "ü"],
    )
    assert Answers(tmp_path, {"a": 2}).load_answers("q1") is None
    again.remove_file()
    assert Answers(tmp_path, {"a": 1}).load_answers("q1") is None
