"""Work on the stored family's blocks without training: compare two members, compose a model, make a low-rank delta.

The steps are those of `zoo compare`, `zoo compose` and `zoo delta`, with a short probe: the answers of all styles.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cli.demo.progress import Progress
from cli.demo.recipe import ComposedMember, DeltaMember, Remakes
from zoo.errors import NotFound

if TYPE_CHECKING:
    from surgery.deltas.make import DeltaReport
    from surgery.models.put import MadeReport
    from surgery.scoring.comparison import Comparison
    from zoo.api import Zoo

#: Of the probe of a comparison.
_TOKENS, _WINDOW = 256, 64
#: Windows that weigh and that score a delta: fewer than those of `zoo delta`, which takes minutes.
_TRAIN, _HELD = 16, 4
_KINDS = frozenset({"composed", "delta"})


@dataclass(frozen=True, slots=True)
class Remade:
    """The results.

    Fields:
        composition: The composed model, as in its request.
        plot: Path of the comparison's plot.
    """

    comparison: Comparison
    composition: ComposedMember
    composed: MadeReport
    delta: DeltaReport
    plot: Path


def remake_family(zoo: Zoo, remakes: Remakes, probe: Path, plot: Path, progress: Progress) -> Remade:
    """Compare, compose and make the delta. Models of these names that an earlier run made are replaced.

    Args:
        probe: Text to compare on, and to weigh and score the delta on.
        plot: Where the comparison is plotted.

    Raises:
        NameTaken: The store has another model of one of the names.
    """
    from cli.plots.comparison import draw

    remove_remakes(zoo, remakes)
    progress.note(f"  comparing {' and '.join(remakes.compared)}")
    comparison = _compared(zoo, remakes, probe)
    plot.parent.mkdir(parents=True, exist_ok=True)
    draw(comparison, plot)
    composed = zoo.compose(composition_of(remakes.composed), remakes.composed.name)
    wanted = remakes.delta
    progress.note(f"  rewriting {wanted.exact} as a delta of rank {wanted.rank}")
    return Remade(comparison, remakes.composed, composed, _delta_made(zoo, wanted, probe), plot)


def remove_remakes(zoo: Zoo, remakes: Remakes) -> None:
    """Remove the composed model and the delta, if the store has them: nothing depends on them."""
    names = {remakes.composed.name, remakes.delta.name}
    for model in zoo.entries():
        if model.name in names and model.kind in _KINDS:
            try:
                zoo.remove(model.name)
            except NotFound:  # gone in the meantime
                continue


def composition_of(composed: ComposedMember) -> dict[str, Any]:
    """Return the composition in mergekit's terms, as `zoo compose` reads it from YAML."""
    sources = [{"model": run.model, "layer_range": [run.lo, run.hi]} for run in composed.runs]
    return {"slices": [{"sources": [source]} for source in sources]}


def _delta_made(zoo: Zoo, wanted: DeltaMember, probe: Path) -> DeltaReport:
    from surgery.deltas.make import DeltaOptions, delta
    from surgery.deltas.windows import read_windows
    from surgery.families.settings import context_length

    model = zoo.model(wanted.exact)
    windows = read_windows(model, str(probe), context_length(model.config), train=_TRAIN, held=_HELD)
    return delta(zoo.store, model.name, windows, DeltaOptions(wanted.rank, norms="fold"), wanted.name)


def _compared(zoo: Zoo, remakes: Remakes, probe: Path) -> Comparison:
    from surgery.scoring.compare import CompareSettings

    settings = CompareSettings(str(probe), _TOKENS, _WINDOW, "layer", matrix=True)
    return zoo.compare(*remakes.compared, settings)
