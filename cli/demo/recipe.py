"""The recipes of demo families as data: shapes, subjects, schedules.

The same recipe and corpus give the same models. No torch, no files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from surgery.text.library import EVERYTHING, PROSE
from zoo.manifest import digest_of

MemberKind = Literal["foundation", "full", "lora"]
#: What a family learns from: Python's standard library, or conversations (`cli.demo.chat`).
Material = Literal["library", "chat"]


@dataclass(frozen=True, slots=True)
class DemoShape:
    """The dimensions of a Llama model. `hidden` is a multiple of `heads`, `heads` of `kv_heads`."""

    hidden: int
    layers: int
    ffn: int
    heads: int
    kv_heads: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """Length and learning rates of a training.

    Fields:
        batch: Windows per step.
        rate: Learning rate of AdamW (embedding, head, norms, LoRA).
        matrix_rate: Learning rate of Muon (matrices of the layers); 0: AdamW for these too.
    """

    steps: int
    batch: int
    rate: float
    matrix_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class FamilyMember:
    """One model of the family.

    Fields:
        subject: The part of the corpus that it is trained on; of conversations, the style of the answers.
        prompt: The prompt that the demo sends it, in a family without `Recipe.questions`.
        shape: A foundation's shape; None for a pretrained one.
        base: The foundation it is trained from.
        frozen: Layers that are not trained; with any, the embedding is not trained either.
        keeps_embedding: The embedding is not trained.
        rank: Rank of a LoRA.
    """

    name: str
    kind: MemberKind
    subject: str
    schedule: Schedule
    prompt: str = ""
    shape: DemoShape | None = None
    base: str | None = None
    frozen: tuple[int, ...] = ()
    rank: int = 0
    keeps_embedding: bool = False

    @property
    def freezes_embedding(self) -> bool:
        return self.keeps_embedding or bool(self.frozen)


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Layers [lo, hi) of a model."""

    model: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class ComposedMember:
    """A model made of layers of others (`zoo compose`)."""

    name: str
    runs: tuple[LayerRun, ...]


@dataclass(frozen=True, slots=True)
class DeltaMember:
    """A low-rank version of a full fine-tune (`zoo delta`)."""

    name: str
    exact: str
    rank: int


@dataclass(frozen=True, slots=True)
class Remakes:
    """What is made of a family in the store, without training.

    Fields:
        compared: Two members, scored layer by layer (`zoo compare`).
    """

    compared: tuple[str, str]
    composed: ComposedMember
    delta: DeltaMember


@dataclass(frozen=True, slots=True)
class Recipe:
    """A whole family.

    Fields:
        context: Context length in tokens.
        members: Every base comes before its fine-tunes.
        max_bytes: Bound on each subject's text; None: all of it.
        measured: Most windows of held-out text for a perplexity.
        material: What it learns from.
        dtype: Of the members' files.
        questions: Chat messages that every model is asked; without any, each member gets its prompt.
        remakes: What is made of it in the store; None: nothing.
    """

    size: str
    vocabulary: int
    context: int
    members: tuple[FamilyMember, ...]
    max_bytes: int | None = None
    measured: int = 64
    seed: int = 20
    material: Material = "library"
    dtype: Literal["float32", "bfloat16"] = "float32"
    questions: tuple[str, ...] = ()
    remakes: Remakes | None = None

    @property
    def served(self) -> tuple[str, ...]:
        """Names of the models that the demo serves."""
        made = () if self.remakes is None else (self.remakes.composed.name, self.remakes.delta.name)
        return (*(member.name for member in self.members), *made)

    def member(self, name: str) -> FamilyMember:
        return next(member for member in self.members if member.name == name)

    def key(self, member: FamilyMember, corpus_digest: str) -> str:
        """Return a digest of everything that determines a member's weights, its base's key included."""
        base = None if member.base is None else self.key(self.member(member.base), corpus_digest)
        described = {field: value for field, value in asdict(member).items() if field != "prompt"}
        return digest_of([described, base, self.vocabulary, self.context, self.seed, self.dtype, corpus_digest])


@dataclass(frozen=True, slots=True)
class _Pace:
    """The schedules, in which the two sizes differ."""

    foundation: Schedule
    wide: Schedule
    partial: Schedule
    whole: Schedule
    lora: Schedule


