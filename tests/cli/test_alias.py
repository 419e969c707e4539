"""`zoo alias` and `zoo rollback`: on a store, and followed by a running `zoo serve`."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import openai
import pytest

import cli.app
from tests.cli.test_serve import serving


@pytest.fixture
def own(store: Path, tmp_path: Path) -> Path:
    """A copy of the store that a test may change."""
    return Path(shutil.copytree(store, tmp_path / "own"))


def zoo(capsys: pytest.CaptureFixture[str], store: Path, *arguments: str, code: int = 0) -> str:
    """Run a verb; return what it prints, or with a code its error line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*arguments, "--store", str(store)])
    printed = capsys.readouterr()
    assert (ended.value.code or 0) == code, printed.err
    return printed.err.strip() if code else printed.out.strip()


def documents(capsys: pytest.CaptureFixture[str], store: Path, *arguments: str) -> Any:
    return json.loads(zoo(capsys, store, *arguments, "--json"))


def test_set_list_show_history_roll_back_and_delete(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "zoo alias NAME MODEL" in zoo(capsys, own, "alias")
    assert zoo(capsys, own, "alias", "prod", "base") == "prod -> org/base"
    assert zoo(capsys, own, "alias", "prod", "lora") == "prod -> org/lora"
    assert zoo(capsys, own, "alias", "prod") == "prod -> org/lora"
    assert zoo(capsys, own, "rollback", "prod") == "prod -> org/base"
    (listed,) = documents(capsys, own, "alias")["aliases"]
    assert (listed["alias"], listed["targets"], listed["before"]) == (
        "prod",
        [{"model": "org/base", "share": 100}],
        None,
    )
    assert "org/base" in zoo(capsys, own, "alias")
    acts = [change["act"] for change in documents(capsys, own, "alias", "prod", "--history")["changes"]]
    assert acts == ["rollback", "set", "set"]
    assert zoo(capsys, own, "alias", "prod", "--history").splitlines()[1].split()[2:] == ["rollback", "org/base"]
    assert json.loads(zoo(capsys, own, "show", "prod", "--json"))["name"] == "org/base"
    assert zoo(capsys, own, "alias", "prod", "--delete") == "deleted alias prod"
    assert len(documents(capsys, own, "alias", "prod", "--history")["changes"]) == 4


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["alias", "live", "prod"], "may not point to another"),
        (["alias", "prod", "prod"], "may not point to another"),
        (["alias", "org/base", "lora"], "is a model"),
        (["alias", "live", "absent"], "no model 'absent'"),
        (["alias", "-x", "base"], None),
        (["alias", "a/../b", "base"], "cannot be a model's name"),
        (["alias", "absent"], "no alias 'absent'"),
        (["alias", "absent", "--delete"], "no alias 'absent'"),
        (["alias", "absent", "--history"], "there has been no alias"),
        (["alias", "--delete"], "give a name"),
        (["alias", "prod", "base", "--delete"], "give a name"),
        (["rollback", "absent"], "no alias 'absent'"),
        (["rollback", "prod"], "nothing to roll back to"),
        (["rm", "lora"], "alias 'prod' points to it"),
        (["rm", "prod"], "alias 'prod' points to it"),
    ],
)
def test_what_is_refused(own: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str | None) -> None:
    zoo(capsys, own, "alias", "prod", "lora")
    error = zoo(capsys, own, *arguments, code=2)
    assert said is None or said in error
    assert documents(capsys, own, "alias")["aliases"][0]["targets"] == [{"model": "org/lora", "share": 100}]


def test_a_running_server_follows_and_goes_back_within_a_second(
    own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zoo(capsys, own, "alias", "prod", "base")
    with serving(own, tmp_path / "log") as served, served.client() as client:

        def asked(model: str) -> Any:
            return client.completions.create(
                model=model, prompt="def hello", max_tokens=6, temperature=0, extra_body={"return_token_ids": True}
            )

        def switched(name: str, seconds: float) -> float:
            begun = time.monotonic()
            while asked("prod").model != name:
                assert time.monotonic() - begun < seconds
            return time.monotonic() - begun

        own_tokens = {name: asked(name).choices[0].token_ids for name in ("org/base", "org/lora")}
        assert "prod" in [model.id for model in client.models.list()]
        assert asked("prod").model == "org/base"
        zoo(capsys, own, "alias", "prod", "lora")
        switched("org/lora", 5.0)
        assert asked("prod").choices[0].token_ids == own_tokens["org/lora"]
        zoo(capsys, own, "rollback", "prod")
        assert switched("org/base", 1.0) < 1.0
        assert asked("prod").choices[0].token_ids == own_tokens["org/base"]
        zoo(capsys, own, "alias", "prod", "--delete")
        time.sleep(1.0)
        with pytest.raises(openai.NotFoundError):
            asked("prod")
