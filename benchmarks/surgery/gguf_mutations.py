"""Read mutated GGUF files: each must give one clear line or a valid read, in bounded memory.

    python -m benchmarks.surgery.gguf_mutations [--files 10000] [--seed 0] [--json]

Small files of two kinds (SentencePiece and byte-level vocabulary) are mutated: bytes flipped, numbers of the header and
of the tensor table replaced by extreme ones, slices removed, doubled or inserted, ends cut off. Each goes the way of an
ingest: header, config, tokenizer, checks against the config, and every tensor dequantised. Counted are refusals, valid
reads, refusals that are not one line of a `ZooError`, and the growth of the process's resident memory during one file,
as counted by the kernel.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from surgery.ingest.draft import draft
from surgery.sources.gguf.header import read_gguf
from surgery.sources.gguf.source import open_gguf
from zoo.errors import ZooError
from zoo.store import Store

HIDDEN, LAYERS = 64, 2
#: Growth of the resident memory that one file may cause, in bytes.
ALLOWED_BYTES = 100 << 20
_EXTREMES = (0, 1, 2, 3, 31, 255, 1 << 15, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63)
_LARGEST = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class MutationReport:
    """Result of a run.

    Fields:
        unclear: Failures that are not one line of a ZooError.
        growth_bytes_max: Largest growth of the resident memory during one file; 0 where the kernel does not count it.
        reasons: The most frequent refusals, without the numbers in them.
    """

    files: int
    refused: int
    read: int
    unclear: tuple[str, ...]
    growth_bytes_max: int
    seconds_max: float
    reasons: tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class Original:
    """A sound file: its bytes, where its header ends, and where its tensor table begins."""

    data: bytes
    header: int
    table: int


def write_originals(folder: Path) -> list[Original]:
    """Write sound files of both kinds of vocabulary, and return them."""
    found = []
    for name, byte_level in (("spaced", False), ("bytes", True)):
        path = folder / f"{name}.gguf"
        _write_model(path, byte_level)
        header = read_gguf(path)
        table = sum(24 + len(entry.name) + 8 * len(entry.shape) for entry in header.entries)
        found.append(Original(path.read_bytes(), len(header.raw), max(24, len(header.raw) - table - 32)))
    return found


def _write_model(path: Path, byte_level: bool) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(2 * HIDDEN)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // 4)
    letters = [chr(number) for number in range(ord("a"), ord("z") + 1)]
    tokens = ["<unk>", "<s>", "</s>", *letters, "th", "the"]
    writer.add_tokenizer_model("gpt2" if byte_level else "llama")
    writer.add_token_list(tokens)
    writer.add_token_types([2, 3, 3, *[1] * (len(tokens) - 3)])
    if byte_level:
        writer.add_tokenizer_pre("llama-bpe")
        writer.add_token_merges(["t h", "th e"])
        writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    else:
        writer.add_token_scores([float(-number) for number in range(len(tokens))])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    made = np.random.default_rng(0)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"blk.{layer}.{name}": (HIDDEN, HIDDEN) for name in ("attn_q", "attn_output")}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN // 2, HIDDEN) for name in ("attn_k", "attn_v")}
        shapes |= {f"blk.{layer}.{name}": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        shapes |= {f"blk.{layer}.{name}": (2 * HIDDEN, HIDDEN) for name in ("ffn_gate", "ffn_up")}
        shapes[f"blk.{layer}.ffn_down"] = (HIDDEN, 2 * HIDDEN)
    kinds = [gguf.GGMLQuantizationType[name] for name in ("Q4_0", "Q8_0", "Q5_1", "BF16", "Q4_1")]
    for number, (name, shape) in enumerate(shapes.items()):
        values = made.standard_normal(shape, dtype=np.float32)
        kind = kinds[number % len(kinds)]
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", values)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mutate_file(original: Original, chance: random.Random) -> bytes:
    """Return the file's bytes with one to three mutations."""
    data = bytearray(original.data)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        chance.choice(_MUTATIONS)(data, original, chance)
    return bytes(data)


def _place(data: bytearray, original: Original, chance: random.Random) -> int:
    """Return an offset: mostly in the header, often in its counts or in the tensor table."""
    lo, hi = chance.choice(((0, original.header), (4, 24), (original.table, original.header), (0, len(data))))
    return chance.randrange(lo, max(lo + 1, min(hi, len(data))))


def _flip_bytes(data: bytearray, original: Original, chance: random.Random) -> None:
    for _ in range(chance.randint(1, 8)):
        at = _place(data, original, chance)
        if at < len(data):
            data[at] ^= 1 << chance.randrange(8)


