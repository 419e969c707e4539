"""Pruned blocks in every family: removing nothing is exact bit for bit, removing dead units loses nothing.

Importance scores find the dead units.
"""

from __future__ import annotations

import pytest
import torch

from surgery.families.settings import config_of
from surrogates.block import Subject, as_float32, open_subject, record
from surrogates.pruning.draft import PruneTarget, pruned_run, target_of
from surrogates.pruning.importance import magnitude, taylor
from surrogates.pruning.plan import BlockShape, KeptSlices, PrunePlan, choose, nearest
from surrogates.pruning.prune import kept_entries
from tests import checkpoints
from zoo.errors import InputError

IDS = torch.randint(3, checkpoints.VOCAB, (6, 11), generator=torch.Generator().manual_seed(2))
#: Family or variant -> the parts that can be pruned in it.
PRUNABLE = {
    "llama": ("layer", "attention", "ffn"),
    "llama-tied-bias": ("layer", "attention", "ffn"),
    "mistral": ("layer",),
    "qwen2": ("layer", "attention"),
    "qwen3": ("layer",),
    "gemma2": ("layer", "attention", "ffn"),
    "phi3": ("layer", "attention", "ffn"),
    "glm4": ("layer",),
    "phi": ("layer", "attention", "ffn"),
    "gpt2": ("ffn",),
    "opt": ("ffn",),
    "gpt_neox": ("ffn",),
    "olmo2": ("ffn",),
    "mixtral": ("attention",),
}
CASES = [(family, part) for family, parts in PRUNABLE.items() for part in parts]


def opened(zoo, name: str, part: str, layers: tuple[int, int] = (1, 2)) -> tuple[PruneTarget, Subject]:
    manifest = zoo.model(name).manifest
    target = target_of(manifest, config_of(zoo.store, manifest), layers, part)
    return target, open_subject(zoo.store, manifest, layers, (target.lo, target.hi))


def plan_for(target: PruneTarget, after: BlockShape, kept: list[KeptSlices]) -> PrunePlan:
    whole = target.cost(target.shape)
    return PrunePlan(
        target.part, target.layers, 0.5, target.shape, after, whole, whole - target.cost(after), tuple(kept)
    )


def everything(shape: BlockShape) -> KeptSlices:
    return KeptSlices(*(tuple(range(count)) for count in (shape.heads, shape.kv, shape.channels)))


def outputs(subject: Subject, block) -> torch.Tensor:
    with torch.no_grad():
        hidden = subject.exact.run(IDS, subject.exact.course(IDS), 0, subject.lo)
        return block(hidden, block.course(IDS))


@pytest.mark.parametrize(("family", "part"), CASES)
def test_nothing_removed_is_the_exact_block(zoo, stored, family, part):
    target, subject = opened(zoo, stored(family), part)
    expected = record(subject, IDS).outputs
    assert torch.equal(outputs(subject, subject.block()), expected)
    same = subject.block(
        pruned_run(target, plan_for(target, target.shape, [everything(target.shape)] * 2), subject.tensors)
    )
    assert torch.equal(outputs(subject, same), expected)
    assert target.cost(target.shape) == sum(
        weight.numel() for at in target.changed for name, weight in same.names[at].items() if counted(target, name)
    )


def counted(target: PruneTarget, name: str) -> bool:
    roots = {axis.name.split(".")[0] for axes in target.axes for axis in axes}
    return not target.family.parallel or target.part == "layer" or name.split(".")[0] in roots


def killed(target: PruneTarget, tensors: dict[str, torch.Tensor], dead: list[KeptSlices]) -> None:
    """Zero all weights of some units, in place, so that they compute nothing."""
    for at in target.changed:
        names = dict(target.placed[at].component.tensors)
        for axis in target.axes[at]:
            entries = kept_entries(axis, target.shape, dead[target.layer_of[at]])
            tensor = tensors[names[axis.name]].clone()
            tensor.index_fill_(axis.dim, entries, 0.0)
            tensors[names[axis.name]] = tensor


def planted(zoo, name: str, part: str) -> tuple[PruneTarget, Subject, BlockShape, list[KeptSlices]]:
    """Return a model with different dead units in two layers, and the shape that is left without them."""
    target, _ = opened(zoo, name, part)
    shape = target.shape
    after = nearest(shape, part, 0.5, target.cost)
    group, left = shape.heads // shape.kv, after.heads // after.kv
    dead = []
    for layer in range(2):
        kv = tuple((layer + at) % shape.kv for at in range(shape.kv - after.kv))
        heads = [head for at in kv for head in range(at * group, (at + 1) * group)]
        heads += [at * group + each for at in range(shape.kv) if at not in kv for each in range(group - left)]
        channels = tuple((layer + 2 * at) % shape.channels for at in range(shape.channels - after.channels))
        dead.append(KeptSlices(tuple(sorted(heads)), tuple(sorted(kv)), tuple(sorted(set(channels)))))
    manifest = target.manifest
    from surgery.modules.stack import assemble
    from surgery.tensors.pool import map_tensor

    tensors = {
        tensor.digest: as_float32(map_tensor(zoo.store.open_tensor(tensor.digest)), "cpu")
        for tensor in manifest.tensors
    }
    killed(target, tensors, dead)
    exact = assemble(target.plan, manifest.components, tensors)
    return target, Subject(manifest, target.plan, (1, 2), target.lo, target.hi, tensors, exact), after, dead


