"""Measure the page's views over HTTP on a catalogue of many models.

    python -m benchmarks.page [--models 500] [--layers 32] [--rounds 10] [--after 1] [--store FOLDER]

The store has a catalogue and no objects, since the views read no weights: a foundation, full fine-tunes that differ
from it in six layers each, every third of them made from another one. `first_ms` is the time of a view's first request,
the first of them `--after` seconds after the start, for a page without a server reads sizes ahead; `median_ms` is that
of the rounds after it, and `cpu_ms` the processor's time of server and client in them. Printed as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from blake3 import blake3

from runtime.config import ServerConfig
from runtime.server.http_server import make_server
from runtime.server.page.app import build_page_app
from runtime.server.run_server import address_of, bind
from zoo.manifest import Component, ComponentKind, ModelManifest, Placed, SideFile, TensorMeta, WeightFile
from zoo.store import Store

#: Layers that a fine-tune changes, and tensors of each kind of component.
_CHANGED = 6
_TENSORS: dict[ComponentKind, int] = {"embedding": 1, "attention": 5, "ffn": 4, "lm_head": 2}


def digest(*parts: object) -> str:
    return blake3(repr(parts).encode()).hexdigest()


def manifest(number: int, layers: int) -> ModelManifest:
    """Return model `number`; 0 is the foundation."""
    first = number * 7 % layers
    kinds: list[tuple[int | None, ComponentKind]] = [(None, "embedding")]
    for layer in range(layers):
        kinds += [(layer, "attention"), (layer, "ffn")]
    kinds.append((None, "lm_head"))
    placed = []
    for layer, kind in kinds:
        owner = number if layer is not None and first <= layer < first + _CHANGED else 0
        tensors = tuple((f"w{at}", digest(kind, layer, owner, at)) for at in range(_TENSORS[kind]))
        placed.append(Placed(layer, Component(kind, "llama", "{}", tensors)))
    names = dict.fromkeys(tensor for part in placed for _, tensor in part.component.tensors)
    base = None if number == 0 else 0 if number % 3 else random.Random(number).randrange(number)
    return ModelManifest(
        name=f"org/model-{number}",
        kind="foundation" if base is None else "full",
        base=None if base is None else f"org/model-{base}",
        family="llama",
        source=f"org/model-{number}",
        components=tuple(placed),
        weight_files=(WeightFile("model.safetensors", digest("header"), tuple((name[:8], name) for name in names)),),
        side_files=(SideFile("config.json", digest("config"), 2),),
        tensors=tuple(TensorMeta(name, "BF16", (64, 64)) for name in names),
    )


def fill(root: Path, models: int, layers: int) -> None:
    """Put the models into a new store's catalogue."""
    with Store.open(root) as store, store.catalog.writing() as writer:
        for number in range(models):
            writer.put_model(manifest(number, layers))


@contextmanager
def opened(root: Path) -> Iterator[httpx.Client]:
    """Serve the page of a store, as `zoo ui` does."""
    with Store.open(root, create=False) as store, bind("127.0.0.1", 0) as bound:
        ready = threading.Event()
        server = make_server(build_page_app(store, None, alone=True), ServerConfig(drain_seconds=1), ready.set)
        thread = threading.Thread(target=lambda: server.run(sockets=[bound]), daemon=True)
        thread.start()
        ready.wait(10)
        with httpx.Client(base_url=address_of(bound), trust_env=False, timeout=60) as http:
            yield http
        server.should_exit = True
        thread.join(10)


def timed(http: httpx.Client, path: str, rounds: int) -> dict[str, Any]:
    """Return the times of a view in ms."""
    walls, processors = [], []
    for _ in range(rounds + 1):
        began, used = time.perf_counter(), time.process_time()
        size = len(http.get(path).raise_for_status().content)
        walls.append(1000 * (time.perf_counter() - began))
        processors.append(1000 * (time.process_time() - used))
    return {
        "first_ms": round(walls[0], 1),
        "first_cpu_ms": round(processors[0], 1),
        "median_ms": round(statistics.median(walls[1:]), 1),
        "cpu_ms": round(statistics.median(processors[1:]), 1),
        "bytes": size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=500)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--after", type=float, default=1.0, help="seconds from the start to the first view")
    parser.add_argument("--store", type=Path, help="keep the store here, or use the one that is there")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = given.store or Path(temporary) / "store"
        if not root.exists():
            fill(root, given.models, given.layers)
        with opened(root) as http:
            http.get("/ui/login")  # Jinja is imported by the first page
            time.sleep(given.after)
            paths = ("/", "/?sort=own", "/ui/lineage", "/ui/models/org/model-0", "/ui/models/org/model-7")
            views = {path: timed(http, path, given.rounds) for path in paths}
    report = {"models": given.models, "layers": given.layers, "views": views, "load_average": os.getloadavg()[0]}
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
