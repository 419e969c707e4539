"""Models of every kind evaluate as in transformers and peft.

Kinds: composed chains, surrogates, low-rank deltas, packed fine-tunes.
"""

from __future__ import annotations

import json

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.chains import hf_model as chain_model
from surgery.deltas.make import DeltaOptions, delta
from surgery.evaluation.harness import EvalOptions
from surgery.evaluation.record import evaluate_stored
from surrogates import RecoverySettings, SurrogateOptions, make_surrogate
from surrogates.scoring.timing import TimingSettings
from tests.checkpoints import VOCAB, make
from tests.surgery.deltas.tunes import tune, windows
from tests.surgery.evaluation.test_harness import LIMIT, bits_per_byte, cloze_accuracy, texts
from zoo import Zoo

pytest.importorskip("lm_eval", reason="the eval extra is not installed")

TASKS = ["library_ppl", "library_cloze"]
CONTEXT = 256


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A store with a base, its fine-tune and one model of each kind; and the folder of their checkpoints."""
    root = tmp_path_factory.mktemp("kinds")
    make("llama", root / "base")
    tune("llama", root / "fine", ranks=3)
    with Zoo(root / "store") as zoo:
        zoo.ingest(root / "base", name="base")
        zoo.ingest(root / "fine", name="fine", base="base")
        slices = [
            {"sources": [{"model": name, "layer_range": [at, at + 1]}]} for name, at in (("base", 0), ("fine", 2))
        ]
        zoo.compose({"slices": slices}, "composed")
        delta(zoo.store, "fine", windows(), DeltaOptions(4), variant="delta")
        (root / "ids.jsonl").write_text(
            "\n".join(json.dumps({"token_ids": [3 + at % (VOCAB - 3) for at in range(k, k + 99)]}) for k in range(20))
        )
        settings = dict(
            text=str(root / "ids.jsonl"), windows=8, length=16, held_out=4, scored=4, device="cpu", name="surrogate"
        )
        timing = TimingSettings(batch=1, context=4, pairs=1, rounds=1)
        make_surrogate(
            zoo,
            "fine",
            (1, 1),
            SurrogateOptions(part="ffn", recovery=RecoverySettings(how="none"), timing=timing, **settings),
        )
        yield zoo, root


def measured(zoo, name):
    return evaluate_stored(zoo, name, TASKS, EvalOptions(limit=LIMIT, batch_size=4), texts=texts)


def composed_by_hand(root):
    base, fine = (AutoModelForCausalLM.from_pretrained(root / name).eval() for name in ("base", "fine"))
    base.model.layers = nn.ModuleList([base.model.layers[0], fine.model.layers[2]])
    for at, layer in enumerate(base.model.layers):
        layer.self_attn.layer_idx = at
    # Final norm and head come from the last layer's model.
    base.model.norm, base.lm_head = fine.model.norm, fine.lm_head
    base.config.num_hidden_layers = 2
    return base


def exported(zoo, name, root):
    chain_model.register()
    zoo.model(name).export(root / f"out-{name}")
    return root / f"out-{name}"


@pytest.mark.parametrize("name", ["composed", "surrogate", "delta"])
def test_numbers_are_those_of_transformers_and_peft(family, name):
    zoo, root = family
    if name == "composed":
        model = composed_by_hand(root)
    elif name == "surrogate":
        model = AutoModelForCausalLM.from_pretrained(exported(zoo, name, root)).eval()
    else:
        base = AutoModelForCausalLM.from_pretrained(root / "base").eval()
        model = PeftModel.from_pretrained(base, exported(zoo, name, root)).eval()
    tokenizer = AutoTokenizer.from_pretrained(root / "base")
    document = measured(zoo, name)
    found = document["results"]["results"]
    assert document["model"] == name
    assert found["library_cloze"]["acc,none"] == cloze_accuracy(model, tokenizer, CONTEXT)
    assert found["library_ppl"]["bits_per_byte,none"] == pytest.approx(
        bits_per_byte(model, tokenizer, CONTEXT), rel=1e-5
    )
    whole = measured(zoo, "fine")["results"]["results"]["library_ppl"]
    assert found["library_ppl"]["bits_per_byte,none"] != whole["bits_per_byte,none"], (
        "it is another model than its parent"
    )


def test_packed_weights_give_the_same_document(family):
    zoo, _ = family
    before = measured(zoo, "fine")
    assert zoo.pack(["fine"]).packed > 0
    torch.manual_seed(1)
    after = measured(zoo, "fine")
    assert {**after, "seconds": 0} == {**before, "seconds": 0}
