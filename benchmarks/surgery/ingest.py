"""Measure the speed and memory of `zoo ingest`, against copying and BLAKE3-hashing the same files on the same disk.

    python -m benchmarks.surgery.ingest [--gigabytes 4] [--pairs 3] [--folder DIR] [--output FILE]

Makes a random Llama-shaped checkpoint (bf16, sharded), then alternates three runs, each in its own process and from a
cold page cache: the ingest, a copy + hash that is flushed to disk at its end (as an ingest is), and one that is not.
Reported are seconds, bytes per second, ratios with their spread over the pairs, and the ingest's peak memory as counted
by the kernel. Needs no torch.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from zoo.objects.headers import make_header

HIDDEN, WIDE, VOCAB, HEADS = 4096, 11008, 32000, 32
SHARD_BYTES = 1_000_000_000
CHUNK = 8 << 20
PACKAGES = ("blake3", "safetensors", "sqlalchemy")

INGEST = "import sys; from cli.app import main; main(sys.argv[1:])"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the generated checkpoint, in bf16."""

    key: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        count = 2
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True, slots=True)
class IngestRun:
    """The result of one process: wall-clock seconds, and its peak resident bytes."""

    seconds: float
    peak_rss_bytes: int


def layer_tensors(layer: int) -> list[Tensor]:
    """Return the tensors of one layer."""
    at = f"model.layers.{layer}."
    square = [Tensor(f"{at}self_attn.{name}_proj.weight", (HIDDEN, HIDDEN)) for name in "qkvo"]
    wide = [Tensor(f"{at}mlp.{name}_proj.weight", (WIDE, HIDDEN)) for name in ("gate", "up")]
    norms = [Tensor(f"{at}{name}_layernorm.weight", (HIDDEN,)) for name in ("input", "post_attention")]
    return [*square, *wide, Tensor(f"{at}mlp.down_proj.weight", (HIDDEN, WIDE)), *norms]


def all_tensors(layers: int) -> list[Tensor]:
    """Return the tensors of a Llama with `layers` layers."""
    table = (VOCAB, HIDDEN)
    body = [tensor for layer in range(layers) for tensor in layer_tensors(layer)]
    return [
        Tensor("model.embed_tokens.weight", table),
        *body,
        Tensor("model.norm.weight", (HIDDEN,)),
        Tensor("lm_head.weight", table),
    ]


def layers_for(nbytes: int) -> int:
    """Return the number of layers of a checkpoint of about `nbytes` bytes."""
    fixed = sum(tensor.nbytes for tensor in all_tensors(0))
    return max(1, round((nbytes - fixed) / sum(tensor.nbytes for tensor in layer_tensors(0))))


def make_checkpoint(folder: Path, nbytes: int) -> int:
    """Write shards of random bytes, the index and the config. Return the bytes of all weights."""
    folder.mkdir(parents=True)
    layers = layers_for(nbytes)
    shards = list(_grouped(all_tensors(layers)))
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_shard(folder / name, shard)
    table = {tensor.key: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
    total = sum(tensor.nbytes for shard in shards for tensor in shard)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": table})
    )
    (folder / "config.json").write_text(json.dumps(_config(layers)))
    return total


