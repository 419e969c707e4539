"""`make_surrogate`: a cheaper stand-in for a run of a model's layers, pruned, recovered, scored, timed and put into the zoo (BL-10).

    report = make_surrogate(zoo, "base", (4, 6), SurrogateOptions(part="layer", ratio=0.5))

Plan, then apply: `plan_surrogate` gives the plan alone. The surrogate is a model of its own: its parent's chain with the pruned
components in place, so that it costs only their tensors; the parent is its base, without which a stand-in means nothing. The scored
pair (exact block, stand-in) is recorded in the same transaction. Knows nothing of serving.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from surgery.keeping import keep_tensors
from surgery.making import Made, MadeReport, put_made
from surgery.settings import config_of
from surgery.tensors import TORCH_DTYPES
from surgery.text import Part as TextPart
from surgery.text import Probe, read_text
from surgery.tokenizers import has_tokenizer, tokenizer_digest
from surrogates.agreement import Agreement, agree
from surrogates.block import Block, Run, States, Subject, open_subject, record, windows_that_fit
from surrogates.draft import Target, pruned_run, renamed, target_of, whole_chain
from surrogates.groups import Part, halves, prunable
from surrogates.importance import Importance, magnitude, taylor
from surrogates.plan import PrunePlan, check_ratio, choose, nearest
from surrogates.recover import Progress, Recovery, RecoverySettings, recover_
from surrogates.refit import refit_
from surrogates.saved import Task
from surrogates.timing import Speed, TimingSettings, measure
from zoo.errors import InputError, NameTaken
from zoo.manifest import ModelManifest, SideFile
from zoo.records import Equivalence
from zoo.records import Run as ChainRun

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo

#: One window in so many is not learned from but decides whether recovery helped.
_CHECKS = 8


@dataclass(frozen=True)
class SurrogateOptions:
    """How a stand-in is made. `windows` of `length` tokens to learn from, `held_out` windows that only measure, `scored` windows for
    importance. `device`: "auto" takes an accelerator where there is one."""

    part: Part = "layer"
    ratio: float = 0.5
    importance: Importance = "taylor"
    refit: bool = True
    recovery: RecoverySettings = field(default_factory=RecoverySettings)
    text: str | None = None
    windows: int = 256
    length: int = 128
    held_out: int = 64
    scored: int = 64
    seed: int = 0
    name: str | None = None
    device: str = "auto"
    timing: TimingSettings = field(default_factory=TimingSettings)

    def check(self) -> None:
        """Raises InputError for options that cannot be."""
        check_ratio(self.ratio)
        self.recovery.check()
        if min(self.windows, self.held_out, self.scored) < 1 or self.length < 2:
            raise InputError("a surrogate needs at least one window of two tokens to learn from and one to measure on")


@dataclass(frozen=True)
class SurrogateReport:
    """What was made. `probe`: digest of the held-out text that the scores were taken on. `recovery`: None where none was asked for."""

    surrogate: str
    parent: str
    layers: tuple[int, int]
    part: str
    removed_ratio: float
    agreement: Agreement
    speed: Speed
    probe: str
    bytes_new: int
    seconds: float
    exportable: bool
    reason: str | None
    plan: PrunePlan | None = None
    recovery: Recovery | None = None

    @property
    def similarity(self) -> float:
        """Behind the block, on held-out text (Table 4)."""
        return self.agreement.block

    @property
    def speedup(self) -> float:
        """Of the block, decoding."""
        return self.speed.decode.median


@dataclass(frozen=True)
class Material:
    """Text in the model's own tokens. `learn`, `check`: to learn from and to decide by; `measure`: held out."""

    subject: Subject
    learn: States
    check: States
    measure: States
    probe: Probe


def device_of(name: str) -> str:
    """ "auto" -> the accelerator there is, else the CPU."""
    if name != "auto":
        return name
    return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"


def plan_surrogate(zoo: Zoo, model: str, layers: tuple[int, int], options: SurrogateOptions) -> PrunePlan:
    """What would be removed, and nothing else. Raises as `make_surrogate`."""
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


