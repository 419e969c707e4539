"""Build the family on disk: train missing models, reuse those made with the same recipe and text.

    DIR/models/<name>/            a Hugging Face checkpoint, or a PEFT folder
    DIR/training/<name>.json      its stamp: the recipe's key and the results of the training

A model is written into a hidden folder and renamed when complete; the stamp is written last. So an interrupted run
leaves no partial model that is reused, and the next run continues with the first model that has no valid stamp.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.demo.lessons import Curriculum
from cli.demo.progress import Advance, Progress
from cli.demo.recipe import FamilyMember, Recipe

if TYPE_CHECKING:
    from cli.demo.members import Learned


@dataclass(frozen=True, slots=True)
class Trained:
    """A member on disk. Perplexities are per token on held-out files of its subject.

    Fields:
        folder: Its model folder.
        seconds: Duration of the training, also of a reused member's.
        tokens: Tokens it was trained on.
        perplexity_before: Its base's perplexity, None without a base.
        reused: Whether an earlier run made it.
    """

    name: str
    kind: str
    base: str | None
    subject: str
    folder: str
    seconds: float
    tokens: int
    train_loss: float
    perplexity: float
    perplexity_before: float | None
    reused: bool


@dataclass(frozen=True, slots=True)
class Places:
    """The paths of a demo's files."""

    root: Path

    def model(self, name: str) -> Path:
        return self.root / "models" / name

    def stamp(self, name: str) -> Path:
        return self.root / "training" / f"{name}.json"


def build_family(recipe: Recipe, curriculum: Curriculum, root: Path, progress: Progress) -> tuple[Trained, ...]:
    """Train the missing members below `root`, in the recipe's order, and return all."""
    return tuple(_members(recipe, curriculum, Places(root), progress))


def _members(recipe: Recipe, curriculum: Curriculum, places: Places, progress: Progress) -> Iterator[Trained]:
    digest = curriculum.digest
    for member in recipe.members:
        key = recipe.key(member, digest)
        found = _reusable(member, key, places)
        if found is None:
            found = _made(member, key, curriculum, places, progress)
        progress.note(_line(found))
        yield found


def _line(trained: Trained) -> str:
    verb = "trained" if trained.tokens else "converted"
    how = "already there" if trained.reused else f"{verb} in {trained.seconds:.0f} s"
    before = "" if trained.perplexity_before is None else f" (its base: {trained.perplexity_before:.1f})"
    return f"  {trained.name:<18} {how}, held-out perplexity on {trained.subject} {trained.perplexity:.1f}{before}"


def _reusable(member: FamilyMember, key: str, places: Places) -> Trained | None:
    """Return the member from its stamp if the stamp has this key and the model exists."""
    try:
        stamp = json.loads(places.stamp(member.name).read_text())
        if stamp["key"] != key or not places.model(member.name).is_dir():
            return None
        return _trained(member, places, stamp["seconds"], stamp["learned"], reused=True)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _made(member: FamilyMember, key: str, curriculum: Curriculum, places: Places, progress: Progress) -> Trained:
    from cli.demo.members import learn

    started = time.monotonic()
    folder = places.model(member.name)
    base = None if member.base is None else places.model(member.base)
    places.stamp(member.name).unlink(missing_ok=True)
    with progress.bar(member.name, member.schedule.steps) as advance:
        lesson = curriculum.prepare_lesson(member)
        learned = _written(folder, lambda partial: learn(lesson, partial, base, _remark(advance)))
    seconds = round(time.monotonic() - started, 2)
    _write_stamp(places.stamp(member.name), {"key": key, "seconds": seconds, "learned": asdict(learned)})
    return _trained(member, places, seconds, asdict(learned), reused=False)


def _remark(advance: Advance) -> Callable[[int, float], None]:
    return lambda done, loss: advance(done, f"loss {loss:.2f}")


def _written(folder: Path, write: Callable[[Path], Learned]) -> Learned:
    """Let `write` fill a hidden folder, then replace the old one with it."""
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    learned = write(partial)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    return learned


def _write_stamp(path: Path, stamp: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(stamp, indent=2) + "\n")
    partial.replace(path)


def _trained(
    member: FamilyMember, places: Places, seconds: float, learned: Mapping[str, Any], *, reused: bool
) -> Trained:
    return Trained(
        name=member.name,
        kind=member.kind,
        base=member.base,
        subject=member.subject,
        folder=str(places.model(member.name)),
        seconds=seconds,
        tokens=learned["tokens"],
        train_loss=learned["train_loss"],
        perplexity=learned["perplexity"],
        perplexity_before=learned["before"],
        reused=reused,
    )
