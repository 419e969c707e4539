"""Trace files in their publishers' formats; malformed files give one line that names the place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from runtime.bench.traces import TraceFormat, TraceRow, read_trace
from zoo.errors import InputError

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:48.0000000,879,0
"""
AZURE_2024 = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 "
    "01:00:01.009930+01:00,2399,6\n"
)
BURST = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,"API, log"
"""
BURST_2 = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log "
    "Type\n2.5,x,1.0,GPT-4,7,9,16,API log\n"
)
MOONCAKE = """{"timestamp": 27482, "input_length": 955, "output_length": 52, "hash_ids": [46, 47, 48]}

{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46]}
"""
SHARE = json.dumps(
    [
        {
            "id": "a",
            "conversations": [
                {"from": "human", "value": "wie?"},
                {"from": "gpt", "value": "so."},
                {"from": "human", "value": "ah"},
            ],
        },
        {"id": "b", "conversations": [{"from": "gpt", "value": "only me"}]},
        {"id": "c", "conversations": []},
        {"id": "d", "conversations": [{"from": "gpt", "value": "first"}, {"from": "human", "value": "second"}]},
        {"id": "e", "conversations": [{"from": "human", "value": "wo?"}, {"from": "gpt", "value": "da."}]},
    ]
)


def read(folder: Path, kind: TraceFormat, text: str, count: int = 100) -> list[TraceRow]:
    path = folder / "trace"
    path.write_text(text, encoding="utf-8")
    return read_trace(path, kind, count)


def test_azure(tmp_path: Path) -> None:
    rows = read(tmp_path, "azure", AZURE)
    assert [(row.prompt, row.answer) for row in rows] == [(374, 44), (879, 1), (396, 109)]
    assert [row.at for row in rows] == pytest.approx([0.0, 1.31941, 4.314579], abs=1e-5)
    assert [row.at for row in read(tmp_path, "azure", AZURE_2024)] == pytest.approx([0.0, 1.0], abs=1e-5)
    assert len(read(tmp_path, "azure", AZURE, 1)) == 1


def test_burstgpt_leaves_out_what_failed(tmp_path: Path) -> None:
    assert read(tmp_path, "burstgpt", BURST) == [TraceRow(0.0, 472, 18), TraceRow(113.0, 417, 276)]
    assert read(tmp_path, "burstgpt", BURST_2) == [TraceRow(0.0, 7, 9)]


def test_mooncake_has_the_blocks_that_its_prompt_needs(tmp_path: Path) -> None:
    rows = read(tmp_path, "mooncake", MOONCAKE)
    assert rows[0] == TraceRow(0.0, 955, 52, blocks=(46, 47))
    assert rows[1] == TraceRow(pytest.approx(3.053), 6472, 26, blocks=(46,))


def test_sharegpt_is_first_questions_and_their_answers(tmp_path: Path) -> None:
    rows = read(tmp_path, "sharegpt", SHARE)
    assert [(row.at, row.text, row.reply) for row in rows] == [(None, "wie?", "so."), (None, "wo?", "da.")]


@pytest.mark.parametrize(
    ("kind", "text", "where"),
    [
        ("azure", "", "line 1"),
        ("azure", "TIMESTAMP,ContextTokens\n1,2\n", "line 1: no column 'GeneratedTokens'"),
        ("azure", AZURE + "2023-11-16 18:15:48,12\n", "line 5: 2 columns"),
        ("azure", AZURE + "yesterday,12,3\n", "line 5"),
        ("azure", AZURE + "2023-11-16 18:15:48,-1,3\n", "line 5"),
        ("azure", AZURE + "2023-11-16 18:15:48,12,99999999999\n", "line 5"),
        ("azure", AZURE + "2023-11-16 18:15:48,12," + "9" * 5000 + "\n", "line 5"),
        ("azure", AZURE + "x" * 2_000_000, "line 5: longer"),
        ("burstgpt", BURST + "nan,GPT-4,1,2,3,API log\n", "line 5: the time is not finite"),
        ("burstgpt", BURST + '"inf,GPT-4,1,2,3,API log\n', "line 5"),
        ("mooncake", MOONCAKE + "{", "line 4: no JSON object"),
        ("mooncake", MOONCAKE + "[" * 100_000, "line 4: no JSON object"),
        ("mooncake", MOONCAKE + '{"timestamp": 1}', "line 4"),
        ("mooncake", MOONCAKE + '{"timestamp": 1, "input_length": 2.5, "output_length": 1}', "line 4"),
        (
            "mooncake",
            MOONCAKE + '{"timestamp": 1, "input_length": 2, "output_length": 1, "hash_ids": ["a"]}',
            "line 4: hash_ids",
        ),
        ("sharegpt", "[\n\n{]", "line 3: no JSON"),
        ("sharegpt", "{}", "line 1: not a list"),
        ("sharegpt", '[{"conversations": []}, {"conversations": 3}]', "conversation 2"),
        ("sharegpt", "[]", "holds no request"),
    ],
)
def test_what_is_malformed_is_said_with_its_line(tmp_path: Path, kind: TraceFormat, text: str, where: str) -> None:
    with pytest.raises(InputError, match=where) as raised:
        read(tmp_path, kind, text)
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read_trace(tmp_path / "none", "azure", 1)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="UTF-8"):
        read_trace(tmp_path / "bytes", "azure", 1)
    with pytest.raises(InputError, match="sharegpt, azure"):
        read_trace(tmp_path / "bytes", "csv", 1)  # type: ignore[arg-type]
