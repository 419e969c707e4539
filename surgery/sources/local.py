"""A local folder as a source: Hugging Face's layout (one or several safetensors files) and PEFT's.

Everything that headers, the index and the configs show is checked here; no tensor is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from surgery.sources.base import FileTensor, Source, SourceWeights
from surgery.sources.folder import Folder, look, plain_name
from surgery.sources.strict_json import CONFIG_LIMIT, INDEX_LIMIT, parse_object
from zoo.errors import MalformedCheckpoint, UnsafeCheckpoint
from zoo.objects.headers import read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER = "adapter_model.safetensors"
PICKLES = ("pytorch_model.bin", "pytorch_model.bin.index.json")
#: Files of the adapters library: the adapter, and a head that may be saved with it.
BOTTLENECK, HEAD = "adapter.safetensors", "model_head.safetensors"
#: Pickled adapter -> the safetensors file that replaces it.
HEAD_PICKLE = "pytorch_model_head.bin"
ADAPTER_PICKLES = {"adapter_model.bin": ADAPTER, "pytorch_adapter.bin": BOTTLENECK, HEAD_PICKLE: HEAD}
SHARDS_LIMIT = 10_000


def open_local(folder: Path, allow_pickle: bool = False) -> Source:
    """Parse a folder in Hugging Face's or PEFT's layout.

    Args:
        folder: The checkpoint's own folder. If it has several formats, safetensors is used, a single file before
            shards.
        allow_pickle: Read `*.bin` if there is nothing else, with torch's restricted loader, and store it as
            safetensors.

    Raises:
        UnsafeCheckpoint: There are only pickles, a link leaves the folder, or the index names something outside.
        MalformedCheckpoint: Anything broken, missing or contradictory.
    """
    here = look(folder)
    origin = str(here.root)
    config = _config(here, "config.json")
    adapter = _config(here, "adapter_config.json")
    if adapter is not None and (
        config is None or any(here.has(name) for name in (ADAPTER, BOTTLENECK, *ADAPTER_PICKLES))
    ):
        return _adapter(here, origin, config, adapter, allow_pickle)
    if config is None:
        raise MalformedCheckpoint(
            f"{folder} holds no config.json and no adapter_config.json: not a checkpoint's folder"
        )
    if here.has(SINGLE):
        return _source(here, origin, config, None, [_weights(here, SINGLE)])
    if here.has(INDEX):
        return _source(here, origin, config, None, _shards(here))
    if any(here.has(name) for name in PICKLES):
        return _from_pickles(here, origin, config, None, allow_pickle)
    raise MalformedCheckpoint(f"{folder} holds a config.json but no {SINGLE} and no {INDEX}")


#: Beside an adapter of the adapters library: shows that a head was saved with it.
_HEAD_MARK = "head_config.json"


def _adapter(
    here: Folder, origin: str, config: dict[str, Any] | None, adapter: dict[str, Any], allow_pickle: bool
) -> Source:
    if here.has(ADAPTER):
        return _source(here, origin, config, adapter, [_weights(here, ADAPTER)])
    if here.has(_HEAD_MARK) and not here.has(HEAD if here.has(BOTTLENECK) else HEAD_PICKLE):
        raise MalformedCheckpoint(
            f"{here.root} holds a {_HEAD_MARK}, but not the head that it speaks of in the adapter's own format"
        )
    if here.has(BOTTLENECK):
        return _source(
            here, origin, config, adapter, [_weights(here, name) for name in (BOTTLENECK, HEAD) if here.has(name)]
        )
    if any(here.has(name) for name in ADAPTER_PICKLES):
        return _from_pickles(here, origin, config, adapter, allow_pickle)
    raise MalformedCheckpoint(f"{here.root} holds an adapter_config.json but neither {ADAPTER} nor {BOTTLENECK}")


def _from_pickles(
    here: Folder, origin: str, config: dict[str, Any] | None, adapter: dict[str, Any] | None, allow_pickle: bool
) -> Source:
    if not allow_pickle:
        raise UnsafeCheckpoint(
            "the weights are pickled (*.bin), which can run code when loaded; convert them to safetensors, "
            "or allow torch's restricted loader with --allow-pickle"
        )
    from surgery.sources.pickled import open_pickles

    return open_pickles(here, origin, config, adapter)


def _source(
    here: Folder,
    origin: str,
    config: dict[str, Any] | None,
    adapter: dict[str, Any] | None,
    weights: Sequence[SourceWeights],
) -> Source:
    taken = frozenset(one.path for one in weights)
    return Source(origin, config, adapter, tuple(weights), here.sides(taken), left_out_note(here, taken))


def left_out_note(here: Folder, taken: frozenset[str]) -> tuple[str, ...]:
    """Return one line that names the files in the folder that were not ingested; empty if there are none."""
    rest = [path for path in here.left_out if path not in taken]
    if not rest:
        return ()
    shown = ", ".join(rest[:3]) + (", ..." if len(rest) > 3 else "")
    return (f"left out, not part of the checkpoint: {shown} ({len(rest)} files)",)


def _config(here: Folder, name: str) -> dict[str, Any] | None:
    return parse_object(here.read(name, CONFIG_LIMIT), name) if here.has(name) else None


def _weights(here: Folder, name: str) -> SourceWeights:
    path = here.locate(name)
    header = read_header(path)
    tensors = tuple(
        FileTensor(entry.key, entry.dtype, entry.shape, entry.end - entry.begin, path, entry.begin)
        for entry in header.entries
    )
    if not tensors:
        raise MalformedCheckpoint(f"{name} holds no tensors")
    return SourceWeights(name, header.raw, tensors)


def _shards(here: Folder) -> list[SourceWeights]:
    """Return all shards of an index that agrees with their headers key by key."""
    promised = read_index(here, INDEX)
    names = sorted(set(promised.values()))
    shards = [_weights(here, name) for name in names if _is_safetensors(name)]
    held = _by_key((tensor.key, shard.path) for shard in shards for tensor in shard.tensors)
    for key in promised.keys() | held.keys():
        if promised.get(key) != held.get(key):
            raise MalformedCheckpoint(_disagreement(key, promised.get(key), held.get(key)))
    return shards


def read_index(here: Folder, name: str) -> dict[str, str]:
    """Return the `weight_map` of an index: key -> plain file name.

    Raises:
        MalformedCheckpoint: No usable map, or too many files.
        UnsafeCheckpoint: A name that is not a plain file name.
    """
    table = parse_object(here.read(name, INDEX_LIMIT), name, INDEX_LIMIT).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise MalformedCheckpoint(f"{name} has no weight_map")
    promised = {key: plain_name(file) for key, file in table.items()}
    if len(set(promised.values())) > SHARDS_LIMIT:
        raise MalformedCheckpoint(f"{name} names more than {SHARDS_LIMIT} files")
    return promised


def _is_safetensors(name: str) -> bool:
    if not name.endswith(".safetensors"):
        raise MalformedCheckpoint(f"{INDEX} names {name!r}, which is not a safetensors file")
    return True


def _by_key(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, path in pairs:
        if key in found:
            raise MalformedCheckpoint(f"tensor {key!r} lies in both {found[key]} and {path}")
        found[key] = path
    return found


def _disagreement(key: str, promised: str | None, held: str | None) -> str:
    if held is None:
        return f"{INDEX} promises {key!r} in {promised}, which does not hold it"
    if promised is None:
        return f"{held} holds {key!r}, which {INDEX} does not know"
    return f"{INDEX} promises {key!r} in {promised}, but it lies in {held}"
