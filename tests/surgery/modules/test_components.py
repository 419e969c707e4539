"""BL-01: a model's components, run in order, give its logits bit for bit; a loaded model equals the original."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from surgery.ingest.cut import cut
from surgery.ingest.ingest import ingest
from surgery.models.load import load_model
from surgery.modules.build import build
from surgery.modules.components import Where
from surgery.modules.skeleton import Skeleton
from surgery.sources import open_source
from tests import checkpoints
from zoo.errors import MalformedCheckpoint, NotServable
from zoo.store import Store

#: torch's fused attention under a name without a mask function: causal by itself, and accepted by families that refuse
#: `sdpa`.
ATTENTION = "test_causal"
AttentionInterface.register(ATTENTION, sdpa_attention_forward)


def chain_logits(config, state, ids):
    """Compute logits by building the model's components and running them in order."""
    placed = cut(config, {key: key for key in state})
    skeleton = Skeleton(config, ATTENTION)
    where = Where(torch.arange(ids.shape[1])[None])
    hidden = ids
    for part in placed:
        module = build(skeleton, part.component, part.layer, {name: state[key] for name, key in part.component.tensors})
        if part.component.kind == "lm_head":
            return module(hidden)
        hidden = module(hidden, where)
        if part.component.kind == "embedding" and skeleton.rotary is not None:
            where = Where(where.positions, skeleton.rotary(hidden, where.positions))
    raise AssertionError("a chain without a head")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*checkpoints.SERVED, *checkpoints.VARIANTS])
@torch.inference_mode()
def test_components_in_order_are_the_model(tmp_path, family, dtype):
    # Fused attention has no soft cap, and newer transformers refuse one; without it Gemma 2 runs fused as well.
    uncapped = {"attn_logit_softcapping": None} if family == "gemma2" else {}
    folder = checkpoints.make(family, tmp_path, tokenizer=False, dtype=dtype, **uncapped)
    config = json.loads((folder / "config.json").read_text())
    ids = torch.randint(3, checkpoints.VOCAB, (1, 11), generator=torch.Generator().manual_seed(0))
    whole = AutoModelForCausalLM.from_pretrained(folder, attn_implementation=ATTENTION).eval()
    assert torch.equal(chain_logits(config, load_file(folder / "model.safetensors"), ids), whole(ids).logits)


@pytest.mark.parametrize("family", [*checkpoints.CONFIGS])
@torch.inference_mode()
def test_loading_from_the_zoo_gives_the_model(tmp_path, family):
    folder = checkpoints.make(family, tmp_path / "hf", tokenizer=False, shards="60KB")
    ids = torch.randint(3, checkpoints.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    with Store.open(tmp_path / "store") as store:
        ingest(store, open_source(str(folder)), name="m")
        with store.catalog.reading() as catalog:
            model = load_model(store, catalog.model("m"))
        whole = AutoModelForCausalLM.from_pretrained(folder).eval()
        assert isinstance(model, PreTrainedModel) and type(model) is type(whole)
        assert torch.equal(model(ids).logits, whole(ids).logits)


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, {"modules_to_save": ["lm_head"]}, {"bias": "all"}])
def test_a_lora_loads_as_its_base_with_the_adapter(tmp_path, options):
    from peft import PeftModel

    base = checkpoints.make("llama", tmp_path / "base", tokenizer=False, attention_bias=True)
    lora = checkpoints.make_lora(base, tmp_path / "lora", **options)
    ids = torch.randint(3, checkpoints.VOCAB, (1, 9), generator=torch.Generator().manual_seed(0))
    with Store.open(tmp_path / "store") as store:
        ingest(store, open_source(str(base)), name="base")
        ingest(store, open_source(str(lora)), name="lora", base="base")
        with store.catalog.reading() as catalog:
            model = load_model(store, catalog.model("lora"))
    whole = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), lora).eval()
    assert isinstance(model, PreTrainedModel)
    assert torch.equal(model(ids).logits, whole(ids).logits)


def test_training_a_loaded_model_cannot_touch_the_store(tmp_path):
    """Weights are mapped copy-on-write: an optimiser step changes the model, not the objects."""
    folder = checkpoints.make("llama", tmp_path / "hf", tokenizer=False)
    ids = torch.randint(3, checkpoints.VOCAB, (2, 8), generator=torch.Generator().manual_seed(0))
    with Store.open(tmp_path / "store") as store:
        ingest(store, open_source(str(folder)), name="m")
        with store.catalog.reading() as catalog:
            manifest = catalog.model("m")
        model = load_model(store, manifest).train()
        optimiser = torch.optim.SGD(model.parameters(), lr=1.0)
        before = model.lm_head.weight.detach().clone()
        model(ids, labels=ids).loss.backward()
        optimiser.step()
        assert not torch.equal(before, model.lm_head.weight)
        assert all(store.objects.check(tensor.digest) for tensor in manifest.tensors)
        assert torch.equal(load_model(store, manifest).lm_head.weight, before)


def test_what_no_executor_runs_is_refused_with_the_reason(tmp_path):
    for family in ("bloom", "falcon"):
        with pytest.raises(NotServable, match="dense executor"):
            Skeleton(checkpoints.config_for(family).to_dict())


def test_a_component_without_all_its_tensors_is_refused(tmp_path):
    folder = checkpoints.make("llama", tmp_path, tokenizer=False)
    config = json.loads((folder / "config.json").read_text())
    state = load_file(folder / "model.safetensors")
    part = cut(config, {key: key for key in state})[1]
    tensors = {name: state[key] for name, key in part.component.tensors}
    with pytest.raises(MalformedCheckpoint, match="has no tensor"):
        build(Skeleton(config, ATTENTION), part.component, 0, {k: v for k, v in tensors.items() if "q_proj" not in k})
    with pytest.raises(MalformedCheckpoint, match="shape"):
        build(Skeleton(config, ATTENTION), part.component, 0, {k: v[:1] for k, v in tensors.items()})
