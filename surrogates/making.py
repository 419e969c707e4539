"""`make_surrogate`: make a cheaper stand-in for a run of a model's layers and add it to the zoo (BL-10).

    report = make_surrogate(zoo, "base", (4, 6), SurrogateOptions(part="layer", ratio=0.5))

The steps are plan, prune, recover, score, time and store; `plan_surrogate` returns the plan alone. The surrogate is a
model of its own: its parent's chain with the pruned components in place, so it costs only their tensors. The parent is
its base. The scored pair (exact block, stand-in) is recorded in the same transaction.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from surgery.families.settings import config_of
from surgery.models.put import MadeModel, MadeReport, put_made
from surgery.tensors.half_products import fast_products
from surgery.tensors.pool import TORCH_DTYPES
from surgery.tensors.store import keep_tensors
from surgery.text.text import Probe
from surrogates.block import BlockRun, ParentBlock, Subject, open_subject
from surrogates.material import Material, device_of, gather, metrics_of, score
from surrogates.options import SurrogateOptions, SurrogateReport
from surrogates.pruning.draft import PruneTarget, pruned_run, renamed, target_of, whole_chain
from surrogates.pruning.groups import Part, halves, prunable
from surrogates.pruning.importance import magnitude, taylor
from surrogates.pruning.plan import PrunePlan, choose, nearest
from surrogates.recovery.recover import Progress, Recovery, recover_
from surrogates.recovery.refit import refit_
from surrogates.recovery.saved import RecoveryTask
from surrogates.scoring.agreement import Agreement
from surrogates.scoring.timing import Speed
from zoo.catalog.names import check_name
from zoo.errors import InputError, NameTaken
from zoo.manifest import SideFile
from zoo.records import Equivalence
from zoo.records import ScoredRun as ChainRun

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo


def plan_surrogate(zoo: Zoo, model: str, layers: tuple[int, int], options: SurrogateOptions) -> PrunePlan:
    """Return the plan of what would be removed, without doing it. Raises as `make_surrogate`."""
    options.check()
    handle = zoo.model(model)
    target = _target(zoo, handle, layers, options.part)
    material = None
    if options.importance == "taylor":
        material = gather(zoo, handle, layers, (target.lo, target.hi), options)
        subject = material.subject
    else:
        subject = open_subject(zoo.store, handle.manifest, layers, (target.lo, target.hi), device_of(options.device))
    return make_plan(target, subject, material, options)


@fast_products()
def make_surrogate(
    zoo: Zoo,
    model: str,
    layers: tuple[int, int],
    options: SurrogateOptions | None = None,
    progress: Progress | None = None,
) -> SurrogateReport:
    """Prune, refit, recover, score, time and store a stand-in.

    Args:
        layers: First and last, counted from 0, both inclusive.
        progress: Called with (name of the part, steps done, steps in all).

    Raises:
        NotFound, AmbiguousName, NameTaken: The model does not exist or is ambiguous, or the surrogate's name is taken.
        InputError: The layers cannot be pruned (see `surrogates.pruning.draft.target_of`), or text or values cannot be
            used.
    """
    options = options or SurrogateOptions()
    options.check()
    begun = time.monotonic()
    handle = zoo.model(model)
    default = f"{handle.name}@surrogate-{layers[0]}-{layers[1]}-{options.part}"
    name = free_name(zoo, default if options.name is None else options.name)
    target = _target(zoo, handle, layers, options.part)
    material = gather(zoo, handle, layers, (target.lo, target.hi), options)
    plan = make_plan(target, material.subject, material, options)
    run, recovery = prune_and_recover(zoo, target, plan, material, options, progress)
    agreement, speed = score(material, run, options.timing)
    put = _put(zoo, target, plan, run, name, agreement, speed, material.probe)
    seconds = time.monotonic() - begun
    return SurrogateReport(
        name,
        handle.name,
        layers,
        options.part,
        plan.removed_ratio,
        agreement,
        speed,
        material.probe.digest,
        put.bytes_new,
        seconds,
        put.exportable,
        put.reason,
        plan,
        recovery,
    )


def _target(zoo: Zoo, handle: ModelHandle, layers: tuple[int, int], part: Part) -> PruneTarget:
    if handle.kind == "stitch":
        raise InputError(f"{handle.name} is a stitch, not a model with layers")
    return target_of(handle.manifest, config_of(zoo.store, handle.manifest), layers, part)


def free_name(zoo: Zoo, name: str) -> str:
    """Return the name after checking it before long work. Raises NameTaken; InputError for an invalid name."""
    check_name(name)
    if any(entry.name == name for entry in zoo.entries()):
        raise NameTaken(
            f"the name {name!r} holds a model already: choose another with --name, or remove that model first"
        )
    return name


def make_plan(target: PruneTarget, subject: Subject, material: Material | None, options: SurrogateOptions) -> PrunePlan:
    """Return the plan: the feasible counts nearest to the ratio, and the units with the highest scores.

    Without `material`, units are scored by the size of their weights alone.
    """
    cost = target.cost
    after = nearest(target.shape, target.part, options.ratio, cost)
    block = subject.block()
    if material is None or options.importance == "magnitude":
        scores = magnitude(block, target.shape, target.axes, target.layer_of)
    else:
        scored = material.learn.select_windows(slice(0, options.scored))
        scores = taylor(subject, block, scored, target.shape, target.axes, target.layer_of)
    kept = tuple(choose(target.shape, after, each) for each in scores)
    whole = cost(target.shape)
    return PrunePlan(target.part, target.layers, options.ratio, target.shape, after, whole, whole - cost(after), kept)


def prune_and_recover(
    zoo: Zoo,
    target: PruneTarget,
    plan: PrunePlan,
    material: Material,
    options: SurrogateOptions,
    progress: Progress | None,
) -> tuple[BlockRun, Recovery | None]:
    """Apply a plan: slice, refit, train. The resulting run's tensors are rounded to the stored dtype."""
    subject = material.subject
    run = pruned_run(target, plan, subject.tensors)
    block = subject.block(run)
    if options.refit:
        row = prunable(target.family)
        outs = [
            [row.out[half] for half in halves(target.part) if half in row.out and _holds(target, at, row.out[half])]
            for at in range(len(run.placed))
        ]
        refit_(block, subject.block(), material.learn, row, outs)
    recovery = None
    if options.recovery.how != "none":
        task = RecoveryTask(zoo.store.root, _settings(target, plan, material, options))
        recovery = recover_(subject, block, material.learn, material.check, options.recovery, task, progress)
    return BlockRun(run.placed, run.plan, _rounded(target, run, block), run.changed), recovery


