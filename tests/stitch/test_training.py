"""The stitch trainer alone: what has gradients, what is learned, exact resumption, and the stop at NaN."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from stitch.block import Folded, Learner, Ruler
from stitch.objective import Objective
from stitch.pair import ModelPair
from stitch.points import StitchPoint
from stitch.saved import StitchTask
from stitch.settings import StitchSettings
from stitch.start import Normal, fit
from stitch.training import StitchCourse, Trainer, train
from surgery.modules.components import Stitch, Where
from surgery.modules.stack import open_stack
from surgery.training.checkpoint import Saved
from tests.checkpoints import VOCAB
from zoo import Zoo
from zoo.errors import InputError, TrainingFailed

POINTS = (StitchPoint(0, 1), StitchPoint(1, 2))
SETTINGS = StitchSettings(steps=8, rate=5e-3, batch=2, length=12, places=2)
WINDOWS = torch.randint(3, VOCAB, (24, 12), generator=torch.Generator().manual_seed(2))


@pytest.fixture
def pair(zoo: Zoo) -> ModelPair:
    return ModelPair(*(open_stack(zoo.store, zoo.model(name).manifest) for name in ("narrow", "wide")))


@pytest.fixture
def start(pair: ModelPair) -> Folded:
    return fit(pair, WINDOWS, POINTS).solve(1e-4)


def drop(saved: Saved) -> None:
    pass


def test_the_normal_equations_are_numpys_least_squares():
    generator = torch.Generator().manual_seed(0)
    normal = Normal(5, 3)
    rows, wanted = [], []
    for position in (1.0, 4.0, 9.0):
        hidden, out = torch.randn(20, 5, generator=generator), torch.randn(20, 3, generator=generator)
        normal.add_(hidden[:9], position, out[:9])
        normal.add_(hidden[9:], position, out[9:])
        rows.append(np.column_stack([hidden.numpy(), np.full(20, position), np.ones(20)]))
        wanted.append(out.numpy())
    x, y = np.concatenate(rows), np.concatenate(wanted)
    expected = np.linalg.lstsq(x.astype(np.float64), y.astype(np.float64), rcond=None)[0]
    solved = normal.solve(0.0)
    np.testing.assert_allclose(torch.cat([solved.weight, solved.bias.unsqueeze(1)], 1).numpy(), expected.T, atol=1e-5)
    plain = np.linalg.lstsq(np.delete(x, 5, 1), y, rcond=None)[0]
    without = normal.solve(0.0, with_position=False)
    assert not without.weight[:, -1].any()
    np.testing.assert_allclose(without.weight[:, :-1].numpy(), plain[:-1].T, atol=1e-5)


def test_a_position_that_matters_is_used_and_missed_without_it():
    """The outputs shift with the position: no map without the position as input fits two positions at once."""
    normal = Normal(4, 4)
    hidden, shift = torch.randn(50, 4), torch.tensor([1.0, -2.0, 0.5, 3.0])
    for position in (1.0, 5.0):
        normal.add_(hidden, position, hidden + shift * position)
    known, unknown = normal.solve(0.0), normal.solve(0.0, with_position=False)
    assert (known(hidden, 3.0) - (hidden + shift * 3.0)).abs().max() < 1e-4
    assert (unknown(hidden, 5.0) - (hidden + shift * 5.0)).abs().max() > 1.0


def test_folding_gives_the_served_stitch():
    learner = Learner(Folded(torch.randn(6, 5), torch.randn(6)), Ruler.from_positions([1.0, 13.0]))
    hidden, where = torch.randn(2, 3, 4), Where(torch.zeros(2, 3))
    for position in (1.0, 7.0, 30.0):
        folded = learner.folded()
        served = Stitch(folded.weight, folded.bias, position)(hidden, where)
        torch.testing.assert_close(served, learner(hidden, position), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(served, folded(hidden, position), atol=1e-6, rtol=1e-6)


def test_the_gradient_in_pieces_is_autograds(monkeypatch):
    head = torch.nn.Linear(8, 50).requires_grad_(False)
    hidden, wanted = torch.randn(11, 8), torch.randn(11, 8)
    following = torch.tensor([3, 0, 49, -1, 7, 7, 1, 30, -1, 2, 5])
    objective = Objective(kl=0.7, cosine=1.3, labels=0.4)
    whole, expected = objective.gradient(head, 50, hidden, wanted, following)
    monkeypatch.setattr("stitch.objective._BUDGET", 10 * 4 * 50 * 3)
    pieces, gradient = objective.gradient(head, 50, hidden, wanted, following)
    assert pieces == pytest.approx(whole)
    torch.testing.assert_close(gradient, expected)
    leaf = hidden.clone().requires_grad_(True)
    given, share = head(leaf).softmax(-1), head(wanted).softmax(-1)
    kl = (share * (share.log() - given.log())).sum(-1).mean()
    cosine = torch.nn.functional.cosine_similarity(given, share, dim=-1).mean()
    known = following >= 0
    nll = -given[known].log().gather(-1, following[known].unsqueeze(-1)).mean()
    (0.7 * kl + 1.3 * (1 - cosine) + 0.4 * nll).backward()
    torch.testing.assert_close(gradient, leaf.grad, atol=1e-6, rtol=1e-4)
    assert whole == pytest.approx(objective.value(kl.item(), cosine.item(), nll.item()), rel=1e-5)


def test_only_the_stitch_has_gradients_and_only_it_changes(pair, start):
    before = [weight.clone() for stack in (pair.a, pair.b) for weight in stack.parameters()]
    trainer = Trainer(StitchCourse(pair, WINDOWS, POINTS, SETTINGS), start)
    assert trainer.advance_()
    after = [weight for stack in (pair.a, pair.b) for weight in stack.parameters()]
    assert all(weight.grad is None and not weight.requires_grad for weight in after)
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))
    assert all(weight.grad is not None and weight.grad.any() for weight in trainer.learner.parameters())
    assert not torch.equal(trainer.learner.folded().weight, start.weight)


def test_the_control_is_told_no_position(pair, start):
    trainer = Trainer(StitchCourse(pair, WINDOWS, POINTS, SETTINGS, with_position=False), start)
    assert trainer.advance_() and trainer.advance_()
    assert not trainer.learner.folded().weight[:, -1].any()


def test_the_loss_falls(pair, start):
    course = StitchCourse(pair, WINDOWS, POINTS, replace(SETTINGS, steps=40, state=0.1))
    losses: list[float] = []
    trained = train(course, start, None, drop, lambda step, loss: losses.append(loss))
    assert _loss(pair, trained) < 0.93 * _loss(pair, start)
    assert len(losses) == 40


def test_labels_are_the_next_tokens(pair, start):
    """In alternating text the current and the next token always differ."""
    text = torch.tensor([[7, 11] * 6] * 4)
    settings = replace(SETTINGS, steps=40, kl=0.0, cosine=0.0, labels=1.0)
    trained = train(StitchCourse(pair, text, POINTS, settings), start, None, drop)
    before, after = (_share_of_next(pair, stitch, text) for stitch in (start, trained))
    assert after > 20 * before


@torch.no_grad()
def _share_of_next(pair: ModelPair, stitch: Folded, text: torch.Tensor) -> float:
    """Return the mean probability of the text's next tokens at the first place."""
    ((_, hidden),) = pair.heads(text, {POINTS[0].a_layer})
    logits = pair.b.head(pair.tail(stitch(hidden, POINTS[0].position), text, POINTS[0].b_layer))
    return float(logits[:, :-1].softmax(-1).gather(-1, text[:, 1:, None]).mean())


