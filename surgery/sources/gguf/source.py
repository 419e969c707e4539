"""A GGUF file as a source: kept as it came for export, with the model's tensors dequantised for everything else."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surgery.sources.base import Source, SourceSide, SourceWeights
from surgery.sources.folder import Folder, look, real_file
from surgery.sources.gguf.header import GgufEntry, GgufHeader, read_gguf
from surgery.sources.gguf.models import ROPE_FACTORS, GgufModel, describe_model
from surgery.sources.gguf.tensors import (
    DequantisedTensor,
    StoredDtype,
    check_package,
    read_floats,
    span_tensor,
)
from surgery.sources.gguf.tokenizer import convert_vocabulary
from surgery.sources.local import left_out_note
from zoo.errors import InputError, MalformedCheckpoint

SUFFIX = ".gguf"
#: transformers' names of the dtypes in which dequantised tensors can be stored; the first is its own choice.
DTYPES: Mapping[str, StoredDtype] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_ROPE_FACTORS_MOST = 1 << 12


def open_gguf(path: Path, dtype: str | None = None) -> Source:
    """Parse a GGUF file by itself. Its folder plays no part.

    Args:
        dtype: transformers' name of the dtype in which the tensors are stored; None for float32.

    Raises:
        MalformedCheckpoint: The file is broken, or its parts contradict each other.
        UnknownFamily: Its architecture is not read here.
        InputError: Another dtype, a file that is no whole model, or the package `gguf` is not installed.
    """
    return _source(path.resolve(), str(path.resolve()), _dtype(dtype), None)


def open_gguf_folder(folder: Path, name: str | None = None, dtype: str | None = None) -> Source:
    """Parse the GGUF file of a folder, and take the texts beside it along.

    Args:
        name: The file, if there are several.

    Raises:
        MalformedCheckpoint: There is no such file, or as `open_gguf`.
        InputError: There are several files, or as `open_gguf`.
        UnsafeCheckpoint: A link leaves the folder.
    """
    here = look(folder)
    names = find_gguf(here.left_out)
    if name is None and len(names) > 1:
        raise InputError(f"{folder} holds several GGUF files: say which with --file ({', '.join(names[:5])})")
    if not names or (name is not None and name not in names):
        raise MalformedCheckpoint(f"{folder} holds no {name or 'GGUF file'} at its top")
    return _source(real_file(here.root, name or names[0]), str(here.root), _dtype(dtype), here, name or names[0])


def find_gguf(paths: tuple[str, ...]) -> list[str]:
    """Return the GGUF files at the top of a folder or repository, by their names."""
    return sorted(path for path in paths if "/" not in path and path.lower().endswith(SUFFIX))


def _dtype(name: str | None) -> StoredDtype:
    if name is not None and name not in DTYPES:
        raise InputError(f"tensors of a GGUF file can be stored as {', '.join(DTYPES)}, not {name[:40]!r}")
    return DTYPES[name or "float32"]


def _source(path: Path, origin: str, dtype: StoredDtype, here: Folder | None, name: str | None = None) -> Source:
    check_package()
    header = read_gguf(path)
    called = name or path.name
    try:
        model = describe_model(header, _rope_factors(header, path))
        keys = {entry.name: model.key_of(entry) for entry in header.entries}
        tokenizer = convert_vocabulary(
            header.metadata, model.config["vocab_size"], model.config["max_position_embeddings"]
        )
    except MalformedCheckpoint as error:
        raise MalformedCheckpoint(f"{called}: {error}") from None
    config = {**model.config, "torch_dtype": next(ours for ours, theirs in DTYPES.items() if theirs == dtype)}
    derived = (*_config_sides(config, header.metadata), *tokenizer.sides)
    weights = SourceWeights(called, header.raw, tuple(span_tensor(entry, path) for entry in header.entries))
    replaced = frozenset(side.path for side in derived)
    return Source(
        origin,
        config,
        None,
        (weights,),
        (*derived, *(() if here is None else here.sides(replaced))),
        (*tokenizer.notes, *(() if here is None else _folder_notes(here, called, replaced))),
        tuple(
            _dequantised(model, entry, key, path, dtype)
            for entry in header.entries
            if (key := keys[entry.name]) is not None
        ),
    )


def _rope_factors(header: GgufHeader, path: Path) -> tuple[float, ...] | None:
    entry = next((entry for entry in header.entries if entry.name == ROPE_FACTORS), None)
    return None if entry is None else read_floats(entry, path, _ROPE_FACTORS_MOST)


def _dequantised(model: GgufModel, entry: GgufEntry, key: str, path: Path, dtype: StoredDtype) -> DequantisedTensor:
    return DequantisedTensor(key, dtype, entry, path, model.heads_of(entry), model.is_raised_norm(entry))


def _folder_notes(here: Folder, name: str, replaced: frozenset[str]) -> tuple[str, ...]:
    found = [path for path in here.files if path in replaced]
    ours = (f"left out, the GGUF file's own metadata are used: {', '.join(found)}",) if found else ()
    return (*ours, *left_out_note(here, frozenset({name})))


def _config_sides(config: Mapping[str, Any], metadata: Mapping[str, Any]) -> tuple[SourceSide, ...]:
    """Return `config.json` and `generation_config.json`; the latter has every token that ends an answer."""
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(end for end in ends if type(end) is int and 0 <= end < config["vocab_size"]))
    named = {key: config[key] for key in ("bos_token_id", "pad_token_id")}
    generation: dict[str, Any] = {key: value for key, value in named.items() if value is not None}
    if eos:
        generation["eos_token_id"] = eos[0] if len(eos) == 1 else eos
    return (
        SourceSide("config.json", _json(config), derived=True),
        SourceSide("generation_config.json", _json(generation), derived=True),
    )


def _json(document: Mapping[str, Any]) -> bytes:
    return (json.dumps(document, indent=2, sort_keys=True) + "\n").encode()
