"""Closed form and training improve a pruned block on unseen text; merged adapters compute the same.

Interrupted training resumes to the same weights.
"""

from __future__ import annotations

import math
import os
import signal
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from surgery.families.settings import config_of
from surgery.training.checkpoint import Saved
from surrogates.block import ParentBlock, States, Subject, open_subject, record
from surrogates.pruning.draft import PruneTarget, pruned_run, target_of
from surrogates.pruning.groups import halves, prunable
from surrogates.pruning.importance import magnitude
from surrogates.pruning.plan import PrunePlan, choose, nearest
from surrogates.recovery import recover
from surrogates.recovery.lora import attach_
from surrogates.recovery.recover import RecoverySettings, distance_on, recover_, schedule
from surrogates.recovery.refit import refit_
from surrogates.recovery.saved import RecoveryTask
from tests import checkpoints
from zoo.errors import InputError

QUICK = RecoverySettings(steps=12, rank=8, batch=8, rate=1e-2)


class Case:
    """A pruned block of a tiny model, with states for learning and states for measuring only."""

    def __init__(self, zoo, name: str, part: str = "layer", layers: tuple[int, int] = (1, 2)) -> None:
        manifest = zoo.model(name).manifest
        self.target: PruneTarget = target_of(manifest, config_of(zoo.store, manifest), layers, part)
        self.subject: Subject = open_subject(zoo.store, manifest, layers, (self.target.lo, self.target.hi))
        windows = torch.randint(3, checkpoints.VOCAB, (64, 16), generator=torch.Generator().manual_seed(3))
        self.learn: States = record(self.subject, windows[:40])
        self.check: States = record(self.subject, windows[40:48])
        self.held: States = record(self.subject, windows[48:])
        shape, cost = self.target.shape, self.target.cost
        after = nearest(shape, part, 0.5, cost)
        scores = magnitude(self.subject.block(), shape, self.target.axes, self.target.layer_of)
        kept = tuple(choose(shape, after, each) for each in scores)
        self.plan = PrunePlan(part, layers, 0.5, shape, after, cost(shape), cost(shape) - cost(after), kept)

    def block(self) -> ParentBlock:
        return self.subject.block(pruned_run(self.target, self.plan, self.subject.tensors))

    def refit(self, block: ParentBlock) -> None:
        row = prunable(self.target.family)
        kinds = [placed.component.kind for placed in self.target.placed]
        wanted = halves(self.target.part)
        outs = [[row.out[half] for half in wanted if kind in (half, "layer")] for kind in kinds]
        refit_(block, self.subject.block(), self.learn, row, outs)

    def recover(
        self, block: ParentBlock, root: Path, settings: RecoverySettings = QUICK, progress=None
    ) -> recover.Recovery:
        return recover_(self.subject, block, self.learn, self.check, settings, RecoveryTask(root, {"a": 1}), progress)


def weights(block: ParentBlock) -> list[torch.Tensor]:
    return [weight.clone() for names in block.names for weight in names.values()]


@pytest.mark.parametrize(
    ("family", "part"),
    [
        ("llama", "layer"),
        ("qwen2", "attention"),
        ("gemma2", "layer"),
        ("phi3", "layer"),
        ("phi", "layer"),
        ("gpt2", "ffn"),
        ("opt", "ffn"),
    ],
)
def test_the_closed_form_comes_closer_on_unseen_text(zoo, stored, family, part):
    case = Case(zoo, stored(family), part)
    block = case.block()
    before = distance_on(block, case.held)
    exact = weights(case.subject.block())
    case.refit(block)
    assert distance_on(block, case.held) < 0.95 * before
    assert all(torch.equal(old, new) for old, new in zip(exact, weights(case.subject.block()), strict=True))


def test_the_closed_form_is_the_least_squares_solution(zoo, stored):
    case = Case(zoo, stored("llama"), "ffn", (1, 1))
    block, exact = case.block(), case.subject.block()
    seen: list[torch.Tensor] = []
    block.parts[0].body.down_proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        block(case.learn.inputs, block.course(case.learn.ids))
    targets = (case.learn.outputs - case.learn.inputs).flatten(0, 1).double()
    expected = torch.linalg.lstsq(seen[0].flatten(0, 1).double(), targets).solution.mT
    refit_(block, exact, case.learn, prunable(case.target.family), [["mlp.down_proj"]], ridge=1e-12)
    torch.testing.assert_close(block.parts[0].body.down_proj.weight.double(), expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("how", ["lora", "full"])
def test_training_comes_closer_on_unseen_text_and_leaves_plain_matrices(zoo, stored, how, tmp_path):
    case = Case(zoo, stored("llama"))
    block = case.block()
    before = distance_on(block, case.held)
    names = {name for name, _ in block.named_parameters()}
    calls: list[tuple[str, int, int]] = []
    done = case.recover(
        block,
        tmp_path,
        RecoverySettings(how=how, steps=30, rank=8, batch=8, rate=1e-2 if how == "lora" else 2e-3),
        lambda *a: calls.append(a),
    )
    assert done.kept and done.stopped is None and done.steps == 30 and done.loss_last < done.loss_first
    assert distance_on(block, case.held) < 0.9 * before
    assert {name for name, _ in block.named_parameters()} == names
    assert not any(weight.requires_grad for weight in block.parameters())
    assert calls[-1] == ("recovering", 30, 30)
    assert not list((tmp_path / "work").glob("*"))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_merged_learners_compute_the_same(zoo, stored, family):
    case = Case(zoo, stored(family), "ffn")
    block = case.block()
    generator = torch.Generator().manual_seed(0)
    learners = attach_(block, 4, generator)
    assert len(learners.sites) == {"llama": 6, "gpt2": 4}[family]
    with torch.no_grad():
        for weight in learners.parameters:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.2)
        apart = block(case.held.inputs, block.course(case.held.ids))
        learners.merge_()
        merged = block(case.held.inputs, block.course(case.held.ids))
    torch.testing.assert_close(merged, apart, rtol=1e-4, atol=1e-3)