@torch.no_grad()
def _loss(pair: ModelPair, stitch: Folded) -> float:
    """Return the mean divergence over all windows and places."""
    _, final = pair.passes(WINDOWS)
    total = 0.0
    for layer, hidden in pair.heads(WINDOWS, {point.a_layer for point in POINTS}):
        point = next(point for point in POINTS if point.a_layer == layer)
        ended = pair.tail(stitch(hidden, point.position), WINDOWS, point.b_layer)
        unknown = torch.full((WINDOWS.numel(),), -1)
        total += Objective(1.0, 1.0).gradient(pair.b.head, VOCAB, ended.flatten(0, 1), final.flatten(0, 1), unknown)[0]
    return total / len(POINTS)


@pytest.mark.parametrize("with_position", [True, False])
def test_a_training_that_went_on_ends_in_the_same_bits(pair, start, tmp_path, with_position):
    course = StitchCourse(pair, WINDOWS, POINTS, SETTINGS, with_position)
    whole = train(course, start, None, drop)
    task = StitchTask(tmp_path, {"of": "this"})
    trainer = Trainer(course, start)
    for _ in range(3):
        assert trainer.advance_()
    with task.held():
        task.save("trained", trainer.state())
        resumed = train(course, start, task.load("trained"), drop)
    assert torch.equal(whole.weight, resumed.weight) and torch.equal(whole.bias, resumed.bias)


def test_what_is_no_state_of_the_task_is_not_taken_up(pair, start, tmp_path):
    task, other = StitchTask(tmp_path, {"of": "this"}), StitchTask(tmp_path, {"of": "that"})
    with task.held(), other.held():
        task.save("trained", Trainer(StitchCourse(pair, WINDOWS, POINTS, SETTINGS), start).state())
        (other.folder / "trained.safetensors").write_bytes((task.folder / "trained.safetensors").read_bytes())
        assert other.load("trained") is None
        (task.folder / "trained.safetensors").write_bytes(b"half a fi")
        assert task.load("trained") is None
        assert task.load("nothing") is None


def test_nan_stops_the_training_and_the_last_good_state_is_kept(pair, start):
    """A token with a NaN embedding occurs in the middle of the training."""
    windows = WINDOWS.clone().clamp_min(4)
    course = StitchCourse(pair, windows, POINTS, SETTINGS)
    good = Trainer(course, start)
    rows = [_rows(course, step) for step in range(SETTINGS.steps)]
    bad = next(row for row in rows[4] if all(row not in earlier for earlier in rows[:4]))
    windows[bad] = 3
    pair.b.parts[0].table.weight = torch.nn.Parameter(pair.b.parts[0].table.weight.clone(), requires_grad=False)
    pair.b.parts[0].table.weight[3] = torch.nan
    kept: list[Saved] = []
    with pytest.raises(TrainingFailed, match="step 5"):
        train(course, start, None, kept.append)
    for _ in range(4):
        assert good.advance_()
    expected = good.state()
    assert kept[-1].step == expected.step == 4
    assert all(torch.equal(kept[-1].tensors[name], value) for name, value in expected.tensors.items())
    assert all(torch.isfinite(value).all() for value in kept[-1].tensors.values())


def _rows(course: StitchCourse, step: int) -> tuple[int, ...]:
    from stitch.curriculum import lesson

    s = course.settings
    return lesson(step, s.steps, s.curriculum, course.points, s.places, len(course.windows), s.batch, s.seed).rows


@pytest.mark.parametrize(
    "wrong",
    [{"steps": 0}, {"rate": 0.0}, {"batch": 0}, {"length": 1}, {"kl": 0.0, "cosine": 0.0}, {"kl": float("nan")}],
)
def test_settings_that_cannot_be(wrong):
    with pytest.raises(InputError):
        replace(SETTINGS, **wrong).check()