def make_surrogate(
    zoo: Zoo, model: str, layers: tuple[int, int], options: SurrogateOptions | None = None, progress: Progress | None = None
) -> SurrogateReport:
    """Prune, refit, recover, score, time and store a stand-in.

    Args:
        layers: first and last, counted from 0, both inclusive.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        NotFound, AmbiguousName, NameTaken: of the model, or of the surrogate's name.
        InputError: what cannot be pruned, see `surrogates.draft.target_of`; text or values that cannot be used.
    """
    options = options or SurrogateOptions()
    options.check()
    begun = time.monotonic()
    handle = zoo.model(model)
    name = free_name(zoo, options.name or f"{handle.name}@surrogate-{layers[0]}-{layers[1]}-{options.part}")
    target = _target(zoo, handle, layers, options.part)
    material = gather(zoo, handle, layers, (target.lo, target.hi), options)
    plan = make_plan(target, material.subject, material, options)
    run, recovery = prune_and_recover(zoo, target, plan, material, options, progress)
    agreement, speed = score(material, run, options.timing)
    put = _put(zoo, target, plan, run, name, agreement, speed, material.probe)
    seconds = time.monotonic() - begun
    return SurrogateReport(
        name, handle.name, layers, options.part, plan.removed_ratio, agreement, speed, material.probe.digest, put.bytes_new, seconds,
        put.exportable, put.reason, plan, recovery,
    )  # fmt: skip


def _target(zoo: Zoo, handle: ModelHandle, layers: tuple[int, int], part: Part) -> Target:
    if handle.kind == "stitch":
        raise InputError(f"{handle.name} is a stitch, not a model with layers")
    return target_of(handle.manifest, config_of(zoo.store, handle.manifest), layers, part)


def free_name(zoo: Zoo, name: str) -> str:
    """The name, before long work is done for it. Raises NameTaken."""
    if any(summary.name == name for summary in zoo.models()):
        raise NameTaken(f"the name {name!r} holds a model already: choose another with --name, or remove that model first")
    return name