def test_only_what_is_pruned_learns(zoo, stored, tmp_path):
    """The FFN between two pruned attentions stays unchanged, and so do the exact block's weights."""
    case = Case(zoo, stored("llama"), "attention")
    block = case.block()
    middle = [weight.clone() for weight in block.names[1].values()]
    exact = weights(case.subject.block())
    case.recover(block, tmp_path, RecoverySettings(how="full", steps=3, rate=1e-3, batch=8))
    assert all(torch.equal(old, new) for old, new in zip(middle, block.names[1].values(), strict=True))
    assert all(torch.equal(old, new) for old, new in zip(exact, weights(case.subject.block()), strict=True))


@pytest.mark.parametrize("how", ["lora", "full"])
def test_an_interrupted_training_goes_on_to_the_same_weights(zoo, stored, tmp_path, how):
    case = Case(zoo, stored("llama"))
    settings = RecoverySettings(how=how, steps=12, rank=8, batch=8, rate=1e-3)
    whole = case.block()
    case.recover(whole, tmp_path / "whole", settings)

    def stop(what: str, done: int, steps: int) -> None:
        if done == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        case.recover(case.block(), tmp_path / "parts", settings, stop)
    assert list((tmp_path / "parts" / "work").iterdir())
    steps: list[int] = []
    resumed = case.block()
    case.recover(resumed, tmp_path / "parts", settings, lambda what, done, of: steps.append(done))
    assert steps[0] == 6
    for one, other in zip(weights(whole), weights(resumed), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not list((tmp_path / "parts" / "work").iterdir())


def test_a_state_belongs_to_its_task(tmp_path):
    task, other = RecoveryTask(tmp_path, {"a": 1}), RecoveryTask(tmp_path, {"a": 2})
    task.save(Saved(3, {"x": torch.ones(2)}))
    assert other.load() is None
    loaded = task.load()
    assert loaded is not None and loaded.step == 3
    other.path.write_bytes(task.path.read_bytes())
    assert other.load() is None
    task.path.write_bytes(b"broken")
    assert task.load() is None


def test_a_loss_that_is_not_finite_stops_and_keeps_the_last_good_weights(zoo, stored, tmp_path, monkeypatch):
    case = Case(zoo, stored("llama"))
    block = case.block()
    real = recover.distance

    def spoiled(out: torch.Tensor, batch: States) -> torch.Tensor:
        loss = real(out, batch)
        return loss * math.nan if spoiled.calls[0] > 20 and out.requires_grad else loss

    spoiled.calls = [0]
    monkeypatch.setattr(recover, "distance", spoiled)

    def count(what: str, done: int, steps: int) -> None:
        spoiled.calls[0] = done if done < 10 else 99

    done = case.recover(block, tmp_path, RecoverySettings(steps=40, rank=8, batch=8, rate=1e-2), count)
    assert done.steps == 10 and "not finite at step 11" in (done.stopped or "")
    assert done.kept and done.loss_last < done.loss_first
    assert all(bool(weight.isfinite().all()) for weight in weights(block))


def test_training_that_harms_is_undone(zoo, stored, tmp_path):
    case = Case(zoo, stored("llama"))
    block = case.block()
    case.refit(block)
    before = weights(block)
    done = case.recover(block, tmp_path, RecoverySettings(how="full", steps=3, batch=8, rate=0.9))
    assert not done.kept and done.loss_last == done.loss_first
    assert all(torch.equal(old, new) for old, new in zip(before, weights(block), strict=True))


def test_a_block_that_gives_nan_is_refused(zoo, stored, tmp_path):
    case = Case(zoo, stored("llama"))
    block = case.block()
    block.names[0]["self_attn.o_proj.weight"].fill_(math.nan)
    with pytest.raises(InputError, match="not finite"):
        case.recover(block, tmp_path)
    case.subject.tensors[dict(case.target.manifest.components[0].component.tensors)["embed_tokens.weight"]].fill_(
        math.nan
    )
    with pytest.raises(InputError, match="not finite"):
        record(case.subject, case.learn.ids)


def test_the_divergence_at_the_head_can_be_part_of_the_loss(zoo, stored, tmp_path):
    case = Case(zoo, stored("llama"))
    block = case.block()
    done = case.recover(block, tmp_path, RecoverySettings(steps=12, rank=8, batch=8, rate=1e-2, head_weight=0.1))
    assert done.kept and all(not weight.requires_grad for weight in case.subject.exact.parameters())


def test_the_rate_rises_and_falls():
    rates = [schedule(step, 100) for step in range(100)]
    assert rates[0] < rates[3] < max(rates) == 1.0 and rates[-1] < 0.12
    assert all(a >= b for a, b in pairwise(rates[5:]))