def _grouped(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    for tensor in tensors:
        if group and sum(one.nbytes for one in group) + tensor.nbytes > SHARD_BYTES:
            yield group
            group = []
        group.append(tensor)
    yield group


def _write_shard(path: Path, shard: list[Tensor]) -> None:
    with path.open("wb") as file:
        file.write(make_header([(tensor.key, "BF16", tensor.shape) for tensor in shard], {"format": "pt"}))
        left = sum(tensor.nbytes for tensor in shard)
        while left:
            left -= file.write(os.urandom(min(left, CHUNK)))


def _config(layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_attention_heads": HEADS,
        "num_hidden_layers": layers,
        "num_key_value_heads": HEADS,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB,
    }


def copy_and_hash(source: Path, target: Path, flush: bool) -> None:
    """Copy and hash every file in chunks, with all cores for the hash. This is the reference for the ingest."""
    from blake3 import blake3

    target.mkdir()
    for path in sorted(source.iterdir()):
        hasher = blake3(max_threads=blake3.AUTO)
        with path.open("rb", buffering=0) as read, (target / path.name).open("wb", buffering=0) as write:
            while chunk := read.read(CHUNK):
                hasher.update(chunk)
                write.write(chunk)
            if flush:
                os.fsync(write.fileno())


def run(command: list[str], source: Path) -> IngestRun:
    """Run one process from a cold cache. Raises SystemExit with its errors if it fails."""
    os.sync()
    for path in source.iterdir():
        _forget(path)
    with tempfile.TemporaryFile() as errors:
        begin = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        _, status, usage = os.wait4(child.pid, 0)
        seconds = time.perf_counter() - begin
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            errors.seek(0)
            raise SystemExit(f"{command[:4]} failed: {errors.read().decode(errors='replace')[-2000:]}")
    return IngestRun(seconds, usage.ru_maxrss * 1024)


def _forget(path: Path) -> None:
    """Drop a file's clean pages, so that every run reads the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def ingest_run(source: Path, folder: Path) -> IngestRun:
    store = folder / "store"
    done = run([sys.executable, "-c", INGEST, "ingest", str(source), "--store", str(store), "--json"], source)
    shutil.rmtree(store)
    return done


def copy_run(source: Path, folder: Path, flush: bool) -> IngestRun:
    target = folder / "copy"
    done = run(
        [
            sys.executable,
            "-m",
            "benchmarks.surgery.ingest",
            "--copy",
            str(source),
            str(target),
            "flush" if flush else "no-flush",
        ],
        source,
    )
    shutil.rmtree(target)
    return done


def measure(source: Path, folder: Path, pairs: int) -> dict[str, list[IngestRun]]:
    """Alternate the three runs, so that a change of the machine's speed affects all alike."""
    runs: dict[str, list[IngestRun]] = {"ingest": [], "copy_hash_flushed": [], "copy_hash": []}
    for _ in range(pairs):
        runs["ingest"].append(ingest_run(source, folder))
        runs["copy_hash_flushed"].append(copy_run(source, folder, flush=True))
        runs["copy_hash"].append(copy_run(source, folder, flush=False))
    return runs


def report(runs: dict[str, list[IngestRun]], total: int) -> dict[str, Any]:
    """Return all figures. A ratio is the ingest's speed over the reference's, pair by pair."""
    ingest = runs["ingest"]
    return {
        "bytes": total,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in PACKAGES},
        "cores": os.cpu_count(),
        "runs": {name: [asdict(one) for one in all_runs] for name, all_runs in runs.items()},
        "gigabytes_per_second": {
            name: _spread([total / one.seconds / 1e9 for one in all_runs]) for name, all_runs in runs.items()
        },
        "speed_of_copy_hash_flushed": _spread(
            [b.seconds / a.seconds for a, b in zip(ingest, runs["copy_hash_flushed"], strict=True)]
        ),
        "speed_of_copy_hash": _spread([b.seconds / a.seconds for a, b in zip(ingest, runs["copy_hash"], strict=True)]),
        "peak_rss_bytes": max(one.peak_rss_bytes for one in ingest),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def show(document: dict[str, Any]) -> None:
    """Print the figures on standard error."""
    for name, speed in document["gigabytes_per_second"].items():
        print(f"{name:20} {speed['median']:6.2f} GB/s  ({speed['least']:.2f} to {speed['most']:.2f})", file=sys.stderr)
    for name in ("speed_of_copy_hash_flushed", "speed_of_copy_hash"):
        ratio = document[name]
        print(f"{name:28} x {ratio['median']:.2f}  ({ratio['least']:.2f} to {ratio['most']:.2f})", file=sys.stderr)
    print(f"peak memory of the ingest    {document['peak_rss_bytes'] / 1e6:.0f} MB", file=sys.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=4.0, help="size of the checkpoint")
    parser.add_argument("--pairs", type=int, default=3, help="how often the runs alternate")
    parser.add_argument("--folder", type=Path, default=Path(), help="where to work; needs about three times the size")
    parser.add_argument("--output", type=Path, help="write the JSON report here instead of standard output")
    parser.add_argument("--copy", nargs=3, metavar=("SOURCE", "TARGET", "FLUSH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.copy:
        source, target, flush = options.copy
        return copy_and_hash(Path(source), Path(target), flush == "flush")
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="ingest-") as name:
        folder = Path(name).resolve()
        total = make_checkpoint(folder / "checkpoint", round(options.gigabytes * 1e9))
        document = report(measure(folder / "checkpoint", folder, options.pairs), total)
    show(document)
    text = json.dumps(document, indent=2) + "\n"
    if options.output:
        options.output.write_text(text)
    else:
        sys.stdout.write(text)
    return None


if __name__ == "__main__":
    main()