def _rounded(target: PruneTarget, run: BlockRun, block: ParentBlock) -> dict[str, Tensor]:
    """Return a block's changed weights, each in the dtype that its original tensor is stored in."""
    dtypes = {tensor.digest: TORCH_DTYPES[tensor.dtype] for tensor in target.manifest.tensors}
    tensors: dict[str, Tensor] = {}
    for at in run.changed:
        for name, digest in target.placed[at].component.tensors:
            tensors[f"{at}.{name}"] = block.names[at][name].detach().to(dtypes[digest])
            if not bool(tensors[f"{at}.{name}"].isfinite().all()):
                raise InputError(f"the pruned {name} does not fit into the range of the stored dtype: nothing was kept")
    return tensors


def _holds(target: PruneTarget, at: int, path: str) -> bool:
    """Return whether component `at` of the run is pruned and ends in this layer."""
    return at in target.changed and any(axis.name == f"{path}.weight" for axis in target.axes[at])


def _settings(target: PruneTarget, plan: PrunePlan, material: Material, options: SurrogateOptions) -> dict[str, Any]:
    """Return everything that recovery depends on."""
    chain = [placed.component.digest for placed in target.manifest.components]
    learned = Probe(material.probe.text, material.probe.tokenizer, material.learn.ids)
    return {
        "chain": chain,
        "plan": plan.document(),
        "refit": options.refit,
        "recovery": asdict(options.recovery),
        "windows": learned.digest,
    }


def carried(handle_sides: tuple[SideFile, ...]) -> tuple[SideFile, ...]:
    """Return tokenizer and generation settings of the parent, as the surrogate's own files."""
    skipped = ("config.json", "README.md", "adapter_config.json")
    kept = [side for side in handle_sides if side.path not in skipped and not side.path.endswith(".index.json")]
    return tuple(SideFile(side.path, side.blob, side.nbytes) for side in kept)


def _put(
    zoo: Zoo,
    target: PruneTarget,
    plan: PrunePlan,
    run: BlockRun,
    name: str,
    agreement: Agreement,
    speed: Speed,
    probe: Probe,
) -> MadeReport:
    parent = target.manifest
    with zoo.store.ingesting():
        metas = keep_tensors(zoo.store, dict(run.tensors))
        chain, components = whole_chain(target, renamed(run, {key: meta.digest for key, meta in metas.items()}, {}))
        pair = Equivalence(
            "surrogate",
            ChainRun(parent.name, target.lo, target.hi),
            ChainRun(name, target.lo, target.hi),
            probe.digest,
            agreement.block,
            None,
            metrics_of(agreement, speed, plan.removed_ratio),
        )
        made = MadeModel(
            name=name,
            kind="surrogate",
            base=parent.name,
            source=f"pruned: {plan.part} of layers {plan.layers[0]}-{plan.layers[1]} of {parent.name}, "
            f"{plan.removed_ratio:.4f} removed",
            plan=chain,
            components=components,
            tensors={meta.digest: meta for meta in (*parent.tensors, *metas.values())},
            sides=carried(parent.side_files),
            pairs=(pair,),
        )
        return put_made(zoo.store, made)
