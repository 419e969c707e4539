"""The commands of docs/production.md run as they stand there, in their order."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

import cli.app
from surgery.evaluation import promotion
from tests.zoo.factory import manifest_of
from zoo import Zoo
from zoo.catalog import Catalog
from zoo.manifest import TensorMeta
from zoo.records import AliasTarget
from zoo.store import Store

PAGE = (Path(__file__).parents[2] / "docs/production.md").read_text()
RUN = {"alias", "promote", "rollback"}
FIGURES = {"library_ppl": {"word_perplexity,none": 9.0, "bits_per_byte,none": 1.0}, "library_cloze": {"acc,none": 0.7}}


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Path]:
    """A store that holds three checkpoints of a run by name; `prod` points to the first."""
    with Store.open(tmp_path / "store") as store:
        for step in (100, 200, 300):
            put(store.catalog, f"run@step-{step}", step)
        with store.catalog.writing() as writer:
            writer.set_alias("prod", [AliasTarget("run@step-100")])
    yield tmp_path / "store"


def put(catalog: Catalog, name: str, seed: int) -> None:
    with catalog.writing() as writer:
        writer.put_model(manifest_of(name, [TensorMeta(f"{seed:064x}", "F32", (2,))]))


def commands() -> list[list[str]]:
    lines = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if line.startswith("zoo ")]
    return [each[1:] for each in words if each[1] in RUN]


def test_the_commands_run(
    checkpoints: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[str] = []

    def measure(zoo: Zoo, name: str, *rest: object, **more: object) -> dict[str, object]:
        measured.append(name)  # the models here have no weights
        return {"results": {"results": FIGURES}}

    monkeypatch.setattr(promotion, "evaluate_stored", measure)
    assert {each[0] for each in commands()} == RUN
    for command in commands():
        with pytest.raises(SystemExit) as ended:
            cli.app.main([*command, "--store", str(checkpoints)])
        assert not ended.value.code, (command, capsys.readouterr().err)
    printed = capsys.readouterr().out
    assert "prod -> run@step-200 90 %, run@step-300 10 %\n" in printed
    assert measured == ["run@step-300"] and "prod -> run@step-300\n" in printed
    assert "prod -> run@step-200\n" in printed and "prod -> run@step-100\n" in printed
