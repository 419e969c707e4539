"""The facade: what users do with `from zoo import Zoo`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import make
from zoo import Zoo
from zoo.errors import MalformedCheckpoint, NotFound, StoreError


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("made") / "tiny-llama")


def test_a_model_is_put_listed_found_and_taken_out(checkpoint, tmp_path):
    with Zoo(tmp_path / "zoo") as zoo:
        report = zoo.ingest(checkpoint)
        assert [model.name for model in zoo.models()] == ["tiny-llama"] == [report.model]
        model = zoo.model("llama")
        assert (model.name, model.kind, model.base, model.family) == ("tiny-llama", "foundation", None, "llama")
        assert model.config == json.loads((checkpoint / "config.json").read_text())
        assert model.generation_config == json.loads((checkpoint / "generation_config.json").read_text())
        assert model.side_file("tokenizer.json") == (checkpoint / "tokenizer.json").read_bytes()
        assert model.side_file("nothing") is None
        assert model.export(tmp_path / "out").bytes == sum(path.stat().st_size for path in checkpoint.iterdir())
        assert zoo.verify().damaged == ()
        assert zoo.remove("llama") == "tiny-llama"
        assert zoo.gc().objects_removed > 0
        assert zoo.models() == []
        with pytest.raises(NotFound):
            zoo.model("llama")


def test_the_chain_is_what_the_catalogue_has_now(checkpoint, tmp_path):
    with Zoo(tmp_path / "zoo") as zoo:
        zoo.ingest(checkpoint)
        (block,) = zoo.model("llama").chain
        assert block.layers == (0, 3)
        assert [(each.component.kind, each.layer) for each in block.components][:3] == [
            ("embedding", None),
            ("attention", 0),
            ("ffn", 0),
        ]
        assert block.shared_with == ()


def test_the_tokenizer_is_the_checkpoints(checkpoint, tmp_path):
    from transformers import AutoTokenizer

    with Zoo(tmp_path / "zoo") as zoo:
        zoo.ingest(checkpoint)
        ours, theirs = zoo.model("llama").tokenizer(), AutoTokenizer.from_pretrained(checkpoint)
    text = "def f(x):\n    return 'größe'"
    assert ours(text).input_ids == theirs(text).input_ids
    messages = [{"role": "user", "content": "hi"}]
    assert ours.apply_chat_template(messages, tokenize=False) == theirs.apply_chat_template(messages, tokenize=False)


def test_a_model_without_tokenizer_says_so(tmp_path):
    with Zoo(tmp_path / "zoo") as zoo:
        zoo.ingest(make("llama", tmp_path / "bare", tokenizer=False))
        with pytest.raises(MalformedCheckpoint, match="bare has no tokenizer") as caught:
            zoo.model("bare").tokenizer()
        assert "zoo-tokenizer-" not in str(caught.value)


def test_an_existing_store_can_be_asked_for(tmp_path):
    with pytest.raises(StoreError, match="no store"):
        Zoo(tmp_path / "zoo", create=False)
    Zoo(tmp_path / "zoo").close()
    Zoo(tmp_path / "zoo", create=False).close()


def test_a_store_outlives_the_process_that_made_it(checkpoint, tmp_path):
    with Zoo(tmp_path / "zoo") as zoo:
        zoo.ingest(checkpoint)
        manifest = zoo.model("llama").manifest
    with Zoo(tmp_path / "zoo", create=False) as zoo:
        assert zoo.model("llama").manifest == manifest
