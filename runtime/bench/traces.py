"""Read trace files: arrival times, lengths, and texts or shared prefixes where the format has them.

    sharegpt   JSON   [{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …}, …]}, …];
                      the first question and its answer
    azure      CSV    TIMESTAMP,ContextTokens,GeneratedTokens (Azure LLM inference traces 2023, 2024)
    burstgpt   CSV    Timestamp (s),Model,Request tokens,Response tokens,Total tokens,Log Type; failed requests have
                      no response and are left out
    mooncake   JSONL  timestamp (ms), input_length, output_length, hash_ids (prefix blocks of 512 tokens each)

Reads only as many rows as needed, and no line above a bound. Raises InputError with the line's number.
"""

from __future__ import annotations

import csv
import itertools
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal, get_args

from runtime.bench.lengths import MOST_TOKENS
from zoo.errors import InputError

TraceFormat = Literal["sharegpt", "azure", "burstgpt", "mooncake"]

#: Tokens per block that a Mooncake trace hashes (Mooncake, FAST'25).
MOONCAKE_BLOCK = 512
#: Maximum characters of a line of a CSV or JSONL trace; the hashes of a million tokens need far fewer.
_MOST_LINE = 1 << 20
#: Maximum characters of a ShareGPT document; the cleaned set of 90,000 conversations has 0.7 GB.
_MOST_JSON = 1 << 30


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace.

    Fields:
        at: Seconds from the trace's first row; None if the trace has no times.
        prompt: Tokens; None if the trace has texts only.
        answer: Tokens; None if the trace has texts only.
        blocks: Ids of the prompt's blocks of MOONCAKE_BLOCK tokens; equal ids mean equal tokens.
    """

    at: float | None
    prompt: int | None
    answer: int | None
    text: str | None = None
    reply: str | None = None
    blocks: tuple[int, ...] = ()


def read_trace(path: Path, kind: TraceFormat, count: int) -> list[TraceRow]:
    """Return the first `count` rows in order of time, starting at 0.

    Raises InputError if the file is unreadable, malformed (with the line's number) or empty.
    """
    if kind not in get_args(TraceFormat):
        raise InputError(f"a trace is one of {', '.join(get_args(TraceFormat))}, not {kind!r}")
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(itertools.islice(_READERS[kind](file, path), count))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path} is no UTF-8 text") from None
    if not rows:
        raise InputError(f"{path} holds no request that can be asked")
    if any(row.at is None for row in rows):
        return rows
    rows.sort(key=lambda row: row.at or 0.0)
    begin = rows[0].at or 0.0
    return [replace(row, at=(row.at or 0.0) - begin) for row in rows]


def _azure(file: IO[str], path: Path) -> Iterator[TraceRow]:
    for line, row in _table(file, path, ("TIMESTAMP", "ContextTokens", "GeneratedTokens")):
        yield _at(path, line, _moment(row["TIMESTAMP"]), row["ContextTokens"], row["GeneratedTokens"])


def _burstgpt(file: IO[str], path: Path) -> Iterator[TraceRow]:
    for line, row in _table(file, path, ("Timestamp", "Request tokens", "Response tokens")):
        if row["Response tokens"].strip() != "0":
            yield _at(path, line, row["Timestamp"], row["Request tokens"], row["Response tokens"])


def _mooncake(file: IO[str], path: Path) -> Iterator[TraceRow]:
    for line, text in _lines(file, path):
        if not text.strip():
            continue
        record = _object(text, path, line)
        blocks = record.get("hash_ids", [])
        if not isinstance(blocks, list) or not all(isinstance(block, int) and 0 <= block < 2**63 for block in blocks):
            raise _malformed(path, line, "hash_ids must be a list of numbers from 0")
        milliseconds = record.get("timestamp")
        seconds = milliseconds / 1000 if isinstance(milliseconds, int | float) else None
        row = _at(path, line, seconds, record.get("input_length"), record.get("output_length"))
        yield replace(row, blocks=tuple(blocks[: math.ceil((row.prompt or 0) / MOONCAKE_BLOCK)]))


def _sharegpt(file: IO[str], path: Path) -> Iterator[TraceRow]:
    text = file.read(_MOST_JSON + 1)
    if len(text) > _MOST_JSON:
        raise InputError(f"{path} is larger than {_MOST_JSON:,} characters")
    try:
        conversations = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _malformed(path, getattr(error, "lineno", 1), "no JSON") from None
    if not isinstance(conversations, list):
        raise _malformed(path, 1, "not a list of conversations")
    for number, conversation in enumerate(conversations, 1):
        turns = conversation.get("conversations", []) if isinstance(conversation, dict) else None
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise InputError(f"{path}, conversation {number}: no list of turns")
        said = [(turn.get("from"), turn.get("value")) for turn in turns[:2]]
        if (
            len(said) == 2
            and all(isinstance(value, str) and value.strip() for _, value in said)
            and said[0][0] in ("human", "user")
        ):
            yield TraceRow(None, None, None, text=str(said[0][1]), reply=str(said[1][1]))


_READERS: Mapping[TraceFormat, Callable[[IO[str], Path], Iterator[TraceRow]]] = {
    "azure": _azure,
    "burstgpt": _burstgpt,
    "mooncake": _mooncake,
    "sharegpt": _sharegpt,
}


def _lines(file: IO[str], path: Path) -> Iterator[tuple[int, str]]:
    number = 0
    while text := file.readline(_MOST_LINE + 1):
        number += 1
        if len(text) > _MOST_LINE:
            raise _malformed(path, number, f"longer than {_MOST_LINE:,} characters")
        yield number, text


def _table(file: IO[str], path: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Yield the needed columns of each row of a CSV file, by the names in its first line."""
    lines = _lines(file, path)
    heading = next(csv.reader([next(lines, (1, ""))[1]]), [])
    missing = [name for name in needed if name not in heading]
    if missing:
        raise _malformed(path, 1, f"no column {missing[0]!r}")
    columns = {name: heading.index(name) for name in needed}
    for number, text in lines:
        cells = next(csv.reader([text]), [])
        if not cells:
            continue
        if len(cells) <= max(columns.values()):
            raise _malformed(path, number, f"{len(cells)} columns, not {len(heading)}")
        yield number, {name: cells[column] for name, column in columns.items()}


def _object(text: str, path: Path, line: int) -> dict[str, Any]:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise _malformed(path, line, "no JSON object")
    return record


def _at(path: Path, line: int, time: Any, prompt: Any, answer: Any) -> TraceRow:
    """Return a row of validated numbers."""
    try:
        row = TraceRow(float(time), _length(prompt), _length(answer))
    except (TypeError, ValueError, OverflowError):
        raise _malformed(path, line, "a time or a length is none") from None
    if not math.isfinite(row.at or 0.0):
        raise _malformed(path, line, "the time is not finite")
    return row


def _length(value: Any) -> int:
    """Return a length of at least 1: a trace's zero counts as one token, the least that can be served."""
    number = int(value)
    if not 0 <= number <= MOST_TOKENS or (isinstance(value, float) and value != number):
        raise ValueError(value)
    return max(1, number)


def _moment(text: str) -> float | None:
    """Return a time such as `2023-11-16 18:15:46.6805900` in Unix seconds. UTC is assumed without a zone."""
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def _malformed(path: Path, line: int, what: str) -> InputError:
    return InputError(f"{path}, line {line}: {what}")
