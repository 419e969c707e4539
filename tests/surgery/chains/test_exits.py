"""An early exit is the model's first layers with its own final norm and head; its scores equal brute force (BL-30)."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from runtime.config import EngineConfig
from surgery.chains.exits import ExitOptions, make_exit, measure
from surgery.text.text import read_text
from tests import checkpoints
from tests.chains import put_chain, put_stitch
from tests.runtime.engine.drive import PagedDevice
from zoo import Zoo
from zoo.errors import InputError
from zoo.views.exits import chain_id, ends_of, exit_ids, exit_name, exit_of, is_exit

LAYERS = 4
FAMILIES = ["llama", "gpt2", "gpt_neox"]


@pytest.fixture
def zoo(tmp_path, request):
    name = getattr(request, "param", "llama")
    with Zoo(tmp_path / "store") as zoo:
        zoo.ingest(checkpoints.make(name, tmp_path / "m", num_hidden_layers=LAYERS), name="org/m")
        yield zoo


def test_the_names_of_exits() -> None:
    assert exit_of(exit_name("org/m", 3)) == ("org/m", 3)
    assert [exit_of(name) for name in ("org/m", "org/m@exit-", "@exit-3", "org/m@exit-x", "org/m@step-3")] == [None] * 5


@pytest.mark.parametrize("zoo", FAMILIES, indirect=True)
@torch.inference_mode()
def test_each_exit_is_scored_as_the_whole_model_would_be(zoo, tmp_path) -> None:
    options = ExitOptions(str(_text(tmp_path)), tokens=192, window=24, sure=0.02)
    found = measure(zoo.store, zoo.model("m"), options)
    assert [each.layers for each in found.exits] == list(range(LAYERS + 1))
    assert found.exits[-1].agreement == 1.0 and found.exits[-1].sure_agreement in (1.0, None)
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "m").eval()
    ids = read_text(options.text).tokens(zoo.model("m").tokenizer(), 24, 8, "held_out")
    assert found.tokens == ids.shape[0] * 23
    best = whole(ids).logits[:, :-1].argmax(-1)
    for layers in (1, 2, LAYERS):
        logits = _cut_off(tmp_path / "m", layers)(ids).logits[:, :-1].float()
        one = found.exits[layers]
        assert one.agreement == pytest.approx((logits.argmax(-1) == best).float().mean().item())
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        assert one.perplexity == pytest.approx(math.exp(loss), rel=1e-4)
        sure = logits.softmax(-1).amax(-1) >= 0.02
        assert one.sure == pytest.approx(sure.float().mean().item())
    with zoo.store.catalog.reading() as reader:
        (kept,) = reader.documents("exits", "org/m")
    assert kept.value["exits"][2]["agreement"] == found.exits[2].agreement and kept.value["probe"] == found.probe


def test_an_exit_costs_no_bytes_in_the_store_and_none_in_memory(zoo) -> None:
    before = set(zoo.store.objects.digests())
    report = make_exit(zoo.store, zoo.model("m"), 2)
    assert report.model == "org/m@exit-2" and set(zoo.store.objects.digests()) == before
    assert make_exit(zoo.store, zoo.model("m"), 2).model == "org/m@exit-2"  # again: it is there
    alone = PagedDevice(zoo.store, EngineConfig(kv_cache_memory_bytes=1 << 20), ["org/m"])
    both = PagedDevice(zoo.store, EngineConfig(kv_cache_memory_bytes=1 << 20), ["org/m", "org/m@exit-2"])
    assert both.memory().weights == alone.memory().weights


@torch.inference_mode()
def test_an_exit_computes_what_the_model_cut_off_there_computes(zoo, tmp_path) -> None:
    make_exit(zoo.store, zoo.model("m"), 3)
    ids = torch.randint(3, checkpoints.VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    assert torch.equal(zoo.model("m@exit-3").load()(ids).logits, _cut_off(tmp_path / "m", 3)(ids).logits)


@pytest.mark.parametrize("layers", [0, LAYERS, LAYERS + 1])
def test_only_layers_that_it_has_and_not_all(zoo, layers: int) -> None:
    with pytest.raises(InputError, match="1 to 3"):
        make_exit(zoo.store, zoo.model("m"), layers)


def test_a_name_alone_makes_no_exit(zoo, tmp_path) -> None:
    """A replaced model has no exits until they are made again; another chain with an exit's name is not one."""
    make_exit(zoo.store, zoo.model("m"), 2)
    assert is_exit(zoo.model("org/m").manifest, zoo.model("org/m@exit-2").manifest)
    zoo.remove("org/m")
    zoo.ingest(checkpoints.make("llama", tmp_path / "new", num_hidden_layers=LAYERS, seed=9), name="org/m")
    assert not is_exit(zoo.model("org/m").manifest, zoo.model("org/m@exit-2").manifest)
    zoo.remove("org/m@exit-2")
    put_chain(zoo.store, "org/m@exit-2", ("org/m", 0, 1), ("org/m", 2, 3))
    assert not is_exit(zoo.model("org/m").manifest, zoo.model("org/m@exit-2").manifest)
    zoo.remove("org/m@exit-2")
    make_exit(zoo.store, zoo.model("org/m"), 2)
    assert is_exit(zoo.model("org/m").manifest, zoo.model("org/m@exit-2").manifest)


