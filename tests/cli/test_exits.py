"""`zoo exits` as scripts use it, and the exits that `zoo serve --early-exit` finds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import cli.app
from cli.exits import short_number
from cli.serving.models import with_exits
from cli.serving.source import ZooSource
from runtime.frontend.served_models import ServedModels
from runtime.types import ModelSpec
from surgery.chains.exits import make_exit
from tests.checkpoints import make
from zoo.api import Zoo


def run(store: Path, *arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.app.main([*arguments, "--store", str(store)])
    return int(ended.value.code or 0)


def test_exits_are_scored_made_and_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = tmp_path / "store"
    text = tmp_path / "text.txt"
    text.write_text("".join(f"line {number} has the number {number * 3} in it\n" for number in range(3000)))
    with Zoo(store) as zoo:
        for name in ("org/m", "org/other"):
            zoo.ingest(make("llama", tmp_path / name, num_hidden_layers=3), name)
    asked = ["exits", "org/m", "--make", "1", "--make", "2", "--text", str(text), "--tokens", "128", "--window", "16"]
    assert run(store, *asked, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["layers"] for each in found["exits"]] == [0, 1, 2, 3] and found["exits"][3]["agreement"] == 1.0
    assert found["made"] == ["org/m@exit-1", "org/m@exit-2"]
    assert run(store, *asked) == 0
    assert "perplexity" in capsys.readouterr().out
    assert run(store, "exits", "org/m", "--make", "3", "--text", str(text)) == 2
    assert "1 to 2 of them" in capsys.readouterr().err
    with Zoo(store) as zoo:
        assert with_exits(zoo, ["org/m", "other"]) == ("org/m", "org/other", "org/m@exit-1", "org/m@exit-2")
        assert with_exits(zoo, ["other"]) == ("org/other",)
        zoo.remove("org/other")  # it has the same weights and is based on org/m, so it goes first
        zoo.remove("org/m")
        zoo.ingest(make("llama", tmp_path / "new", num_hidden_layers=3, seed=7), "org/m")
        assert with_exits(zoo, ["org/m"]) == ("org/m",), "they are the old model's"
        assert "org/m@exit-1 is no exit of org/m as it is now" in capsys.readouterr().err
        source = ZooSource(zoo)
        served = ServedModels(
            source.served(ModelSpec(name, 1, 16, 256, 320)) for name in ("org/m", "org/m@exit-1", "org/m@exit-2")
        )
        assert served.exit_of(served.find("org/m"), 1) is None and served.exits_of(served.find("org/m")) == ()
        zoo.remove("org/m@exit-2")
        make_exit(zoo.store, zoo.model("org/m"), 2)
        served.add(source.served(ModelSpec("org/m@exit-2", 1, 16, 256, 320)))
        assert served.exits_of(served.find("org/m")) == (2,)


def test_a_perplexity_takes_one_short_column() -> None:
    assert [short_number(each) for each in (19.012, 18442.74, 1.17e54)] == ["19.01", "18,442.74", "1.2e+54"]