def _replace_number(data: bytearray, original: Original, chance: random.Random) -> None:
    at = _place(data, original, chance)
    value = chance.choice((*_EXTREMES, _LARGEST, len(data), len(data) - at, original.header, chance.randrange(1 << 20)))
    width = chance.choice((4, 8))
    data[at : at + width] = struct.pack("<Q", value & _LARGEST)[:width]


def _nudge_number(data: bytearray, original: Original, chance: random.Random) -> None:
    at = _place(data, original, chance)
    if at + 8 <= len(data):
        (value,) = struct.unpack_from("<Q", data, at)
        data[at : at + 8] = struct.pack("<Q", (value + chance.choice((-32, -1, 1, 32))) & _LARGEST)


def _cut_end(data: bytearray, original: Original, chance: random.Random) -> None:
    del data[_place(data, original, chance) :]


def _remove_slice(data: bytearray, original: Original, chance: random.Random) -> None:
    at = _place(data, original, chance)
    del data[at : at + chance.choice((1, 4, 8, 32, 256))]


def _double_slice(data: bytearray, original: Original, chance: random.Random) -> None:
    at = _place(data, original, chance)
    data[at:at] = data[at : at + chance.choice((1, 8, 64, 1024))]


def _append_bytes(data: bytearray, original: Original, chance: random.Random) -> None:
    data += chance.randbytes(chance.choice((1, 31, 32, 4096)))


_MUTATIONS: Sequence[Callable[[bytearray, Original, random.Random], None]] = (
    *(_flip_bytes, _flip_bytes, _replace_number, _replace_number, _replace_number, _nudge_number),
    *(_cut_end, _remove_slice, _double_slice, _append_bytes),
)


def read_mutated(files: int, seed: int, folder: Path) -> MutationReport:
    """Mutate and read `files` files, below a folder that is empty."""
    chance = random.Random(seed)
    originals = write_originals(folder)
    path = folder / "mutated.gguf"
    refused, unclear = Counter[str](), []
    growth, slowest = 0, 0.0
    with Store.open(folder / "store") as store:
        _read_model(store, folder / "bytes.gguf")  # imports and tables belong to the baseline
        _read_model(store, folder / "spaced.gguf")
        for number in range(files):
            path.write_bytes(mutate_file(chance.choice(originals), chance))
            before, started = _reset_peak(), time.monotonic()
            try:
                _read_model(store, path)
            except ZooError as error:
                line = str(error)
                refused["".join("#" if char.isdigit() else char for char in line)[:70]] += 1
                if not line or not line.isprintable() or len(line) > 500:
                    unclear.append(f"file {number}: {line[:200]!r}")
            except Exception as error:  # what this run is for
                unclear.append(f"file {number}: {type(error).__name__}: {str(error)[:200]}")
            slowest = max(slowest, time.monotonic() - started)
            growth = max(growth, _resident("VmHWM") - before)
    total = sum(refused.values())
    read = files - total - sum(1 for each in unclear if "Error" in each)
    return MutationReport(files, total, read, tuple(unclear), growth, slowest, tuple(refused.most_common(12)))


def _read_model(store: Store, path: Path) -> None:
    """Go the way of an ingest, without writing. Raises ZooError."""
    source = open_gguf(path)
    draft(store, source, None)
    for tensor in (*source.file_tensors(), *source.tensors()):
        assert sum(memoryview(chunk).nbytes for chunk in tensor.chunks(1 << 20)) == tensor.nbytes


def _reset_peak() -> int:
    """Make the kernel count the peak anew, and return the resident bytes."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmRSS")


def _resident(field: str) -> int:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:")), 0)


def main() -> None:
    """Run, print, and exit with 1 if a file was not refused clearly or took too much memory."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        report = read_mutated(options.files, options.seed, Path(folder))
    if options.json:
        print(json.dumps(asdict(report), indent=2))
    else:
        print(f"{report.files:,} files: {report.refused:,} refused in one line, {report.read:,} read")
        print(f"largest growth of memory {report.growth_bytes_max / 1e6:.1f} MB, slowest {report.seconds_max:.2f} s")
        for reason, count in report.reasons:
            print(f"  {count:6,}  {reason}")
        for failure in report.unclear[:20]:
            print(f"UNCLEAR {failure}")
    sys.exit(1 if report.unclear or report.growth_bytes_max > ALLOWED_BYTES else 0)


if __name__ == "__main__":
    main()
