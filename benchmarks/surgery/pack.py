"""Measure what `zoo pack` saves on fine-tunes, and the cost of loading packed models against the same store unpacked.

    python -m benchmarks.surgery.pack BASE FINE_TUNE [FINE_TUNE ...] [--dtypes bfloat16 float32] [--pairs 7]
        [--folder DIR] [--output FILE]
    python -m benchmarks.surgery.pack --moved 0.1 0.01 --dtypes bfloat16

BASE and the FINE_TUNEs are checkpoint folders. With `--moved`, the base is a random model of 194 M parameters, and each
fine-tune adds noise of that share of each matrix's size (the demo's fine-tunes moved by 0.1, at a large learning rate).

For each dtype they are cast, ingested, and packed in a copy of the store. The copy is verified, and every export from
it compared with its checkpoint. Loads alternate between the two stores: `load` is `zoo.model(name).load()`, `read` only
the store's part, both touching every byte; warm, and cold with the files dropped from the page cache. Each load opens
the store anew, so that every object is verified again.

Ratios are packed over plain, pair by pair, with median and spread, of wall-clock (`wall`) and CPU seconds (`cpu`); the
latter are less affected by other load. `codings` has the results of other methods and levels.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from surgery.tensors.pool import stored_tensors
from zoo import Zoo
from zoo.packed.pack import pack
from zoo.packed.writer import Coding

PACKAGES = ("torch", "transformers", "zstandard", "numpy", "blake3")
CODINGS = [Coding(level=level, delta=delta) for delta in ("difference", "xor") for level in (1, 9)]


def cast(source: Path, target: Path, dtype: str) -> Path:
    """Copy a checkpoint with its floating-point weights in another dtype."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            kind = getattr(torch, dtype)
            tensors = {
                key: tensor.to(kind) if tensor.is_floating_point() else tensor
                for key, tensor in load_file(path).items()
            }
            save_file(tensors, target / path.name, {"format": "pt"})
        elif path.is_file():
            shutil.copyfile(path, target / path.name)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "dtype": dtype}))
    return target


def moved(folder: Path, shares: Sequence[float]) -> list[Path]:
    """Make a random model and copies of it with noise; return their folders, the model first.

    It is large enough for weights to dominate the time of loading.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=10,
            num_attention_heads=16,
            tie_word_embeddings=False,
        )
    )
    model.save_pretrained(folder / "base")
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    for share in shares:
        noise = {key: torch.randn_like(value) * value.square().mean().sqrt() * share for key, value in weights.items()}
        model.load_state_dict({key: value + noise[key] for key, value in weights.items()})
        model.save_pretrained(folder / f"moved-{share:g}")
    return [folder / "base", *(folder / f"moved-{share:g}" for share in shares)]


def filled(store: Path, base: Path, fine_tunes: Sequence[Path]) -> None:
    with Zoo(store) as zoo:
        zoo.ingest(base, "base")
        for folder in fine_tunes:
            zoo.ingest(folder, folder.name, base="base")


def load(store: Path, name: str) -> None:
    """Load a model through the public interface and touch every weight."""
    with Zoo(store, create=False) as zoo:
        touch(zoo.model(name).load().state_dict().values())


def read(store: Path, name: str) -> None:
    """Read a model's tensors from the store and touch every byte."""
    with Zoo(store, create=False) as zoo:
        touch(stored_tensors(zoo.store, [tensor.digest for tensor in zoo.model(name).manifest.tensors]))


