"""A stack's components, run one by one over padded batches and with a cache, equal the whole model."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from surgery.modules.stack import open_stack
from tests import checkpoints
from zoo import Zoo
from zoo.errors import NotServable

FAMILIES = [*checkpoints.SERVED, *checkpoints.VARIANTS]
#: Cached and padded passes reduce in another order than passes over the whole text.
TOLERANCE = 2e-5


def some_ids(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, checkpoints.VOCAB, (rows, length), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def opened(tmp_path, request):
    folder = checkpoints.make(request.param, tmp_path / "hf", tokenizer=False)
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, name="m")
        yield open_stack(zoo.store, zoo.model("m").manifest), AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("opened", FAMILIES, indirect=True)
@torch.inference_mode()
def test_all_components_are_the_model_and_halves_join(opened):
    stack, whole = opened
    ids = some_ids(2, 24)  # longer than any window
    expected = whole(ids).logits
    assert torch.equal(stack(ids), expected)
    course = stack.course(ids)
    middle = stack.end // 2
    hidden = stack.run(stack.run(ids, course, 0, middle), course, middle, stack.end)
    assert torch.equal(stack.head(hidden), expected)


@pytest.mark.parametrize("opened", FAMILIES, indirect=True)
@torch.inference_mode()
def test_padding_on_the_left_changes_nothing(opened):
    stack, whole = opened
    ids = some_ids(1, 20)
    padded = torch.cat((torch.zeros((1, 5), dtype=torch.int64), ids), dim=1)
    mask = torch.cat((torch.zeros((1, 5), dtype=torch.int64), torch.ones_like(ids)), dim=1)
    torch.testing.assert_close(stack(padded, mask)[:, 5:], whole(ids).logits, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("opened", FAMILIES, indirect=True)
@torch.inference_mode()
def test_a_cache_continues_where_it_stopped(opened):
    stack, whole = opened
    ids = some_ids(2, 26)
    cache = DynamicCache()
    pieces = []
    for lo, hi in ((0, 20), (20, 25), (25, 26)):
        course = stack.course(ids[:, lo:hi], cache=cache)
        pieces.append(stack.run(ids[:, lo:hi], course, 0, stack.end + 1))
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole(ids).logits, atol=TOLERANCE, rtol=TOLERANCE)


def test_gradients_reach_hidden_states_but_not_frozen_weights(tmp_path):
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(checkpoints.make("llama", tmp_path / "hf", tokenizer=False), name="m")
        stack = open_stack(zoo.store, zoo.model("m").manifest).requires_grad_(False)
    ids = some_ids(1, 6)
    course = stack.course(ids)
    hidden = stack.run(ids, course, 0, 3).requires_grad_()
    stack.head(stack.run(hidden, course, 3, stack.end)).sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in stack.parameters())


def test_a_family_without_seams_is_refused(tmp_path):
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(checkpoints.make("bloom", tmp_path / "hf", tokenizer=False), name="m")
        with pytest.raises(NotServable, match="bloom"):
            open_stack(zoo.store, zoo.model("m").manifest)
