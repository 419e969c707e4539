"""The streamed comparison of distributions against brute force, for every family's head, any slice and any budget."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, inject_adapter_in_model

from surgery.modules.stack import open_stack
from surgery.scoring import lens as lens_module
from surgery.scoring.lens import Lens, alike
from tests import checkpoints
from zoo import Zoo

FAMILIES = ["llama", "qwen2", "gemma2", "glm4", "gpt2", "opt", "gpt_neox", "phi"]


def stack_of_family(family, root, **options):
    with Zoo(root / "store") as zoo:
        zoo.ingest(checkpoints.make(family, root / family, tokenizer=False, **options), name="m")
        return open_stack(zoo.store, zoo.model("m").manifest)


def brute(stack_a, stack_b, hidden_a, hidden_b):
    """Compare whole distributions in float64: (cosine of all with all, KL both ways, agreement)."""
    a, b = (stack.head(hidden).double().log_softmax(-1) for stack, hidden in ((stack_a, hidden_a), (stack_b, hidden_b)))
    cosine = torch.nn.functional.cosine_similarity(a.exp().unsqueeze(1), b.exp().unsqueeze(0), dim=-1)
    forth = (a.exp().unsqueeze(1) * (a.unsqueeze(1) - b.unsqueeze(0))).sum(-1)
    back = (b.exp().unsqueeze(0) * (b.unsqueeze(0) - a.unsqueeze(1))).sum(-1)
    return cosine, forth, back, (a.argmax(-1).unsqueeze(1) == b.argmax(-1).unsqueeze(0)).double()


def lens(stack):
    return Lens(stack.parts[stack.end])


def check(found, expected, pairs, scale=1e-5):
    for name, whole in zip(("cosine", "kl_ab", "kl_ba", "agreement"), expected, strict=True):
        wanted = torch.stack([whole[i, j] for i, j in pairs])
        torch.testing.assert_close(getattr(found, name).double(), wanted, atol=scale * 10, rtol=scale * 10)
    torch.testing.assert_close(found.matrix.double(), expected[0], atol=scale, rtol=scale)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_slices_of_any_head_give_what_the_whole_gives(family, tmp_path, monkeypatch):
    a = stack_of_family(family, tmp_path / "a")
    b = stack_of_family(family, tmp_path / "b", seed=7)
    generator = torch.Generator().manual_seed(0)
    hidden_a, hidden_b = (torch.randn(3, 11, 64, generator=generator) * 2 for _ in "ab")
    pairs = [(0, 0), (2, 1)]
    monkeypatch.setattr(lens_module, "_SLICE", 37)
    monkeypatch.setattr(lens_module, "BUDGET", 6 * 4 * 37 * 6 * 4)  # four tokens at a time
    found = alike(lens(a), lens(b), hidden_a, hidden_b, pairs, checkpoints.VOCAB, matrix=True)
    assert lens(a).sliceable
    check(found, brute(a, b, hidden_a, hidden_b), pairs)


@pytest.mark.parametrize("vocabulary_slice", [37, 4096])
@torch.inference_mode()
def test_targets_are_told_as_often_as_the_whole_head_tells_them(tmp_path, monkeypatch, vocabulary_slice):
    a = stack_of_family("llama", tmp_path / "a")
    hidden = torch.randn(2, 11, 64, generator=torch.Generator().manual_seed(0))
    logits = a.head(hidden[1]).float()
    targets = torch.arange(11) * 7 % checkpoints.VOCAB
    targets[::3] = logits[::3].argmax(-1)
    targets[5] = -100
    monkeypatch.setattr(lens_module, "_SLICE", vocabulary_slice)
    found = alike(lens(a), lens(a), hidden, hidden, [(0, 1)], checkpoints.VOCAB, targets=targets)
    known = targets >= 0
    expected = logits.log_softmax(-1)[known].gather(1, targets[known, None]).squeeze(1)
    torch.testing.assert_close(found.told[0, known], expected, atol=1e-5, rtol=1e-5)
    assert found.told[0, 5].isnan() and found.right[0, 5] == 0
    assert found.right[0, known].tolist() == (logits.argmax(-1) == targets)[known].float().tolist()
    assert lens(a).vocabulary(hidden) == checkpoints.VOCAB


@torch.inference_mode()
def test_a_head_with_an_adapter_is_read_whole(tmp_path):
    a = stack_of_family("llama", tmp_path / "a")
    b = stack_of_family("llama", tmp_path / "b", seed=7)
    adapted = inject_adapter_in_model(LoraConfig(target_modules=["head"], init_lora_weights=False), b)
    hidden = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    assert not lens(adapted).sliceable
    found = alike(lens(a), lens(adapted), hidden, hidden, [(1, 1)], checkpoints.VOCAB, matrix=True)
    check(found, brute(a, adapted, hidden, hidden), [(1, 1)])


class Plain:
    """A lens that returns the given logits."""

    sliceable = True

    def ready(self, hidden):
        return hidden

    def logits(self, ready, lo, hi):
        return ready[..., lo:hi].float()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([0.01, 1.0, 30.0, 300.0]), st.integers(1, 50), st.integers(1, 60))
def test_extreme_logits_neither_overflow_nor_lose_the_ends(seed, scale, width, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(2, 4, vocabulary, generator=generator) * scale for _ in "ab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lens_module, "_SLICE", width)
        found = alike(Plain(), Plain(), a, b, [(0, 1)], vocabulary, matrix=True)
    p, q = a.double().softmax(-1), b.double().softmax(-1)
    expected = torch.nn.functional.cosine_similarity(p.unsqueeze(1), q.unsqueeze(0), dim=-1)
    torch.testing.assert_close(found.matrix.double(), expected, atol=2e-5, rtol=2e-5)
    assert bool(torch.isfinite(found.kl_ab).all()) and bool((found.matrix <= 1).all())


def test_equal_states_are_equal():
    logits = torch.randn(1, 6, 50, generator=torch.Generator().manual_seed(0)) * 5
    found = alike(Plain(), Plain(), logits, logits, [(0, 0)], 50)
    assert found.matrix is None
    torch.testing.assert_close(found.cosine, torch.ones_like(found.cosine))
    torch.testing.assert_close(found.kl_ab, torch.zeros_like(found.kl_ab), atol=1e-5, rtol=0)
    assert bool((found.agreement == 1).all())
