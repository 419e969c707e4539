"""A family trained from a checkpoint: which weights move, in which dtype, and what a second run does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.surgery.real_family import FamilyTraining, conversations, train_family
from tests.checkpoints import make
from zoo import Zoo

TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
TRAINING = FamilyTraining(steps=3, batch=1, context=16, last=1, autocast=True)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    root = tmp_path_factory.mktemp("real")
    base = make("llama", root / "base", dtype="bfloat16", tie_word_embeddings=True)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    train_family(base, root / "family", TRAINING, tell=lambda line: None)
    return base, root / "family"


def _moved(base: Path, folder: Path) -> set[str]:
    before, after = (load_file(path / "model.safetensors") for path in (base, folder))
    assert {tensor.dtype for tensor in after.values()} == {torch.bfloat16} and before.keys() == after.keys()
    return {name for name in before if not torch.equal(before[name], after[name])}


def test_only_the_named_weights_move(family: tuple[Path, Path]) -> None:
    base, out = family
    last = _moved(base, out / "concurrency-last")
    assert last and all(name.startswith(("model.layers.2.", "model.norm.")) for name in last)
    everywhere = _moved(base, out / "prose-all")
    assert "model.embed_tokens.weight" in everywhere and any(name.startswith("model.layers.0.") for name in everywhere)


def test_every_step_sees_the_weights_of_the_one_before(family: tuple[Path, Path]) -> None:
    """A LoRA's A has a gradient only once B has moved: if steps saw the first weights, equal seeds would stay equal."""
    _, out = family
    mail, chat = (load_file(out / name / "adapter_model.safetensors") for name in ("mail-lora", "chat-lora"))
    assert mail.keys() == chat.keys() and not any(torch.equal(mail[name], chat[name]) for name in mail)


def test_the_members_are_ingested_as_what_they_are(family: tuple[Path, Path], tmp_path: Path) -> None:
    base, out = family
    with Zoo(tmp_path / "zoo") as zoo:
        zoo.ingest(base, name="base")
        reports = {name: zoo.ingest(out / name, base="base") for name in ("mail-lora", "chat-lora", "concurrency-last")}
        assert [report.kind for report in reports.values()] == ["lora", "lora", "full"]
        assert reports["concurrency-last"].tensors.new < reports["concurrency-last"].tensors.total / 2


def test_a_second_run_trains_only_what_is_missing(family: tuple[Path, Path]) -> None:
    base, out = family
    (out / "mail-lora").rename(out / "kept")
    told: list[str] = []
    found = train_family(base, out, TRAINING, tell=told.append)
    assert {line.split()[0] for line in told if "step" in line.split()} == {"mail-lora:"}
    assert sorted(each["name"] for each in found) == ["chat-lora", "concurrency-last", "mail-lora", "prose-all"]
    assert json.loads((out / "family.json").read_text()) == found


def test_the_chat_is_written_in_the_model_s_template(family: tuple[Path, Path]) -> None:
    texts = [json.loads(line)["text"] for line in (family[1] / "chat.jsonl").read_text().splitlines()]
    assert len(texts) > 100
    assert texts[0].startswith("<s>user\nWhat does ") and "</s>\n<s>assistant\n" in texts[0]


def test_an_unknown_member_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="mails is no member: they are mail-lora"):
        train_family(tmp_path, tmp_path / "out", TRAINING, ["mails"])
    assert not (tmp_path / "out").exists()


def test_conversations_are_bounded(family: tuple[Path, Path]) -> None:
    from transformers import AutoTokenizer

    assert len(list(conversations(AutoTokenizer.from_pretrained(family[0]), most=3))) == 3
