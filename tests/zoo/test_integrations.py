"""`ZooCallback`: checkpoints become models, training resumes bit for bit, and survives the zoo's errors."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.checkpoints import make
from tests.zoo.factory import flip_byte
from zoo import Zoo
from zoo.errors import DamagedObject, InputError, NameTaken
from zoo.integrations import ZooCallback


class Tokens(Dataset[dict[str, torch.Tensor]]):
    """A data set of a few random windows, the same in every test."""

    def __init__(self) -> None:
        self.data = torch.randint(3, 50, (16, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.data[index], "labels": self.data[index]}


class Stop(TrainerCallback):
    """Ends training after a step, as a preemption does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step >= self.step


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("made") / "base", num_hidden_layers=2)


@pytest.fixture
def store(base: Path, tmp_path: Path) -> Path:
    with Zoo(tmp_path / "zoo_store") as zoo:
        zoo.ingest(base)
    return tmp_path / "zoo_store"


@pytest.fixture
def opened(store: Path) -> Iterator[Zoo]:
    with Zoo(store) as zoo:
        yield zoo


def full(base: Path) -> Any:
    """Return a model with dropout, so that resuming must restore the random state too; the embedding is frozen."""
    model = AutoModelForCausalLM.from_pretrained(base, attention_dropout=0.1)
    model.get_input_embeddings().requires_grad_(False)
    return model


def adapter(base: Path) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1)
    )


def trainer(model: Any, folder: Path, *callbacks: TrainerCallback, **options: Any) -> Trainer:
    """Return a Trainer of four steps that saves a checkpoint every two."""
    settings = {
        "max_steps": 4,
        "save_steps": 2,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "linear",
    }
    quiet = {"report_to": [], "disable_tqdm": True, "use_cpu": True, "logging_strategy": "no", "seed": 3}
    return Trainer(
        model,
        TrainingArguments(str(folder), **{**settings, **quiet, **options}),
        train_dataset=Tokens(),
        eval_dataset=Tokens(),
        callbacks=[*callbacks],
    )


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {key: tensor.clone() for key, tensor in model.state_dict().items()}


def names(zoo: Zoo) -> list[str]:
    return [model.name for model in zoo.models()]


