"""Processes that tests start and kill: `python -m tests.zoo.children VERB STORE …`. They report on standard output."""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.zoo.factory import Bytes, ingest, some_bytes
from zoo.errors import StoreBusy
from zoo.store import Store
from zoo.upkeep.collect import collect


def ingest_for_ever(root: str, worker: str) -> None:
    """Ingest models that share tensors with each other, one after the other, until killed."""
    with Store.open(Path(root)) as store:
        print("ready", flush=True)
        for number in itertools.count():
            first = int(worker) * 1_000_000 + number * 5
            ingest(store, f"model-{worker}-{number}", [0, 1, 2, *range(first, first + 20)], size=20_000)
            print(number, flush=True)


def ingest_and_remove(root: str, worker: str, seconds: str) -> None:
    """Ingest and remove the same few tensors, so that they are orphans half of the time."""
    end = time.monotonic() + float(seconds)
    with Store.open(Path(root)) as store:
        print("ready", flush=True)
        for number in itertools.count():
            name = f"model-{worker}-{number}"
            manifest = ingest(store, name, [1, 2, 3, 4, 100 + number % 7])
            for tensor in manifest.tensors:
                store.open_tensor(tensor.digest)
            if time.monotonic() > end:
                return
            with store.catalog.writing() as writer:
                writer.remove_model(name)


def collect_for(root: str, seconds: str) -> None:
    """Collect repeatedly, then print how many objects were removed in all."""
    end = time.monotonic() + float(seconds)
    removed = 0
    with Store.open(Path(root)) as store:
        print("ready", flush=True)
        while time.monotonic() < end:
            try:
                removed += collect(store, timeout=1).objects_removed
            except StoreBusy:
                continue
    print(removed, flush=True)


def put(root: str, large: str) -> None:
    """Put the same tensors as the other processes."""
    with Store.open(Path(root)) as store, store.ingesting():
        print("ready", flush=True)
        sources = [some_bytes(seed, 30_000) for seed in range(60)]
        for one in store.objects.put_many([*sources, Bytes(bytes(int(large)))]):
            print(one.tensor.digest, flush=True)


VERBS: dict[str, Callable[..., None]] = {
    "ingest": ingest_for_ever,
    "churn": ingest_and_remove,
    "collect": collect_for,
    "put": put,
}

if __name__ == "__main__":
    VERBS[sys.argv[1]](*sys.argv[2:])
