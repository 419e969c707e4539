"""Run the demo from end to end: train, share, serve, query. Each step prints its results before the next one starts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cli.demo import report
from cli.demo.family import Trained, build_family
from cli.demo.progress import Progress
from cli.demo.recipe import Recipe
from cli.demo.sharing import Sharing, ingest_family
from cli.shared.output import print_json
from surgery.text.library import read_library

#: Tokens per answer, and requests per model when all are queried at once.
_ANSWER_TOKENS = 64
_EACH = 2


@dataclass(frozen=True, slots=True)
class Demo:
    """What to run and where.

    Fields:
        folder: Folder for models, plots and the report.
        library: Folder of source files to train on; None: the running Python's standard library.
    """

    recipe: Recipe
    folder: Path
    store: Path
    database: str | None = None
    serve: bool = True
    library: Path | None = None


def run_demo(demo: Demo, progress: Progress, *, as_json: bool) -> None:
    """Run all steps, printing as they end, or one JSON document at the end. It is also written to `DIR/report.json`.

    Raises:
        ZooError: No source files to train on, a store with other models of these names, or a server that does not
            start.
    """
    started = time.monotonic()
    tell: Callable[[str], None] = (lambda text: None) if as_json else (lambda text: print(text, flush=True))
    corpus = read_library(demo.library, demo.recipe.max_bytes)
    tell(report.opening(demo.recipe, corpus))
    family = build_family(demo.recipe, corpus, demo.folder, progress)
    tell(report.learned(family))
    sharing = _share(demo, family)
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
        **report.document(corpus, family, sharing, plots, served),
        "seconds": round(seconds, 1),
    }
    (demo.folder / "report.json").write_text(json.dumps(document, indent=2) + "\n")
    tell(report.closing(demo.recipe, demo.folder, demo.store, seconds))
    if as_json:
        print_json(document)


def _share(demo: Demo, family: tuple[Trained, ...]) -> Sharing:
    from zoo.api import Zoo

    with Zoo(demo.store, demo.database) as zoo:
        return ingest_family(zoo, family)


def _plots(demo: Demo, sharing: Sharing) -> tuple[Path, ...]:
    from cli.demo.plot import plot_blocks, plot_storage

    blocks, storage = (demo.folder / "plots" / f"{demo.recipe.size}-{what}.png" for what in ("blocks", "storage"))
    plot_blocks(sharing, blocks)
    plot_storage(sharing, storage)
    return (blocks, storage)


def _serve(demo: Demo, progress: Progress) -> report.Served:
    from cli.demo.ask import ask_each, ask_together
    from cli.demo.picture import busiest_step, read_runs
    from cli.demo.serving import running_server

    members, tokens = demo.recipe.members, min(_ANSWER_TOKENS, demo.recipe.context // 4)
    progress.note("  starting `zoo serve`, a process of its own")
    with running_server(
        demo.store, demo.database, [member.name for member in members], demo.folder / "serving"
    ) as server:
        answers = ask_each(server.url, server.api_key, members, tokens)
        together = ask_together(server.url, server.api_key, members, _EACH, tokens)
    step = busiest_step(read_runs(server.trace))
    return report.Served(server.url, server.start_seconds, answers, together, step, str(server.trace), server.exit_code)
