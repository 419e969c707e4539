"""Text for probes: its sources, disjoint parts, and reproducible windows."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from surgery.text import sources as text_sources
from surgery.text.text import Probe, Text, _split, read_text
from tests.checkpoints import tokenizer_files
from zoo.errors import InputError


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer_files(folder)
    return AutoTokenizer.from_pretrained(folder)


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_a_text_file_is_read_whole_and_cut_at_lines(tmp_path):
    lines = [f"line {number} says something of its own\n" for number in range(2000)]
    (tmp_path / "a.txt").write_text("".join(lines))
    text = read_text(str(tmp_path / "a.txt"))
    assert sorted("".join(text.part("all")).splitlines()) == sorted("".join(lines).splitlines())
    assert text.train and text.held_out and not set(text.train) & set(text.held_out)
    assert text.digest == read_text(str(tmp_path / "a.txt")).digest and len(text.digest) == 64
    (tmp_path / "b.txt").write_text("".join(lines) + "x")
    assert read_text(str(tmp_path / "b.txt")).digest != text.digest


def test_jsonl_texts_conversations_and_ids(tmp_path):
    told = {"conversations": [{"from": "human", "value": "why?"}, {"from": "gpt", "value": "because"}]}
    chat = {"messages": [{"role": "user", "content": "where?"}]}
    text = read_text(write(tmp_path / "a.jsonl", {"text": "plain"}, told, chat, {"text": "  "}, {"token_ids": [5, 6]}))
    assert set(text.part("all")) == {"plain", "why?\nbecause", "where?", (5, 6)}


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("{", "no JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("3", "neither a text nor an object"),
        ('{"body": "x"}', "no field `text`"),
        ('{"token_ids": [1, -2]}', "can be no token"),
        ('{"token_ids": "12"}', "no list"),
        ('{"messages": [{"role": "user"}]}', "a turn"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, why):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n\n' + line + "\n")
    with pytest.raises(InputError, match=f"line 3: .*{why}"):
        read_text(str(path))


def test_what_is_missing_empty_or_no_text_is_said(tmp_path):
    with pytest.raises(InputError, match=r"there is no file .*none\.txt"):
        read_text(str(tmp_path / "none.txt"))
    (tmp_path / "blank.txt").write_text(" \n\n")
    with pytest.raises(InputError, match="a probe file without text"):
        read_text(str(tmp_path / "blank.txt"))
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff")
    with pytest.raises(InputError, match="no UTF-8 text: byte 3"):
        read_text(str(tmp_path / "bytes.txt"))
    with pytest.raises(InputError, match="cannot be read"):
        read_text(str(tmp_path))


def test_the_built_in_text_and_its_parts():
    mail = read_text("library:mail")
    assert mail.train and mail.held_out and not set(mail.train) & set(mail.held_out)
    with pytest.raises(InputError, match="no part 'poetry'"):
        read_text("library:poetry")
    assert read_text().digest == read_text("library").digest != mail.digest


def test_a_local_dataset(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "rows.jsonl", *({"text": f"row {n}"} for n in range(9)))
    text = read_text(f"datasets:{tmp_path / 'data'}:train[:4]")
    assert sorted(text.part("all")) == [f"row {n}" for n in range(4)]
    datasets.Dataset.from_dict({"text": ["one", "two"]}).save_to_disk(tmp_path / "saved")
    assert sorted(read_text(f"datasets:{tmp_path / 'saved'}").part("all")) == ["one", "two"]


def test_a_dataset_that_cannot_be_had_is_one_clear_line(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")

    def offline(path, config=None, split=None):
        raise ConnectionError("Couldn't reach the Hub\nwith a long story")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(InputError, match=r"^the dataset some/where:train cannot be read: Couldn't reach the Hub$"):
        read_text("datasets:some/where:train")
    with pytest.raises(InputError, match="is no dataset"):
        read_text("datasets:a:b:c:d")


def test_a_config_may_stand_behind_the_name(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load(path, config=None, split=None):
        asked.append((path, config, split))
        if config is None:
            raise FileNotFoundError(path)
        return [{"text": "found"}]

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert read_text("datasets:wikitext/wikitext-2-raw-v1:train[:1000]").train == ("found",)
    assert asked == [
        ("wikitext/wikitext-2-raw-v1", None, "train[:1000]"),
        ("wikitext", "wikitext-2-raw-v1", "train[:1000]"),
    ]


def test_windows_are_the_same_twice_and_never_overlap(tokenizer):
    text = Text("here", tuple(f"document {n}: " + "some words " * n for n in range(60)), ("held " * 400,))
    first = text.tokens(tokenizer, 16, 20, seed=3)
    assert first.shape == (20, 16)
    assert first.equal(text.tokens(tokenizer, 16, 20, seed=3))
    assert not first.equal(text.tokens(tokenizer, 16, 20, seed=4))
    numbered = Text("ids", (tuple(range(1000)),), ())
    windows = numbered.tokens(None, 10, 1000)
    assert windows.shape == (100, 10)
    assert sorted(windows.flatten().tolist()) == list(range(1000))


def test_too_little_text_and_text_without_a_tokenizer(tokenizer):
    text = Text("here", ("few words",), ())
    with pytest.raises(InputError, match="too little text: one window takes 64 tokens"):
        text.tokens(tokenizer, 64, 1)
    with pytest.raises(InputError, match="its held-out part holds 0"):
        text.tokens(tokenizer, 1, 1, part="held_out")
    with pytest.raises(InputError, match="token ids"):
        text.tokens(None, 1, 1)


def test_a_probe_is_named_by_its_very_ids(tokenizer):
    text = Text("ids", (tuple(range(100)),), ())
    windows = text.tokens(None, 10, 4)
    probe = Probe(text.digest, "", windows)
    assert probe.count == 40
    assert probe.digest == Probe("", "other", windows.clone()).digest and len(probe.digest) == 64
    assert probe.digest != Probe(text.digest, "", windows.reshape(5, 8)).digest
    assert probe.digest != Probe(text.digest, "", windows.flip(0)).digest


@given(
    st.lists(
        st.one_of(st.text(min_size=1, max_size=4), st.lists(st.integers(0, 9)).map(tuple)), min_size=1, max_size=40
    )
)
def test_parts_cover_all_documents_and_share_none(documents):
    train, held_out = _split(documents)
    assert sorted(map(repr, train + held_out)) == sorted(map(repr, documents))
    assert not set(train) & set(held_out)
    assert train
    assert bool(held_out) == (len(set(documents)) > 1)


@pytest.mark.parametrize("source", ["large.txt", "/dev/zero"])
def test_no_more_is_read_than_a_text_may_have(tmp_path, monkeypatch, source):
    """The limit also holds for sources without a known size."""
    monkeypatch.setattr(text_sources, "_MAX_FILE", 1000)
    (tmp_path / "large.txt").write_text("a line\n" * 200)
    with pytest.raises(InputError, match="larger than"):
        read_text(str(tmp_path / source))  # an absolute path joined to a folder stays as it is


def test_ends_of_lines_make_no_other_text(tmp_path):
    for name, end in (("unix", b"\n"), ("dos", b"\r\n"), ("mac", b"\r")):
        (tmp_path / f"{name}.txt").write_bytes(b"\xef\xbb\xbf" + end.join([b"one", b"two", b"three"] * 2000))
    assert len({read_text(str(tmp_path / f"{name}.txt")).digest for name in ("unix", "dos", "mac")}) == 1