@torch.inference_mode()
def test_exits_of_a_chain_of_two_widths_are_scored_as_they_are_made(zoo, tmp_path) -> None:
    """Before the stitch hidden states are narrower than the head needs: the exit puts the stitch before the head."""
    wide = dict(
        hidden_size=96,
        intermediate_size=80,
        num_attention_heads=6,
        num_key_value_heads=3,
        head_dim=32,
        num_hidden_layers=2,
    )
    zoo.ingest(checkpoints.make("llama", tmp_path / "wide", **wide), name="wide")
    put_stitch(zoo.store, "org/m", "wide")
    put_chain(zoo.store, "stitched", ("org/m", 0, 2), ("wide", 0, 2))
    options = ExitOptions(str(_text(tmp_path)), tokens=96, window=24)
    found = measure(zoo.store, zoo.model("stitched"), options)
    assert [each.layers for each in found.exits] == [0, 1, 2, 3, 4]
    ids = read_text(options.text).tokens(zoo.model("stitched").tokenizer(), 24, 4, "held_out")
    best = zoo.model("stitched").load()(ids).logits[:, :-1].argmax(-1)
    ids_of = exit_ids(zoo.model("stitched").manifest)
    for layers in (1, 2, 3):
        made = zoo.model(make_exit(zoo.store, zoo.model("stitched"), layers).model)
        assert (
            is_exit(zoo.model("stitched").manifest, made.manifest)
            and chain_id(made.manifest.components) in ids_of[layers]
        )
        logits = made.load()(ids).logits[:, :-1]
        assert found.exits[layers].agreement == pytest.approx((logits.argmax(-1) == best).float().mean().item())
        loss = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()).item()
        assert found.exits[layers].perplexity == pytest.approx(math.exp(loss), rel=1e-4)


def test_a_perplexity_beyond_all_numbers_is_none(zoo, tmp_path) -> None:
    """A head far too certain of wrong tokens has a loss of hundreds per token; all other figures are still reported."""
    hot = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    hot.lm_head.weight.data *= 1e5
    hot.save_pretrained(tmp_path / "hot")
    checkpoints.tokenizer_files(tmp_path / "hot")
    zoo.ingest(tmp_path / "hot", name="hot")
    found = measure(zoo.store, zoo.model("hot"), ExitOptions(str(_text(tmp_path)), tokens=96, window=24))
    assert found.exits[-1].perplexity is None and found.exits[-1].agreement == 1.0
    json.dumps(found.document(), allow_nan=False)


def test_where_layers_end(zoo) -> None:
    assert ends_of(zoo.model("m").manifest) == (1, 3, 5, 7, 9)  # attention and FFN


def _text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(
        "".join(f"line {number}: the quick brown fox jumps over {number * 7} lazy dogs\n" for number in range(2000))
    )
    return path


def _cut_off(folder, layers: int):
    """Return transformers' own model with only its first layers."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inner = (
        model.model
        if hasattr(model, "model")
        else model.transformer
        if hasattr(model, "transformer")
        else model.gpt_neox
    )
    name = "h" if hasattr(inner, "h") else "layers"
    setattr(inner, name, getattr(inner, name)[:layers])
    model.config.num_hidden_layers = layers
    return model
