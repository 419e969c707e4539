"""Promote a stored model to an alias if it passes its conditions, measured beside what is live."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from surgery.evaluation.gate import GateFigure, judge, parse_conditions
from surgery.evaluation.harness import EvalOptions, check_installed
from surgery.evaluation.record import evaluate_stored
from zoo.aliases import set_alias
from zoo.catalog.names import check_name
from zoo.errors import NameTaken

if TYPE_CHECKING:
    from zoo.api import Zoo
    from zoo.catalog import Reader


@dataclass(frozen=True, slots=True)
class Promotion:
    """What a promotion came to.

    Fields:
        live: The model that was compared with; None if there was none.
        figures: What each condition was judged by; none if the candidate was live already.
    """

    alias: str
    candidate: str
    live: str | None
    promoted: bool
    figures: tuple[GateFigure, ...] = ()


def promote(
    zoo: Zoo,
    run: str,
    alias: str,
    conditions: Sequence[str],
    options: EvalOptions | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    allow_code: bool = False,
) -> Promotion:
    """Let an alias point to a model if every condition is met.

    The live model is what the alias points to, the one with the largest share if several.

    Args:
        run: The model; or a run, for its newest checkpoint `run@step-n`.
        conditions: See `surgery.evaluation.gate`.

    Raises:
        InputError, NotFound, AmbiguousName: A wrong name, condition or task; as `evaluate_stored`.
        InUse: The alias was changed meanwhile: the comparison holds no more, and nothing was done.
    """
    wanted = parse_conditions(conditions)
    check_name(alias)
    with zoo.store.catalog.reading() as reader:
        if alias in reader.names():
            raise NameTaken(f"{alias!r} is a model: choose another name for the alias")
        candidate, now = newest_of(reader, run), reader.alias(alias)
    live = None if now is None else max(now.targets, key=lambda target: target.share).model
    if now is not None and [target.model for target in now.targets] == [candidate]:
        return Promotion(alias, candidate, live, promoted=True)
    check_installed()
    tasks = list(dict.fromkeys(condition.task for condition in wanted))

    def measured(name: str) -> dict[str, Any]:
        return evaluate_stored(zoo, name, tasks, options, device, dtype, allow_code=allow_code)

    theirs = None if live is None or live == candidate else measured(live)
    own = measured(candidate)
    figures = judge(wanted, own, own if live == candidate else theirs)
    promoted = all(figure.met for figure in figures)
    if promoted:
        kept = [asdict(figure) for figure in figures]
        set_alias(zoo.store, alias, candidate, "promote", kept, expected=0 if now is None else now.now.id)
    return Promotion(alias, candidate, live, promoted, figures)


def newest_of(reader: Reader, run: str) -> str:
    """Return the model of a name; of a run, its checkpoint of the most steps. Raises NotFound, AmbiguousName."""
    names = reader.names()
    if run not in names:
        steps = [(int(found[1]), found[0]) for found in (_step(run, name) for name in names) if found]
        if steps:
            return max(steps)[1]
    return reader.resolve(run)


def _step(run: str, name: str) -> re.Match[str] | None:
    return re.fullmatch(re.escape(run) + r"@step-([0-9]{1,18})", name)
