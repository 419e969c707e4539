"""A model with text in its own tokens, for making a stand-in and measuring it.

    material = gather(zoo, handle, (4, 6), (9, 15), options)
    agreement, speed = score(material, run, options.timing)

There are three sets of windows: for training, for deciding whether recovery helped, and held out for measuring.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from surgery.tensors.pool import TORCH_DTYPES
from surgery.text.text import Part as TextPart
from surgery.text.text import Probe, Text, read_text
from surgery.text.tokenizers import has_tokenizer, tokenizer_digest
from surrogates.block import BlockRun, ParentBlock, States, Subject, open_subject, record, windows_that_fit
from surrogates.options import SurrogateOptions
from surrogates.scoring.agreement import Agreement, agree
from surrogates.scoring.timing import Speed, TimingSettings, measure
from zoo.errors import InputError
from zoo.manifest import ModelManifest

if TYPE_CHECKING:
    from zoo.api import ModelHandle, Zoo

#: One training window in this many is used to decide whether recovery helped instead.
_CHECKS = 8


@dataclass(frozen=True)
class Material:
    """A model's block on text in its own tokens.

    Fields:
        learn: Training windows.
        check: Windows to decide by.
        measure: Held-out windows.
        probe: The held-out windows with their digests.
    """

    subject: Subject
    learn: States
    check: States
    measure: States
    probe: Probe


def device_of(name: str) -> str:
    """Return the accelerator if there is one, else the CPU, for "auto"; any other name unchanged.

    Raises InputError for a device that does not exist.
    """
    if name == "auto":
        return str(torch.accelerator.current_accelerator()) if torch.accelerator.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"device {name[:40]!r} cannot be used: {reason}") from None
    return name


def gather(
    zoo: Zoo, handle: ModelHandle, layers: tuple[int, int], bounds: tuple[int, int], options: SurrogateOptions
) -> Material:
    """Load the model and record its block [lo, hi) on text.

    Raises:
        InputError: Text that cannot be read or has ids beyond the vocabulary, windows longer than the context, or
            values that are not finite.
    """
    device = device_of(options.device)
    text = read_text(options.text)
    tokenizer = handle.tokenizer() if has_tokenizer(handle) else None
    subject = open_subject(zoo.store, handle.manifest, layers, bounds, device)
    _check_context(subject, options.length)
    count = windows_that_fit(options.windows, options.length, subject.width)
    learn = record(subject, _windows(subject, text, tokenizer, options, "train", count))
    held = _windows(
        subject, text, tokenizer, options, "held_out", windows_that_fit(options.held_out, options.length, subject.width)
    )
    apart = len(learn) // _CHECKS or len(learn) // 2
    check, learn = learn.select_windows(slice(0, max(1, apart))), learn.select_windows(slice(apart, None))
    return Material(subject, learn, check, record(subject, held), Probe(text.digest, tokenizer_digest(handle), held))


def _windows(
    subject: Subject, text: Text, tokenizer: Any, options: SurrogateOptions, part: TextPart, count: int
) -> torch.Tensor:
    drawn = text.tokens(tokenizer, options.length, count, part=part, seed=options.seed)
    if int(drawn.max()) >= subject.vocabulary:
        raise InputError(
            f"{text.origin} has token ids beyond the vocabulary of {subject.manifest.name} ({subject.vocabulary} "
            "tokens)"
        )
    return drawn


def _check_context(subject: Subject, length: int) -> None:
    limits = [getattr(config, "max_position_embeddings", None) for config in subject.exact.configs]
    context = min((limit for limit in limits if isinstance(limit, int)), default=length)
    if length > context:
        raise InputError(
            f"windows of {length} tokens are longer than what {subject.manifest.name} reads ({context}): give --length"
        )


def stored_dtype(manifest: ModelManifest, lo: int, hi: int) -> torch.dtype:
    """Return the dtype that the matrices of components [lo, hi) are stored in."""
    names = {digest for placed in manifest.components[lo:hi] for _, digest in placed.component.tensors}
    return TORCH_DTYPES[
        max((tensor for tensor in manifest.tensors if tensor.digest in names), key=lambda each: each.elements).dtype
    ]


def score(material: Material, run: BlockRun, timing: TimingSettings) -> tuple[Agreement, Speed]:
    """Score how well the run replaces the block on held-out text, and time it in the stored dtype."""
    subject = material.subject
    dtype = stored_dtype(subject.manifest, subject.lo, subject.hi)
    block = subject.block(run)
    agreement = agree(subject, lambda hidden, ids: _output(block, hidden, ids), material.measure)
    if not all(math.isfinite(value) for value in asdict(agreement).values()):
        raise InputError(
            f"the stand-in for layers of {subject.manifest.name} gives values that are not finite: nothing was kept"
        )
    speed = measure(subject.block(dtype=dtype), subject.block(run, dtype), material.measure.inputs.shape[-1], timing)
    return agreement, speed


def _output(block: ParentBlock, hidden: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = block(hidden, block.course(ids))
    return out


def metrics_of(agreement: Agreement, speed: Speed, removed_ratio: float) -> dict[str, float]:
    """Return the scores beside the similarity, for a recorded pair."""
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