def gather(zoo: Zoo, handle: ModelHandle, layers: tuple[int, int], bounds: tuple[int, int], options: SurrogateOptions) -> Material:
    """The model and what its block [lo, hi) does on text. Raises InputError for text that it cannot read."""
    tokenizer = handle.tokenizer() if has_tokenizer(handle) else None
    text = read_text(options.text)
    subject = open_subject(zoo.store, handle.manifest, layers, bounds, device_of(options.device))
    width = int(next(subject.exact.parts[0].parameters()).shape[-1])
    count = windows_that_fit(options.windows, options.length, width)
    vocabulary = int(next(subject.exact.parts[0].parameters()).shape[0])

    def windows(part: TextPart, wanted: int) -> torch.Tensor:
        drawn = text.tokens(tokenizer, options.length, wanted, part=part, seed=options.seed)
        if int(drawn.max()) >= vocabulary:
            raise InputError(f"{text.origin} has token ids beyond the vocabulary of {handle.name} ({vocabulary} tokens)")
        return drawn

    learn = record(subject, windows("train", count))
    held = windows("held_out", options.held_out)
    apart = max(1, len(learn) // _CHECKS) if len(learn) > 1 else 0
    check = learn.take(slice(0, apart or 1))
    return Material(
        subject, learn.take(slice(apart, None)), check, record(subject, held), Probe(text.digest, tokenizer_digest(handle), held)
    )


def make_plan(target: Target, subject: Subject, material: Material | None, options: SurrogateOptions) -> PrunePlan:
    cost = target.cost
    after = nearest(target.shape, target.part, options.ratio, cost)
    block = subject.block()
    if material is None or options.importance == "magnitude":
        scores = magnitude(block, target.shape, target.axes, target.layer_of)
    else:
        scored = material.learn.take(slice(0, options.scored))
        scores = taylor(subject, block, scored, target.shape, target.axes, target.layer_of)
    kept = tuple(choose(target.shape, after, each) for each in scores)
    whole = cost(target.shape)
    return PrunePlan(target.part, target.layers, options.ratio, target.shape, after, whole, whole - cost(after), kept)


def prune_and_recover(
    zoo: Zoo, target: Target, plan: PrunePlan, material: Material, options: SurrogateOptions, progress: Progress | None
) -> tuple[Run, Recovery | None]:
    """Apply a plan: slices, closed form, training. The run's tensors are in the stored dtype, rounded."""
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
        task = Task(zoo.store.root, _settings(target, plan, material, options))
        recovery = recover_(subject, block, material.learn, material.check, options.recovery, task, progress)
    dtype = stored_dtype(target.manifest, target.lo, target.hi)
    tensors = {f"{at}.{name}": weight.detach().to(dtype) for at in run.changed for name, weight in block.names[at].items()}
    if not all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        raise InputError(f"the pruned weights are not finite in {str(dtype).removeprefix('torch.')}: nothing was kept")
    return Run(run.placed, run.plan, tensors, run.changed), recovery


def _holds(target: Target, at: int, path: str) -> bool:
    """Whether component `at` of the run is pruned and ends in this layer."""
    return at in target.changed and any(axis.name == f"{path}.weight" for axis in target.axes[at])


def _settings(target: Target, plan: PrunePlan, material: Material, options: SurrogateOptions) -> dict[str, Any]:
    """All that recovery depends on."""
    chain = [placed.component.digest for placed in target.manifest.components]
    learned = Probe(material.probe.text, material.probe.tokenizer, material.learn.ids)
    return {
        "chain": chain,
        "plan": plan.document(),
        "refit": options.refit,
        "recovery": asdict(options.recovery),
        "windows": learned.digest,
    }


def stored_dtype(manifest: ModelManifest, lo: int, hi: int) -> torch.dtype:
    """The dtype that the matrices of components [lo, hi) are stored in."""
    names = {digest for placed in manifest.components[lo:hi] for _, digest in placed.component.tensors}
    return TORCH_DTYPES[max((tensor for tensor in manifest.tensors if tensor.digest in names), key=lambda each: each.elements).dtype]


def score(material: Material, run: Run, timing: TimingSettings) -> tuple[Agreement, Speed]:
    """How well the run does the block's work on held-out text, and how fast, in the dtype that is stored."""
    subject = material.subject
    dtype = stored_dtype(subject.manifest, subject.lo, subject.hi)
    block = subject.block(run)
    agreement = agree(subject, lambda hidden, ids: _output(block, hidden, ids), material.measure)
    speed = measure(subject.block(dtype=dtype), subject.block(run, dtype), material.measure.inputs.shape[-1], timing)
    return agreement, speed


def _output(block: Block, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = block(hidden, block.course(ids))
    return out


def metrics_of(agreement: Agreement, speed: Speed, removed_ratio: float) -> dict[str, float]:
    """The scores beside the similarity, as a recorded pair keeps them."""
    return {
        "removed_ratio": removed_ratio,
        "speedup": speed.decode.median,
        "speedup_low": speed.decode.low,
        "speedup_high": speed.decode.high,
        "speedup_prefill": speed.prefill.median,
        "seconds": speed.decode.seconds,
        "batch": float(speed.batch),
        **{key: value for key, value in asdict(agreement).items() if key != "block"},
    }


def carried(handle_sides: tuple[SideFile, ...]) -> tuple[SideFile, ...]:
    """Tokenizer and generation settings of the parent, as files of the surrogate's own."""
    skipped = ("config.json", "README.md", "adapter_config.json")
    kept = [side for side in handle_sides if side.path not in skipped and not side.path.endswith(".index.json")]
    return tuple(SideFile(side.path, side.blob, side.nbytes) for side in kept)


def _put(zoo: Zoo, target: Target, plan: PrunePlan, run: Run, name: str, agreement: Agreement, speed: Speed, probe: Probe) -> MadeReport:
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
        made = Made(
            name=name,
            kind="surrogate",
            base=parent.name,
            source=f"pruned: {plan.part} of layers {plan.layers[0]}-{plan.layers[1]} of {parent.name}, {plan.removed_ratio:.4f} removed",
            plan=chain,
            components=components,
            tensors={meta.digest: meta for meta in (*parent.tensors, *metas.values())},
            sides=carried(parent.side_files),
            pairs=(pair,),
        )
        return put_made(zoo.store, made)