def touch(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.view(-1).view(torch.uint8).max()


def forget(store: Path) -> None:
    """Drop a store's clean pages, so that the next run reads the disk."""
    gc.collect()
    for path in store.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@dataclass(frozen=True, slots=True)
class Took:
    """Wall-clock seconds, and CPU seconds over all threads."""

    wall: float
    cpu: float


def timed(job: Callable[[Path, str], None], store: Path, name: str, cold: bool) -> Took:
    if cold:
        forget(store)
    wall, cpu = time.perf_counter(), time.process_time()
    job(store, name)
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def alternated(plain: Path, packed: Path, names: Sequence[str], pairs: int) -> dict[str, Any]:
    """Time plain and packed in turn; the order changes from pair to pair."""
    found: dict[str, Any] = {}
    for what, job in (("load", load), ("read", read)):
        for cold in (False, True):
            taken: dict[Path, list[Took]] = {plain: [], packed: []}
            for number in range(-1, pairs):  # the first pair is a warm-up
                name = names[number % len(names)]
                for store in (plain, packed) if number % 2 else (packed, plain):
                    took = timed(job, store, name, cold)
                    if number >= 0:
                        taken[store].append(took)
            found[f"{what}_{'cold' if cold else 'warm'}"] = _compared(taken[plain], taken[packed])
    return found


def _compared(plain: list[Took], packed: list[Took]) -> dict[str, Any]:
    return {
        "wall": _ratio([took.wall for took in plain], [took.wall for took in packed]),
        "cpu": _ratio([took.cpu for took in plain], [took.cpu for took in packed]),
    }


def _ratio(plain: list[float], packed: list[float]) -> dict[str, Any]:
    ratios = [mine / theirs for mine, theirs in zip(packed, plain, strict=True)]
    return {
        "plain_seconds": statistics.median(plain),
        "packed_seconds": statistics.median(packed),
        "ratio": {"median": statistics.median(ratios), "min": min(ratios), "max": max(ratios)},
    }


def codings(store: Path, measured: Sequence[Coding]) -> list[dict[str, Any]]:
    """Return what each coding would save, and how long it takes."""
    rows = []
    with Zoo(store, create=False) as zoo:
        for coding in measured:
            report = pack(zoo.store, coding=coding, dry_run=True)
            share = report.bytes_after / report.bytes_before
            rows.append({"delta": coding.delta, "level": coding.level, "left": share, "seconds": report.seconds})
    return rows


def by_model(plain: Path, packed: Path, names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Return the bytes on disk of what each fine-tune does not share with its base."""
    rows = {}
    with Zoo(plain, create=False) as one, Zoo(packed, create=False) as other:
        shared = {tensor.digest for tensor in one.model("base").manifest.tensors}
        for name in names:
            own = [tensor.digest for tensor in one.model(name).manifest.tensors if tensor.digest not in shared]
            before, after = (sum(zoo.store.objects.size(digest) for digest in own) for zoo in (one, other))
            rows[name] = {
                "objects": len(own),
                "plain_bytes": before,
                "packed_bytes": after,
                "saved": 1 - after / before,
            }
    return rows


def check_exports(store: Path, folders: Sequence[Path], scratch: Path) -> None:
    """Check that every export equals its checkpoint, byte for byte."""
    with Zoo(store, create=False) as zoo:
        for folder in folders:
            zoo.model(folder.name).export(scratch / folder.name)
            for path in folder.iterdir():
                assert (scratch / folder.name / path.name).read_bytes() == path.read_bytes(), path


def measure(base: Path, fine_tunes: Sequence[Path], dtype: str, pairs: int, folder: Path) -> dict[str, Any]:
    checkpoints = [cast(one, folder / "checkpoints" / one.name, dtype) for one in (base, *fine_tunes)]
    plain, packed = folder / "plain", folder / "packed"
    filled(plain, checkpoints[0], checkpoints[1:])
    shutil.copytree(plain, packed)
    names = [one.name for one in fine_tunes]
    with Zoo(packed, create=False) as zoo:
        report = zoo.pack()
        audit = zoo.verify()
        usage = zoo.store.usage()
    with Zoo(plain, create=False) as zoo:
        before = zoo.store.usage().bytes_stored
    check_exports(packed, checkpoints[1:], folder / "exports")
    return {
        "dtype": dtype,
        "models": by_model(plain, packed, names),
        "pack": {"packed": report.packed, "skipped": report.skipped, "seconds": report.seconds},
        "store": {"plain_bytes": before, "packed_bytes": usage.bytes_stored, "damaged": len(audit.damaged)},
        "codings": codings(plain, CODINGS),
        "times": alternated(plain, packed, names, pairs),
    }


def show(result: dict[str, Any]) -> None:
    store, done = result["store"], result["pack"]
    print(
        f"\n{result['dtype']}: store {store['plain_bytes']:,} -> {store['packed_bytes']:,} bytes, {store['damaged']} "
        "damaged"
    )
    print(f"  packed {done['packed']} objects, left {done['skipped']}, in {done['seconds']:.1f} s")
    for name, row in result["models"].items():
        print(
            f"  {name:<24} {row['plain_bytes']:>12,} -> {row['packed_bytes']:>12,} bytes of its own, "
            f"{row['saved']:.1%} less"
        )
    for row in result["codings"]:
        print(f"  {row['delta']:<12} level {row['level']}: {1 - row['left']:.1%} less, {row['seconds']:.2f} s")
    for what, kinds in result["times"].items():
        for kind, row in kinds.items():
            ratio = row["ratio"]
            times = f"plain {row['plain_seconds']:.3f} s, packed {row['packed_seconds']:.3f} s"
            print(
                f"  {what:<10} {kind:<4} {times}, ratio {ratio['median']:.2f} ({ratio['min']:.2f} to "
                f"{ratio['max']:.2f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("checkpoints", type=Path, nargs="*", help="the base, then its fine-tunes")
    parser.add_argument("--moved", type=float, nargs="+", default=[])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to work; a temporary folder by default")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if bool(options.moved) == (len(options.checkpoints) > 1):
        parser.error("give a base and its fine-tunes, or --moved")
    results = []
    for dtype in options.dtypes:
        with tempfile.TemporaryDirectory(dir=options.folder, prefix="zoo-pack-") as folder:
            base, *fine_tunes = moved(Path(folder) / "made", options.moved) if options.moved else options.checkpoints
            results.append(measure(base, fine_tunes, dtype, options.pairs, Path(folder)))
        show(results[-1])
    versions = {name: version(name) for name in PACKAGES}
    machine = {
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "threads": torch.get_num_threads(),
    }
    document = {"machine": machine, "versions": versions, "results": results}
    if options.output:
        options.output.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
