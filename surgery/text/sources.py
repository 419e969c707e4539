"""Read documents from a text file, a JSONL file, a `datasets` name, or the sources of the standard library.

A document is a text, or the token ids of one. Bounded: no file over 1 GiB, no more than 256 MiB of a dataset. There is
no network access except by `datasets` itself, and no code from a dataset is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from surgery.text.library import EVERYTHING, SLICES, LibrarySlice, read_library
from zoo.errors import InputError

#: A text, or token ids for models without a tokenizer.
Document = str | tuple[int, ...]

_MAX_FILE = 1 << 30
_MAX_DATASET_CHARACTERS = 256 << 20
_HIGHEST_ID = (1 << 31) - 1
#: Minimum length, in characters, of the pieces of a plain text file, cut at ends of lines; whole documents are either
#: trained on or held out.
_PIECE = 4096
_DATASET = re.compile(r"(?P<path>[^:\[\]]+?)(:(?P<config>[^:\[\]]+))?(:(?P<split>[\w.+%-]+(\[[\d:%+\-]*\])?))?")
_LIBRARY = "library"


def library_slice(source: str | None) -> LibrarySlice | None:
    """Return the built-in text that a source names (None, `library`, `library:mail`), or None for any other source.

    Raises InputError for an unknown part.
    """
    if source is None or source == _LIBRARY:
        return read_library().slice(EVERYTHING)
    if not source.startswith(f"{_LIBRARY}:"):
        return None
    subject = source.removeprefix(f"{_LIBRARY}:")
    if subject not in SLICES:
        raise InputError(f"the built-in text has no part {subject[:80]!r}: its parts are {', '.join(SLICES)}")
    return read_library().slice(subject)


def read_documents(source: str) -> list[Document]:
    """Return the documents of a file or a dataset, without empty ones. Raises InputError."""
    if source.startswith("datasets:"):
        return _dataset_documents(source.removeprefix("datasets:"))
    path = Path(source).expanduser()
    if not path.exists() and not path.suffix and not source.startswith((".", "/", "~")):
        return _dataset_documents(source)
    return _file_documents(path, source)


# -------------------------------------------------------------------------------------------------------------- files


def _file_documents(path: Path, shown: str) -> list[Document]:
    text = _read(path, shown)
    if path.suffix in (".jsonl", ".ndjson"):
        return [
            document
            for number, line in enumerate(text.split("\n"), 1)
            for document in _line_documents(line, number, shown)
        ]
    return list(_pieces(text))


def _read(path: Path, shown: str) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)  # a device or a pipe has no known size
        if len(data) > _MAX_FILE:
            raise InputError(f"{shown} is larger than {_MAX_FILE >> 30} GiB: give a part of it")
        return data.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except FileNotFoundError:
        raise InputError(f"there is no file {shown}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{shown} is no UTF-8 text: byte {error.start} cannot be read") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{shown[:200]} cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of whole lines; a line is never cut, however long it is."""
    held: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        held.append(line)
        size += len(line)
        if size >= _PIECE:
            yield from _kept("".join(held))
            held, size = [], 0
    yield from _kept("".join(held))


def _line_documents(line: str, number: int, shown: str) -> Iterator[Document]:
    if not line.strip():
        return
    try:
        yield from _record_documents(json.loads(line))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{shown}, line {number}: {_reason(error)}") from None


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON ({error.msg})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


# ------------------------------------------------------------------------------------------------------------ records


def _record_documents(record: Any) -> Iterator[Document]:
    """Yield a record's text, conversation or token ids. Raises ValueError for a record that has none of them."""
    if isinstance(record, str):
        yield from _kept(record)
        return
    if not isinstance(record, Mapping):
        raise ValueError("neither a text nor an object")
    if "token_ids" in record:
        yield from filter(None, [_ids(record["token_ids"])])
    elif isinstance(record.get("text"), str):
        yield from _kept(record["text"])
    elif isinstance(turns := record.get("conversations", record.get("messages")), list):
        yield from _kept("\n".join(_turn(turn) for turn in turns))
    else:
        raise ValueError("no field `text`, `conversations`, `messages` or `token_ids`")


def _kept(text: str) -> Iterator[str]:
    if text.strip():
        yield text


def _ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(each, int) and not isinstance(each, bool) for each in value):
        raise ValueError("`token_ids` is no list of whole numbers")
    if any(not 0 <= each <= _HIGHEST_ID for each in value):
        raise ValueError("`token_ids` holds a number that can be no token")
    return tuple(value)


def _turn(turn: Any) -> str:
    said = turn.get("value", turn.get("content")) if isinstance(turn, Mapping) else None
    if not isinstance(said, str):
        raise ValueError("a turn of the conversation has neither `value` nor `content`")
    return said


# ----------------------------------------------------------------------------------------------------------- datasets


def _dataset_documents(name: str) -> list[Document]:
    """Return documents of `PATH[:CONFIG][:SPLIT]`; PATH is a hub id, with or without `/CONFIG`, or a folder."""
    parsed = _DATASET.fullmatch(name)
    if parsed is None:
        raise InputError(
            f"{name[:200]!r} is no dataset: it is written PATH[:CONFIG][:SPLIT], as in "
            "wikitext/wikitext-2-raw-v1:train[:1000]"
        )
    rows = _rows(parsed["path"], parsed["config"], parsed["split"] or "train", name)
    documents: list[Document] = []
    size = 0
    for number, row in enumerate(rows, 1):
        try:
            found = list(_record_documents(row))
        except ValueError as error:
            raise InputError(f"the dataset {name}, row {number}: {error}") from None
        documents += found
        size += sum(map(len, found))
        if size > _MAX_DATASET_CHARACTERS:
            break
    return documents


def _rows(path: str, config: str | None, split: str, name: str) -> Iterable[Any]:
    try:
        import datasets
    except ImportError:
        raise InputError("reading a dataset needs the package `datasets`: pip install 'blockzoo[eval]'") from None
    problem: Exception | None = None
    for place, chosen in _readings(path, config):
        try:
            return _load(datasets, place, chosen, split)
        except Exception as error:  # the library raises any error of its back ends: all mean that there are no rows
            problem = problem or error
    said = str(problem).strip().split("\n")[0][:300] or type(problem).__name__
    raise InputError(f"the dataset {name} cannot be read: {said}")


def _load(datasets: Any, path: str, config: str | None, split: str) -> Iterable[Any]:
    folder = Path(path)
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():  # written by save_to_disk
        saved = datasets.load_from_disk(path)
        return saved[split] if isinstance(saved, Mapping) else saved  # type: ignore[no-any-return]
    return datasets.load_dataset(path, config, split=split)  # type: ignore[no-any-return]


def _readings(path: str, config: str | None) -> Iterator[tuple[str, str | None]]:
    """Yield the readings of a path: `wikitext/wikitext-2-raw-v1` is a hub id, or else a config of `wikitext`."""
    yield path, config
    head, slash, tail = path.rpartition("/")
    if config is None and slash and head and not Path(path).exists():
        yield head, tail
