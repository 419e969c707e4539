"""Model cards: facts of the catalogue only, front matter that hubs read, and no change to a checkpoint's files."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import yaml
from blake3 import blake3

from tests.checkpoints import make, make_lora
from tests.surgery.helpers import edit_weights, files_of
from zoo import Zoo
from zoo.errors import DamagedObject
from zoo.records import Document, Equivalence, ScoredRun
from zoo.views.card import figures, hub_id


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    make("llama", root / "base")
    shutil.copytree(root / "base", root / "tuned")
    edit_weights(root / "tuned", lambda key, tensor: tensor + 0.5 if ".layers.1." in key else tensor)
    make_lora(root / "base", root / "lora", layers_to_transform=[1], base_name="org/base-7b")
    return root


@pytest.fixture
def zoo(folders: Path, tmp_path: Path) -> Iterator[Zoo]:
    with Zoo(tmp_path / "zoo_store") as opened:
        opened.ingest(folders / "base", "org/base-7b")
        opened.ingest(folders / "tuned", base="org/base-7b")
        opened.ingest(folders / "lora")
        yield opened


def front(text: str) -> dict[str, Any]:
    opening, matter, _ = text.split("---\n", 2)
    assert opening == ""
    loaded: dict[str, Any] = yaml.safe_load(matter)
    return loaded


def rows(text: str, heading: str) -> list[list[str]]:
    """Return the cells of the table under a heading, without the header row."""
    lines = text.split(f"{heading}\n", 1)[1].strip().splitlines()
    table = list(takewhile(lambda line: line.startswith("|"), lines))
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in table[2:]]


def test_a_card_says_what_the_catalogue_knows(zoo: Zoo, folders: Path, tmp_path: Path) -> None:
    report = zoo.model("tuned").export(tmp_path / "out", card=True)
    assert "README.md" in report.files
    assert report.bytes == sum(path.stat().st_size for path in (tmp_path / "out").iterdir())
    exported = files_of(tmp_path / "out")
    text = exported.pop("README.md").decode()
    assert exported == files_of(folders / "tuned")
    assert front(text) == {
        "library_name": "transformers",
        "base_model": "org/base-7b",
        "base_model_relation": "finetune",
        "tags": ["block-zoo", "llama", "full"],
    }
    summary = next(model for model in zoo.models() if model.name == "tuned")
    about = dict(rows(text, "# tuned"))
    assert about["fingerprint"] == zoo.model("tuned").manifest.fingerprint
    assert (about["kind"], about["base"], about["source"]) == ("full", "org/base-7b", "local folder tuned")
    assert (
        about["bytes"]
        == f"{summary.bytes:,}: {summary.bytes_own:,} its own, {summary.bytes - summary.bytes_own:,} shared"
    )
    assert about["tensors"] == "25: 8 its own, 17 shared"  # nine tensors changed; its two norms stay one tensor
    assert str(folders) not in text
    chain = zoo.model("tuned").chain
    assert [row[0] for row in rows(text, "## Blocks")] == [block.digest for block in chain]
    assert [row[3] for row in rows(text, "## Blocks")] == ["lora, org/base-7b", "", "lora, org/base-7b"]
    assert rows(text, "## Files") == [
        [name, f"{len(data):,}", blake3(data).hexdigest()] for name, data in exported.items()
    ]
    assert "## Scores" not in text


def test_an_adapters_card(zoo: Zoo, tmp_path: Path) -> None:
    """peft writes a README.md of its own, so the card gets another name."""
    zoo.model("lora").export(tmp_path / "out", card=True)
    matter = front((tmp_path / "out" / "ZOO_CARD.md").read_text())
    assert (matter["library_name"], matter["base_model_relation"], matter["tags"]) == (
        "peft",
        "adapter",
        ["block-zoo", "llama", "lora"],
    )


def test_a_foundations_card_names_no_base(zoo: Zoo, tmp_path: Path) -> None:
    zoo.model("7b").export(tmp_path / "out", card=True)
    matter = front((tmp_path / "out" / "README.md").read_text())
    assert "base_model" not in matter
    assert matter["tags"][-1] == "foundation"


def test_a_readme_that_came_is_never_replaced(zoo: Zoo, folders: Path, tmp_path: Path) -> None:
    shutil.copytree(folders / "base", tmp_path / "own")
    (tmp_path / "own" / "readme.md").write_text("mine")
    zoo.ingest(tmp_path / "own", "own")
    zoo.model("own").export(tmp_path / "out", card=True)
    exported = files_of(tmp_path / "out")
    assert exported.pop("ZOO_CARD.md").startswith(b"---\n")
    assert exported == files_of(tmp_path / "own")
    zoo.ingest(tmp_path / "out", "again")
    zoo.model("again").export(tmp_path / "twice", card=True)
    assert set(files_of(tmp_path / "twice")) == {*exported, "ZOO_CARD.md", "ZOO_CARD_2.md"}


def test_without_being_asked_there_is_no_card(zoo: Zoo, folders: Path, tmp_path: Path) -> None:
    zoo.model("tuned").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folders / "tuned")


def test_scores_that_are_stored_are_shown(zoo: Zoo, tmp_path: Path) -> None:
    with zoo.store.catalog.writing() as writer:
        writer.put_equivalences(
            [
                Equivalence(
                    "equivalent", ScoredRun("org/base-7b", 0, 2), ScoredRun("tuned", 1, 3), "ab" * 32, 0.98765, 0.25
                )
            ]
        )
        writer.put_document(
            Document(
                "eval",
                "tuned",
                "k",
                {"results": {"copy|task": {"acc,none": 0.5, "alias": "copy", "per": [1, 2]}}, "seconds": 9},
            )
        )
        writer.put_document(Document("eval", "lora", "k", {"results": {"copy": {"acc": 0.125}}}))
        writer.put_document(Document("note", "tuned", "k", "no figures"))
        writer.put_document(Document("curve", "tuned", "k", {"deep": {str(i): i for i in range(100)}, "yes": True}))
    zoo.model("tuned").export(tmp_path / "out", card=True)
    text = (tmp_path / "out" / "README.md").read_text()
    assert rows(text, "## Scores") == [["equivalent", "1 to 2", "org/base-7b 0 to 1", "0.9877", "0.2500", "ab" * 8]]
    assert "| copy\\|task · acc,none | 0.5 |" in text
    assert "0.125" not in text
    assert "### note" not in text
    assert len(rows(text, "### curve")) == 60
    assert "40 more figures" in text


def test_text_from_a_checkpoint_cannot_become_markup(zoo: Zoo, folders: Path, tmp_path: Path) -> None:
    name = "a|b<script>[x](y)`: # *z*"
    zoo.ingest(folders / "tuned", name, base="org/base-7b")
    zoo.model(name).export(tmp_path / "out", card=True)
    text = (tmp_path / "out" / "README.md").read_text()
    assert front(text)["base_model"] == "org/base-7b"
    assert "<script>" not in text.replace("\\<script\\>", "")
    assert "[x](y)" not in text


def test_damage_leaves_no_folder(zoo: Zoo, tmp_path: Path) -> None:
    digest = zoo.model("tuned").manifest.tensors[0].digest
    zoo.store.objects.path(digest).unlink()
    with pytest.raises(DamagedObject):
        zoo.model("tuned").export(tmp_path / "out", card=True)
    assert not (tmp_path / "out").exists()


def test_small_parts() -> None:
    assert [
        hub_id(text) for text in ("org/name", "org/name@main", "/home/me/name", "name", "", "a/b/c", "https://x/y")
    ] == [
        "org/name",
        "org/name",
        None,
        None,
        None,
        None,
        None,
    ]
    assert list(figures({"a": {"b": 1, "c": [2], "d": "3"}, "e": 0.5, "f": True})) == [("a · b", 1), ("e", 0.5)]
