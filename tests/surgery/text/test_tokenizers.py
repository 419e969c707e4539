"""How differences between two models' token IDs are reported, and what does not count as a difference."""

from __future__ import annotations

import json
import shutil

import pytest

from surgery.text.tokenizers import difference, require_same, tokenizer_digest, vocabulary_size
from tests.checkpoints import make
from zoo import Zoo
from zoo.errors import Incomparable, MalformedCheckpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make("llama", tmp_path_factory.mktemp("made") / "a")


@pytest.fixture
def pair(folder, tmp_path):
    """Provide `pair(edit)`: a model, and a copy of it with an edited tokenizer.json."""
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(folder, name="a")

        def get(edit, name="b"):
            copy = tmp_path / name
            shutil.copytree(folder, copy)
            saved = json.loads((copy / "tokenizer.json").read_text())
            edit(saved)
            (copy / "tokenizer.json").write_text(json.dumps(saved))
            zoo.ingest(copy, name=name)
            return zoo.model("a"), zoo.model(name)

        yield get


def swap(saved):
    vocabulary = saved["model"]["vocab"]
    by_id = {id_: token for token, id_ in vocabulary.items()}
    vocabulary[by_id[10]], vocabulary[by_id[11]] = 11, 10


def rename_special(saved):
    saved["added_tokens"][2]["content"] = "<eot>"
    saved["model"]["vocab"]["<eot>"] = saved["model"]["vocab"].pop("</s>")


def add_token(saved):
    saved["added_tokens"].append({**saved["added_tokens"][0], "id": 320, "content": "<image>"})


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (swap, "token 10 is '.*' in a and '.*' in b"),
        (add_token, "vocabularies of 320 and 321 tokens"),
        (rename_special, "token 2 is '</s>' in a and '<eot>' in b"),
        (lambda saved: saved["model"]["merges"].reverse(), "merge 1 is '.*' in a and '.*' in b"),
        (lambda saved: saved["model"]["merges"].pop(), "[0-9]+ and [0-9]+ merges"),
        (lambda saved: saved.update(normalizer={"type": "Lowercase"}), "another normaliser: null and .*Lowercase"),
        (lambda saved: saved["pre_tokenizer"].update(add_prefix_space=True), "another way of cutting words"),
        (lambda saved: saved["model"].update(byte_fallback=True), "another kind of tokenizer"),
    ],
)
def test_the_reason_is_told(pair, edit, reason):
    a, b = pair(edit)
    assert tokenizer_digest(a) != tokenizer_digest(b)
    with pytest.raises(Incomparable, match=reason) as caught:
        require_same(a, b)
    assert "\n" not in str(caught.value)


def spell_otherwise(saved):
    """Write the same tokenizer as another version of the library does, with padding and a prompt template."""
    saved["model"]["merges"] = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in saved["model"]["merges"]
    ]
    saved["model"].pop("ignore_merges", None)
    saved["padding"] = {
        "strategy": "BatchLongest",
        "direction": "Right",
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "<pad>",
    }
    saved["post_processor"] = None
    saved["added_tokens"][0]["special"] = False


def test_another_spelling_is_no_difference(pair):
    a, b = pair(spell_otherwise)
    assert difference(a, b) is None
    assert tokenizer_digest(a) == tokenizer_digest(b) != ""


def test_without_tokenizers_the_sizes_must_be_equal(folder, tmp_path):
    bare, small = (
        make("llama", tmp_path / "bare", tokenizer=False),
        make("llama", tmp_path / "small", tokenizer=False, vocab_size=300),
    )
    with Zoo(tmp_path / "store") as zoo:
        for name, place in {"a": folder, "bare": bare, "small": small}.items():
            zoo.ingest(place, name=name)
        a, bare_model, small_model = (zoo.model(name) for name in ("a", "bare", "small"))
        assert difference(a, bare_model) is None and difference(bare_model, bare_model) is None
        assert difference(a, small_model) == "vocabularies of 320 and 300 tokens, and small has no tokenizer to compare"
        assert tokenizer_digest(bare_model) == ""


def test_an_unreadable_tokenizer_is_said(pair):
    a, b = pair(lambda saved: saved.pop("model"))
    with pytest.raises(MalformedCheckpoint, match="the tokenizer of b cannot be read"):
        difference(a, b)


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "opt", "phi", "bloom"])
def test_the_vocabulary_is_the_heads(family, tmp_path):
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(make(family, tmp_path / family, tokenizer=False), name="m")
        assert vocabulary_size(zoo.model("m").manifest) == 320
