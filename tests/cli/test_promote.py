"""`zoo promote`: the better model becomes live, a worse one is refused with the figures and exit code 1."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import cli.app
from surgery.evaluation import promotion
from tests.checkpoints import make
from zoo import Zoo
from zoo.aliases import set_alias

pytest.importorskip("lm_eval", reason="the eval extra is not installed")


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two checkpoints of a run. The second one's head is far too loud, so it is worse on any text."""
    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("promoted")
    base = make("llama", root / "base", tie_word_embeddings=False)
    with Zoo(root / "store") as zoo:
        zoo.ingest(base, "run@step-9")
        model = AutoModelForCausalLM.from_pretrained(base)
        with torch.no_grad():
            model.lm_head.weight.mul_(20)
        model.save_pretrained(root / "loud")
        for file in base.glob("token*"):
            (root / "loud" / file.name).write_bytes(file.read_bytes())
        zoo.ingest(root / "loud", "run@step-10", base="run@step-9")
    return root / "store"


@pytest.fixture(scope="module")
def diverged(own: Path) -> Path:
    """The same store with a third checkpoint: its perplexity is larger than any float."""
    with Zoo(own) as zoo:
        model = zoo.model("run@step-9").load()
        with torch.no_grad():
            model.lm_head.weight.mul_(1e4)
        model.save_pretrained(own.parent / "diverged")
        for file in (own.parent / "base").glob("token*"):
            (own.parent / "diverged" / file.name).write_bytes(file.read_bytes())
        zoo.ingest(own.parent / "diverged", "diverged", base="run@step-9")
    return own


def zoo(capsys: pytest.CaptureFixture[str], store: Path, *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*arguments, "--store", str(store)])
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


def promoted(capsys: pytest.CaptureFixture[str], store: Path, *arguments: str) -> tuple[int, Any]:
    code, out, err = zoo(capsys, store, "promote", *arguments, "--to", "prod", "--limit", "1", "--json")
    assert out, err
    return code, json.loads(out)


def history(store: Path) -> list[tuple[str, list[str]]]:
    with Zoo(store) as opened, opened.store.catalog.reading() as reader:
        return [(change.act, [target.model for target in change.targets]) for change in reader.alias_changes("prod")]


def test_from_nothing_to_refusal_to_promotion_and_back(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, done = promoted(capsys, own, "run@step-9", "--if", "library_ppl<=live")
    assert code == 0 and done["promoted"] and done["live"] is None and history(own) == [("promote", ["run@step-9"])]
    good = done["figures"][0]["candidate"]

    code, done = promoted(capsys, own, "run", "--if", "library_ppl<=live", "--if", "library_ppl:bits_per_byte<=1e9")
    assert (code, done["promoted"], done["candidate"], done["live"]) == (1, False, "run@step-10", "run@step-9")
    worse, fine = done["figures"]
    assert worse["candidate"] > worse["live"] == good == worse["bound"] and (worse["met"], fine["met"]) == (False, True)
    assert history(own) == [("promote", ["run@step-9"])]

    code, out, _ = zoo(capsys, own, "promote", "run", "--to", "prod", "--if", "library_ppl<=live", "--limit", "1")
    assert code == 1 and f"{good:.4f}" in out and "refused: prod still points to run@step-9" in out

    code, done = promoted(capsys, own, "run", "--if", "library_ppl<=1e300")
    assert code == 0 and done["promoted"] and history(own)[0] == ("promote", ["run@step-10"])
    code, done = promoted(capsys, own, "run", "--if", "library_ppl<=1e300")
    assert code == 0 and done["figures"] == [] and len(history(own)) == 2  # it is live already
    assert "library_ppl<=1e300: " in zoo(capsys, own, "alias", "prod", "--history")[1]
    assert zoo(capsys, own, "rollback", "prod")[1] == "prod -> run@step-9\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent", "--to", "x", "--if", "library_ppl<=1"], "no model 'absent'"),
        (["run", "--to", "x"], "needs a condition"),
        (["run", "--to", "x", "--if", "library_ppl"], "a condition is"),
        (["run", "--to", "run@step-9", "--if", "library_ppl<=1"], "is a model"),
        (["run", "--to", "a/../b", "--if", "library_ppl<=1"], "cannot be a model's name"),
        (["run", "--to", "x", "--if", "no_such_task>=1"], "there is no task 'no_such_task'"),
        (["run", "--to", "x", "--if", "library_ppl>=1", "--limit", "1"], "less is better"),
    ],
)
def test_bad_input_is_exit_code_2(
    own: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    code, out, err = zoo(capsys, own, "promote", *arguments)
    assert (code, out) == (2, "") and said in err
    with Zoo(own) as opened:
        assert "x" not in {alias.name for alias in opened.aliases()}


def test_a_model_that_diverged_is_an_error_and_not_live(diverged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("promote", "diverged", "--to", "y", "--if", "library_ppl<=live", "--limit", "1")
    code, _, err = zoo(capsys, diverged, *asked)
    assert code == 2 and "probably diverged" in err and err.count("zoo: ") == 1
    with Zoo(diverged) as opened:
        assert "y" not in {alias.name for alias in opened.aliases()}


def test_a_change_during_the_measurement_is_not_overwritten(
    own: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Zoo(own) as opened:
        set_alias(opened.store, "busy", "run@step-9")

    def changed(zoo: Zoo, *rest: Any, **more: Any) -> dict[str, Any]:
        set_alias(zoo.store, "busy", "run@step-10" if not zoo.aliases()[0].before else "run@step-9")
        return {"results": {"results": {"t": {"acc,none": 1.0}}}}

    monkeypatch.setattr(promotion, "evaluate_stored", changed)
    code, _, err = zoo(capsys, own, "promote", "run", "--to", "busy", "--if", "t>=0")
    assert code == 2 and "changed meanwhile" in err
