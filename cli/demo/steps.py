"""Run the demo from end to end: train, share, remake, serve, query.

Each step prints its results before the next one starts.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cli.demo.family import Trained, build_family
from cli.demo.lessons import Curriculum, LibraryCurriculum
from cli.demo.progress import Progress
from cli.demo.recipe import Recipe
from cli.demo.remakes import Remade, remake_family, remove_remakes
from cli.demo.report import text as report
from cli.demo.sharing import Sharing, ingest_family, sharing_of
from cli.shared.output import print_json

if TYPE_CHECKING:
    from cli.demo.chat.base_model import PretrainedBase

#: Tokens per answer, and requests per model when all are queried at once.
_ANSWER_TOKENS = 64
_EACH = 2


@dataclass(frozen=True, slots=True)
class Demo:
    """What to run and where.

    Fields:
        folder: Folder for models, plots and the report.
        library: Folder of source files to train on; None: the running Python's standard library.
        base: The pretrained model of a chat family; None: that of the installed package.
    """

    recipe: Recipe
    folder: Path
    store: Path
    database: str | None = None
    serve: bool = True
    library: Path | None = None
    base: PretrainedBase | None = None


def run_demo(demo: Demo, progress: Progress, *, as_json: bool) -> None:
    """Run all steps, printing as they end, or one JSON document at the end. It is also written to `DIR/report.json`.

    Raises:
        ZooError: Nothing to train on, a store with other models of these names, or a server that does not start.
    """
    started = time.monotonic()
    tell: Callable[[str], None] = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
    curriculum = curriculum_of(demo)
    tell(report.opening(demo.recipe, curriculum))
    family = build_family(demo.recipe, curriculum, demo.folder, progress)
    tell(report.learned(family))
    sharing = _share(demo, family)
    remade = _remake(demo, progress)
    if remade is not None:
        tell(report.remade(remade))
        sharing = _share_all(demo)
    plots = _plots(demo, sharing)
    tell(report.shared(sharing, plots))
    served = _serve(demo, progress) if demo.serve else None
    if served is not None:
        tell(report.asked(served))
    seconds = time.monotonic() - started
    document = {
        "size": demo.recipe.size,
        "folder": str(demo.folder),
        "store": str(demo.store),
        **report.document(curriculum, family, sharing, plots, remade, served),
        "seconds": round(seconds, 1),
    }
    (demo.folder / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    tell(report.closing(demo.recipe, demo.folder, demo.store, seconds))
    if as_json:
        print_json(document)


def curriculum_of(demo: Demo) -> Curriculum:
    """Return what the family learns from. Raises InputError if it is not on this machine."""
    if demo.recipe.material == "chat":
        from cli.demo.chat.base_model import find_base
        from cli.demo.chat.curriculum import ChatCurriculum

        return ChatCurriculum(demo.recipe, demo.base or find_base())
    from surgery.text.library import read_library

    return LibraryCurriculum(demo.recipe, read_library(demo.library, demo.recipe.max_bytes))


def _share(demo: Demo, family: tuple[Trained, ...]) -> Sharing:
    from zoo.api import Zoo

    with Zoo(demo.store, demo.database) as zoo:
        if demo.recipe.remakes is not None:
            remove_remakes(zoo, demo.recipe.remakes)
        return ingest_family(zoo, family)


def _share_all(demo: Demo) -> Sharing:
    """Return what all models of the demo share, those made in the store included."""
    from zoo.api import Zoo

    with Zoo(demo.store, demo.database) as zoo:
        return sharing_of(zoo, demo.recipe.served)


def _plots(demo: Demo, sharing: Sharing) -> tuple[Path, ...]:
    from cli.demo.report.plot import plot_blocks, plot_storage

    blocks, storage = (_plot(demo, what) for what in ("blocks", "storage"))
    plot_blocks(sharing, blocks)
    plot_storage(sharing, storage)
    return (blocks, storage)


def _plot(demo: Demo, what: str) -> Path:
    return demo.folder / "plots" / f"{demo.recipe.size}-{what}.png"


def _remake(demo: Demo, progress: Progress) -> Remade | None:
    if demo.recipe.remakes is None:
        return None
    from cli.demo.chat.curriculum import write_probe
    from zoo.api import Zoo

    probe = demo.folder / "probe.jsonl"
    write_probe(probe)
    with Zoo(demo.store, demo.database) as zoo:
        return remake_family(zoo, demo.recipe.remakes, probe, _plot(demo, "compared"), progress)


def _serve(demo: Demo, progress: Progress) -> report.Served:
    from cli.demo.report.picture import busiest_step, read_runs
    from cli.demo.serving.ask import ask_each, ask_together, requests_of
    from cli.demo.serving.server import running_server

    requests, tokens = requests_of(demo.recipe), min(_ANSWER_TOKENS, demo.recipe.context // 4)
    first = [request for request in requests if not request.chat or request.prompt == requests[0].prompt]
    progress.note("  starting `zoo serve`, a process of its own")
    with running_server(demo.store, demo.database, demo.recipe.served, demo.folder / "serving") as server:
        answers = ask_each(server.url, server.api_key, requests, tokens)
        together = ask_together(server.url, server.api_key, first, _EACH, tokens)
    step = busiest_step(read_runs(server.trace))
    return report.Served(server.url, server.start_seconds, answers, together, step, str(server.trace), server.exit_code)