@pytest.mark.parametrize(("family", "part"), CASES)
def test_removing_what_is_dead_loses_nothing(zoo, stored, family, part):
    target, subject, _, dead = planted(zoo, stored(family), part)
    shape = target.shape
    left = [
        KeptSlices(
            *(
                tuple(at for at in range(shape.units(unit)) if at not in layer.units(unit))
                for unit in ("heads", "kv", "channels")
            )
        )
        for layer in dead
    ]
    after = BlockShape(shape.hidden, len(left[0].heads), len(left[0].kv), shape.head_dim, len(left[0].channels))
    pruned = subject.block(pruned_run(target, plan_for(target, after, left), subject.tensors))
    assert sum(weight.numel() for weight in pruned.parameters()) < sum(
        weight.numel() for weight in subject.block().parameters()
    )
    torch.testing.assert_close(outputs(subject, pruned), record(subject, IDS).outputs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("family", "part"), [("llama", "layer"), ("phi3", "layer"), ("qwen2", "attention"), ("gpt2", "ffn")]
)
@pytest.mark.parametrize("how", ["taylor", "magnitude"])
def test_importance_finds_the_dead_units(zoo, stored, family, part, how):
    target, subject, after, dead = planted(zoo, stored(family), part)
    if how == "taylor":
        states = record(subject, IDS)
        scores = taylor(subject, subject.block(), states, target.shape, target.axes, target.layer_of)
    else:
        scores = magnitude(subject.block(), target.shape, target.axes, target.layer_of)
    for layer, each in enumerate(scores):
        kept = choose(target.shape, after, each)
        halves = {"layer": ("heads", "kv", "channels"), "attention": ("heads", "kv"), "ffn": ("channels",)}[part]
        for unit in halves:
            assert not set(kept.units(unit)) & set(dead[layer].units(unit))


def test_taylor_sees_what_magnitude_cannot(zoo, stored):
    """A channel with large weights that is closed for every input has no effect on the output."""
    target, subject = opened(zoo, stored("llama"), "ffn", (1, 1))
    digests = dict(target.placed[0].component.tensors)
    gate, down = (subject.tensors[digests[f"mlp.{name}_proj.weight"]] for name in ("gate", "down"))
    with torch.no_grad():
        gate[3] = 0.0  # silu(0) is 0: nothing passes, whatever the other weights are
        down[:, 3] *= 50.0
    block = subject.block()
    small = taylor(subject, block, record(subject, IDS), target.shape, target.axes, target.layer_of)[0].channels
    large = magnitude(block, target.shape, target.axes, target.layer_of)[0].channels
    assert small[3] == min(small) and large[3] == max(large)


def test_taylor_is_the_sum_over_batches_of_weight_times_gradient(zoo, stored):
    target, subject = opened(zoo, stored("llama"), "attention", (1, 1))
    scores = taylor(subject, subject.block(), record(subject, IDS), target.shape, target.axes, target.layer_of)[0]
    model = zoo.model("llama").load()
    model(IDS, labels=IDS).loss.backward()
    attention = model.model.layers[1].self_attn
    products = {
        name: (getattr(attention, name).weight * getattr(attention, name).weight.grad).abs()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj")
    }
    heads = products["q_proj"].view(4, -1).sum(1) + products["o_proj"].mT.reshape(4, -1).sum(1)
    kv = products["k_proj"].view(2, -1).sum(1) + products["v_proj"].view(2, -1).sum(1)
    torch.testing.assert_close(torch.tensor(scores.heads), heads.detach(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(torch.tensor(scores.kv), kv.detach(), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("family", "part", "reason"),
    [
        ("gpt2", "attention", "width of a head"),
        ("gpt2", "layer", "--part ffn"),
        ("opt", "attention", "width of a head"),
        ("gpt_neox", "layer", "--part ffn"),
        ("olmo2", "attention", "norms"),
        ("mixtral", "ffn", "experts"),
        ("bloom", "ffn", "cannot be pruned"),
    ],
)
def test_what_a_family_cannot_lose_is_refused_with_a_reason(zoo, stored, family, part, reason):
    with pytest.raises(InputError, match=reason):
        opened(zoo, stored(family), part)