def local_weights(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*.safetensors"))


@pytest.mark.parametrize("made", [full, adapter])
def test_resume_from_the_zoo_is_bit_for_bit(made: Any, base: Path, store: Path, opened: Zoo, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = trainer(made(base), tmp_path / "whole")
    whole.train()
    torch.manual_seed(0)
    callback = ZooCallback(store, "run", delete_local=True, strict=True)
    first = trainer(made(base), tmp_path / "run", callback, Stop(2))
    assert callback.resume_folder() is None
    first.train(resume_from_checkpoint=callback.resume_folder())
    assert names(opened) == ["base", "run@step-2"]
    assert local_weights(tmp_path / "run") == []
    assert (tmp_path / "run" / "checkpoint-2" / "optimizer.pt").is_file()
    torch.manual_seed(99)
    callback = ZooCallback(store, "run", strict=True)
    second = trainer(made(base), tmp_path / "run", callback)
    folder = callback.resume_folder()
    assert folder == str(tmp_path / "run" / "checkpoint-2")
    second.train(resume_from_checkpoint=folder)
    expected = weights(whole.model)
    assert all(torch.equal(tensor, expected[key]) for key, tensor in weights(second.model).items())
    assert names(opened) == ["base", "run@step-2", "run@step-4"]
    for name in names(opened)[1:]:
        assert opened.model(name).base == "base"
        assert opened.model(name).kind == ("full" if made is full else "lora")
    assert callback.resume_folder(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-4")


def test_a_resume_that_does_not_load_the_weights_would_be_noticed(base: Path, store: Path, tmp_path: Path) -> None:
    """Negative control of the test above: other weights in place of the stored ones give another result."""
    ends = []
    for spoilt in (False, True):
        callback = ZooCallback(store, f"run-{spoilt}", strict=True)
        trainer(full(base), tmp_path / f"run-{spoilt}", callback, Stop(2)).train()
        folder = callback.resume_folder()
        assert folder is not None
        if spoilt:
            shutil.copyfile(base / "model.safetensors", Path(folder) / "model.safetensors")
        second = trainer(full(base), tmp_path / f"run-{spoilt}")
        second.train(resume_from_checkpoint=folder)
        ends.append(weights(second.model))
    assert not all(torch.equal(tensor, ends[1][key]) for key, tensor in ends[0].items())


def test_a_checkpoint_costs_what_changed(base: Path, opened: Zoo, store: Path, tmp_path: Path) -> None:
    before = opened.store.usage()
    trainer(full(base), tmp_path / "tune", ZooCallback(store, strict=True)).train()
    assert names(opened) == ["base", "tune@step-2", "tune@step-4"]
    after = opened.store.usage()
    frozen = opened.model("base").manifest
    embedding = next(
        t.nbytes
        for t in frozen.tensors
        if t.digest == dict(frozen.weight_files[0].entries)["model.embed_tokens.weight"]
    )
    assert (
        after.bytes_stored - before.bytes_stored < after.bytes_logical - before.bytes_logical - 2 * embedding + 20_000
    )
    assert len(local_weights(tmp_path / "tune")) == 2  # `delete_local` is off


def test_only_the_last_ones_are_kept(base: Path, opened: Zoo, store: Path, tmp_path: Path) -> None:
    with_last = ZooCallback(store, "run", keep_last=2, strict=True)
    trainer(full(base), tmp_path / "out", with_last, save_steps=1).train()
    assert names(opened) == ["base", "run@step-3", "run@step-4"]
    assert opened.gc().objects_removed == 0  # done when training ended
    with pytest.raises(InputError, match="keep_last"):
        ZooCallback(store, keep_last=0)


def test_older_ones_that_others_stand_on_stay(
    base: Path, opened: Zoo, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Descend(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                opened.ingest(tmp_path / "out" / "checkpoint-1", "heir", base="run@step-1")

    trainer(
        full(base), tmp_path / "out", ZooCallback(store, "run", keep_last=1, strict=True), Descend(), save_steps=1
    ).train()
    assert names(opened) == ["base", "heir", "run@step-1", "run@step-4"]
    assert "run@step-1 stays" in caplog.text


def test_the_best_checkpoint_keeps_its_weights(base: Path, store: Path, tmp_path: Path) -> None:
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    callback = ZooCallback(store, "run", delete_local=True, strict=True)
    run = trainer(full(base), tmp_path / "out", callback, **best)
    run.train()
    chosen = Path(str(run.state.best_model_checkpoint))
    assert f"{chosen.name}/model.safetensors" in local_weights(tmp_path / "out")


def test_errors_of_the_zoo_do_not_end_training(
    base: Path, store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "blocked").write_text("no folder")
    run = trainer(
        full(base), tmp_path / "out", ZooCallback(tmp_path / "blocked", "run", keep_last=1, delete_local=True)
    )
    with caplog.at_level(logging.ERROR, logger="zoo.integrations"):
        run.train()
    assert run.state.global_step == 4
    assert caplog.text.count("was not put into the zoo") == 2
    assert len(local_weights(tmp_path / "out")) == 2  # nothing that is not stored is deleted
    with Zoo(store) as zoo:
        zoo.ingest(base, "run@step-2", base=None)
    strict = trainer(full(base), tmp_path / "strict", ZooCallback(store, "run", strict=True))
    with pytest.raises(NameTaken):
        strict.train()


def test_what_cannot_be_resumed_says_why(base: Path, store: Path, opened: Zoo, tmp_path: Path) -> None:
    callback = ZooCallback(store, "run", delete_local=True, strict=True)
    with pytest.raises(InputError, match="output_dir"):
        callback.resume_folder()
    trainer(full(base), tmp_path / "out", callback, Stop(2)).train()
    moved = max((t for t in opened.model("run@step-2").manifest.tensors), key=lambda t: t.nbytes)
    flip_byte(opened.store.objects.path(moved.digest), -1)
    with pytest.raises(DamagedObject, match="run@step-2"):
        callback.resume_folder()
    assert (
        sorted(path.name for path in (tmp_path / "out" / "checkpoint-2").iterdir() if path.name.startswith(".zoo"))
        == []
    )
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(InputError, match=r"trainer_state\.json"):
        callback.resume_folder()


def test_a_model_from_the_zoo_is_known_as_the_base(store: Path, opened: Zoo, tmp_path: Path) -> None:
    opened.ingest(make("llama", tmp_path / "elsewhere", seed=5, num_hidden_layers=2), "org/other")
    model = opened.model("other").load()
    trainer(model.train(), tmp_path / "out", ZooCallback(store, "run", strict=True), max_steps=2).train()
    assert opened.model("run@step-2").base == "org/other"