def _family(
    size: str, narrow: DemoShape, wide: DemoShape, frozen: int, rank: int, pace: _Pace
) -> tuple[FamilyMember, ...]:
    base = f"{size}-base"
    return (
        FamilyMember(
            base, "foundation", EVERYTHING, pace.foundation, "class Queue:\n    def __init__(self, ", shape=narrow
        ),
        FamilyMember(
            f"{size}-wide", "foundation", EVERYTHING, pace.wide, "class Reader:\n    def read(self", shape=wide
        ),
        FamilyMember(
            f"{size}-concurrency",
            "full",
            "concurrency",
            pace.partial,
            "class Lock:\n    async def ",
            base=base,
            frozen=tuple(range(frozen)),
        ),
        FamilyMember(f"{size}-prose", "full", PROSE, pace.whole, "This module provides ", base=base),
        FamilyMember(f"{size}-mail", "lora", "mail", pace.lora, "class Message:\n    def get_", base=base, rank=rank),
        FamilyMember(f"{size}-maths", "lora", "maths", pace.lora, "    def __add__(self", base=base, rank=rank),
    )


TINY = Recipe(
    size="tiny",
    vocabulary=2048,
    context=256,
    members=_family(
        "tiny",
        DemoShape(hidden=192, layers=6, ffn=384, heads=6, kv_heads=2),
        DemoShape(hidden=256, layers=4, ffn=512, heads=8, kv_heads=2),
        frozen=4,
        rank=8,
        pace=_Pace(
            foundation=Schedule(440, 4, 1.5e-2, 2e-2),
            wide=Schedule(260, 4, 1.5e-2, 2e-2),
            partial=Schedule(80, 4, 4e-3, 6e-3),
            whole=Schedule(80, 4, 4e-3, 6e-3),
            lora=Schedule(70, 4, 8e-3),
        ),
    ),
)

SMALL = Recipe(
    size="small",
    vocabulary=4096,
    context=512,
    members=_family(
        "small",
        DemoShape(hidden=256, layers=8, ffn=640, heads=8, kv_heads=2),
        DemoShape(hidden=384, layers=6, ffn=768, heads=12, kv_heads=2),
        frozen=5,
        rank=16,
        pace=_Pace(
            foundation=Schedule(760, 4, 1.2e-2, 2e-2),
            wide=Schedule(440, 4, 1.2e-2, 2e-2),
            partial=Schedule(120, 4, 4e-3, 6e-3),
            whole=Schedule(120, 4, 4e-3, 6e-3),
            lora=Schedule(120, 4, 8e-3),
        ),
    ),
)

_REAL_LAYERS, _REAL_KEPT = 30, 18

REAL = Recipe(
    size="real",
    vocabulary=49152,
    context=256,
    material="chat",
    dtype="bfloat16",
    members=(
        FamilyMember("smollm2", "foundation", "plain", Schedule(0, 8, 0.0)),
        FamilyMember("smollm2-pirate", "lora", "pirate", Schedule(10, 8, 2e-3), base="smollm2", rank=8),
        FamilyMember("smollm2-json", "lora", "json", Schedule(10, 8, 2e-3), base="smollm2", rank=8),
        FamilyMember(
            "smollm2-python", "full", "python", Schedule(14, 8, 2e-4), base="smollm2", frozen=tuple(range(_REAL_KEPT))
        ),
        FamilyMember("smollm2-bard", "full", "bard", Schedule(10, 8, 1e-4), base="smollm2", keeps_embedding=True),
    ),
    questions=("What is the capital of France?", "What is a cat?", "What do plants need to grow?"),
    remakes=Remakes(
        compared=("smollm2", "smollm2-bard"),
        composed=ComposedMember(
            "smollm2-half-bard",
            (LayerRun("smollm2", 0, _REAL_LAYERS // 2), LayerRun("smollm2-bard", _REAL_LAYERS // 2, _REAL_LAYERS)),
        ),
        delta=DeltaMember("smollm2-python-delta", "smollm2-python", 16),
    ),
)

RECIPES: Mapping[str, Recipe] = {"real": REAL, "tiny": TINY, "small": SMALL}
