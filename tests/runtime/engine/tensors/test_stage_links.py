"""Hidden states and pages of stages that stay on their device (the GPU path, on a CPU): the tokens are the same."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import pytest
import torch

from runtime.agent.migration.activation_cache import ActivationCache
from runtime.chains import Array, Stacked, StageResult, cut
from runtime.config import DirectConfig
from runtime.engine.executors.stage import StagedEngine
from runtime.engine.tensors.convert import array_of, gathered, is_tensor, joined, likeness, staying, whole_of
from runtime.types import StepPlan
from tests.runtime.engine.carry import Carrier
from tests.runtime.engine.compiled import needs_kernels
from tests.runtime.engine.conftest import bench  # noqa: F401
from tests.runtime.engine.executors.test_stage import (  # noqa: F401
    COUNT,
    PLAIN,
    SAMPLING,
    cut_at,
    engines,
    family,
    length,
    whole,
)
from tests.runtime.engine.oracle import greedy, reference, same_tokens
from tests.runtime.engine.test_equality import prompts


class Watched(StagedEngine):
    """Counts outputs by what holds them: tensors, or bytes."""

    tensors = 0
    others = 0

    def run(self, plan: StepPlan, inputs: Mapping[str, Array]) -> StageResult:
        result = super().run(plan, inputs)
        for name in result.outputs:
            if is_tensor(result.outputs[name]):
                Watched.tensors += 1
            else:
                Watched.others += 1
        return result


def connected(bench, count: int, **changes) -> list[StagedEngine]:  # noqa: F811
    made = engines(bench, count, **changes)
    for engine in made:
        engine.__class__ = Watched
        engine.direct(DirectConfig())
    Watched.tensors = Watched.others = 0
    return made


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("llama", "stock"),
        ("neox", "stock"),
        ("stitched", "stock"),
        *(pytest.param(each, "native", marks=needs_kernels) for each in ("llama", "lora")),
    ],
)
def test_every_cut_into_two_and_three(family, name, kernels):  # noqa: F811
    prompt = prompts(3, (9,))[0]
    carrier = Carrier(*connected(family, 3, kernels=kernels))
    inner = range(1, length(family, name))
    for cuts in [*combinations(inner, 1), *combinations(inner, 2)]:
        carrier.add(f"{cuts}", name, prompt, SAMPLING, cut_at(family, name, *cuts))
    carrier.run(4)
    wanted = whole(family, name, prompt).tokens("a")
    assert {seq: one.produced for seq, one in carrier.seqs.items()} == dict.fromkeys(carrier.seqs, wanted)
    assert Watched.tensors and (kernels == "native" or not Watched.others)
    if name in PLAIN:
        model = reference(family.folders[name])
        assert same_tokens(model, prompt, greedy(model, prompt, COUNT), wanted) == COUNT


@pytest.mark.parametrize("to", [0, 1])
def test_pages_stay_and_are_read_by_either_kind(family, to):  # noqa: F811
    """Pages that stay on the device can be written to an engine of the same kind and to one that uses bytes."""
    staying_one, other = connected(family, 1)[0], engines(family, 1)[0] if to else connected(family, 1)[0]
    pages = [3, 0, 5]
    data = torch.randint(0, 256, (3, staying_one.page_bytes), dtype=torch.uint8)
    staying_one.write_pages(pages, staying(data))
    read = staying_one.read_pages(pages)
    assert is_tensor(read) and torch.equal(read.data.view(3, -1), data)
    other.write_pages([1, 2, 4], read)
    again = other.read_pages([1, 2, 4])
    assert is_tensor(again) == (not to) and bytes(
        memoryview(joined([again], tuple(data.shape), torch.uint8).numpy())
    ) == bytes(data.numpy())
    with pytest.raises(ValueError, match="should be"):
        other.write_pages([1, 2], read)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_stays_is_a_view_and_what_comes_in_is_a_copy(dtype):
    hidden = torch.randn(1, 5, 6).to(dtype)
    out = whole_of(hidden, True)
    assert out.data.data_ptr() == hidden.data_ptr() and len(out.data) == 5 * 6 * dtype.itemsize
    rows = [cut(out, lo, hi) for lo, hi in ((0, 1), (1, 3), (3, 5))]
    back = joined(rows[::-1], (5, 6), dtype)
    assert torch.equal(back, hidden[0, [3, 4, 1, 2, 0]]) and back.data_ptr() != hidden.data_ptr()
    mixed = joined([rows[0], array_of(hidden[0, 1:].clone())], (5, 6), dtype)
    assert torch.equal(mixed, hidden[0])
    single = joined([out], (5, 6), dtype)
    assert single.data_ptr() != hidden.data_ptr()  # layers write into their input, which may be in use elsewhere
    came = Stacked(["a", "b"], out, [1, 4])
    assert torch.equal(gathered(came, ["b", "a"], (5, 6), dtype), hidden[0, [1, 2, 3, 4, 0]])


def test_what_does_not_fit_is_refused_and_likeness_is_the_same():
    one = staying(torch.randn(2, 4))
    for arrays, shape, dtype in (
        ([one], (3, 4), torch.float32),
        ([one], (4, 2), torch.float32),
        ([one], (2, 4), torch.float16),
    ):
        with pytest.raises(ValueError, match="should be"):
            joined(arrays, shape, dtype)
    with pytest.raises(ValueError, match="should be"):
        joined([Array("float32", (2, 4), one.data[:-4])], (2, 4), torch.float32)
    assert likeness(one, Array("float32", (2, 4), one.data.numpy().tobytes())).same
    turned = likeness(one, staying(-one.data.view(torch.float32).view(2, 4)))
    assert not turned.same and turned.cosine == pytest.approx(-1.0)


def test_what_is_kept_of_it_is_a_copy_on_its_device():
    kept, whole_step = ActivationCache(10_000), torch.randn(64, 4)
    kept.store_span("s", 1, 0, cut(staying(whole_step), 0, 2))
    kept.store_span("s", 1, 2, cut(staying(whole_step), 2, 4))
    ((first, lo, hi), _) = kept.pieces("s", 1, 0, 4)
    assert is_tensor(first) and (lo, hi) == (0, 2)
    assert first.data.untyped_storage().nbytes() == 2 * 4 * 4  # not the whole step's storage
    assert kept.nbytes == 2 * (2 * 4 * 4 + 256)
    kept.check({"s"})
