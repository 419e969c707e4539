"""A chain of several models as a transformers model: generate, Trainer, peft and lm-eval run on it.

Unsupported uses are refused.
"""

from __future__ import annotations

import importlib

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments

from tests import checkpoints
from tests.chains import put_chain, put_stitch
from zoo import Zoo
from zoo.errors import InputError, MalformedCheckpoint

IDS = torch.randint(3, checkpoints.VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
GREEDY = dict(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """An exported chain: two shapes of one width, then another family behind a stitch; some layers have windows."""
    importlib.import_module("zoo.integrations")
    root = tmp_path_factory.mktemp("chain")
    with Zoo(root / "zoo") as zoo:
        zoo.ingest(checkpoints.make("qwen2", root / "a"), name="a")
        zoo.ingest(checkpoints.make("llama", root / "n", num_key_value_heads=1, intermediate_size=48), name="n")
        zoo.ingest(checkpoints.make("gpt_neox", root / "x", hidden_size=96), name="x")
        put_stitch(zoo.store, "n", "x")
        put_chain(zoo.store, "c", ("a", 0, 2), ("n", 1, 3), ("x", 1, 3))
        zoo.model("c").export(root / "out")
    return root / "out"


@pytest.fixture
def model(out):
    return AutoModelForCausalLM.from_pretrained(out)


@torch.inference_mode()
def test_it_is_found_by_its_config(out, model):
    config = AutoConfig.from_pretrained(out)
    assert (config.model_type, config.vocab_size, config.num_hidden_layers, config.max_position_embeddings) == (
        "blockzoo_chain",
        checkpoints.VOCAB,
        6,
        256,
    )
    assert not model.training and all(parameter.requires_grad for parameter in model.parameters())
    assert model(IDS, return_dict=False)[0].shape == (2, 9, checkpoints.VOCAB)
    torch.testing.assert_close(model(IDS, logits_to_keep=1).logits, model(IDS).logits[:, -1:])


@torch.inference_mode()
def test_padding_on_the_left_changes_no_answer(model):
    long, short = IDS[:1], IDS[1:, :5]
    padded = torch.cat((long, torch.cat((torch.zeros((1, 4), dtype=torch.int64), short), dim=1)))
    both = model.generate(padded, attention_mask=(padded != 0).long(), **GREEDY)
    assert torch.equal(both[0], model.generate(long, **GREEDY)[0])
    assert torch.equal(both[1, 4:], model.generate(short, **GREEDY)[0])


@pytest.mark.parametrize(
    "how", [{"num_beams": 3}, {"cache_implementation": "static"}, {"prompt_lookup_num_tokens": 2}], ids=str
)
@torch.inference_mode()
def test_ways_to_generate_agree_with_generating_without_a_cache(model, how):
    settings = {**GREEDY, **({"num_beams": 3} if "num_beams" in how else {})}
    assert torch.equal(
        model.generate(IDS[:1], **{**GREEDY, **how}), model.generate(IDS[:1], use_cache=False, **settings)
    )


def arguments(folder, steps):
    return TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=1,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        report_to=[],
        use_cpu=True,
    )


def test_trainer_saves_loads_and_resumes(out, model, tmp_path):
    """Two steps, and one step with a resume for the second, end in the same weights.

    Checkpoints are models of a zoo.
    """
    data = [{"input_ids": IDS[0], "labels": IDS[0]}] * 8
    before = model(IDS).logits.detach()
    callback = importlib.import_module("zoo.integrations").ZooCallback(tmp_path / "zoo", name="t", strict=True)
    Trainer(model=model, args=arguments(tmp_path / "run", 2), train_dataset=data, callbacks=[callback]).train()
    after = model.eval()(IDS).logits
    with Zoo(tmp_path / "zoo") as zoo:
        assert {each.name for each in zoo.models()} == {"t@step-1", "t@step-2"}
        assert torch.equal(zoo.model("t@step-2").load()(IDS).logits, after)
    assert not torch.allclose(before, after)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-2")(IDS).logits, after)
    again = AutoModelForCausalLM.from_pretrained(out)
    Trainer(model=again, args=arguments(tmp_path / "run", 2), train_dataset=data).train(
        resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-1")
    )
    torch.testing.assert_close(again.eval()(IDS).logits, after)


def test_a_lora_of_peft_learns_saves_loads_and_merges(out, model, tmp_path):
    from peft import LoraConfig, PeftModel, get_peft_model

    config = LoraConfig(
        r=4, target_modules=["q_proj", "query_key_value"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    tuned = get_peft_model(model, config)
    tuned(IDS, labels=IDS).loss.backward()
    learning = [parameter for parameter in tuned.parameters() if parameter.requires_grad]
    assert learning and all(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in learning)
    tuned.save_pretrained(tmp_path / "lora")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(out), tmp_path / "lora")
    expected = tuned.eval()(IDS).logits
    assert torch.equal(loaded(IDS).logits, expected)
    assert loaded.generate(input_ids=IDS, **GREEDY).shape == (2, 17)
    loaded.merge_and_unload().save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(IDS).logits, expected, atol=1e-5, rtol=1e-4
    )


def test_lm_eval_runs_on_it_loaded_or_by_its_folder(out, model):
    huggingface = pytest.importorskip("lm_eval.models.huggingface")
    from lm_eval.api.instance import Instance

    asked = [
        Instance("loglikelihood", {}, pair, at)
        for at, pair in enumerate([("def f(x):", " return x"), ("import os", ", sys")])
    ]
    told = [
        huggingface.HFLM(pretrained=given, tokenizer=str(out), batch_size=2, device="cpu").loglikelihood(
            asked, disable_tqdm=True
        )
        for given in (model, str(out))
    ]
    assert told[0] == told[1] and all(score < 0 for score, _ in told[0])


def test_weights_that_stand_twice_learn_apart(tmp_path):
    """A layer that occurs twice has separate weights at each place, as in an exported checkpoint."""
    with Zoo(tmp_path / "zoo") as zoo:
        zoo.ingest(checkpoints.make("llama", tmp_path / "a"), name="a")
        zoo.ingest(checkpoints.make("llama", tmp_path / "n", intermediate_size=48), name="n")
        put_chain(zoo.store, "c", ("a", 0, 2), ("a", 1, 2), ("n", 0, 1))
        model = zoo.model("c").load()
        first, second = (model.stack.weights(at)["self_attn.q_proj.weight"] for at in (3, 5))
        assert torch.equal(first, second) and first.requires_grad
        with torch.no_grad():
            first.zero_()
        assert second.abs().sum() > 0
        assert zoo.model("c").load().stack.weights(3)["self_attn.q_proj.weight"].abs().sum() > 0


def test_what_is_not_offered_is_refused(out, model, tmp_path):
    with pytest.raises(InputError, match="load_in_8bit"):
        AutoModelForCausalLM.from_pretrained(out, load_in_8bit=True)
    with pytest.raises(InputError, match="one device"):
        AutoModelForCausalLM.from_pretrained(out, device_map={"a": "cpu", "b": "meta"})
    with pytest.raises(InputError, match="no dtype"):
        AutoModelForCausalLM.from_pretrained(out, dtype="nn")
    with pytest.raises(ValueError, match="input_ids"):
        model(inputs_embeds=torch.zeros(1, 2, 64))
    with pytest.raises(ValueError, match=r"(gradient|activation) checkpointing"):
        model.gradient_checkpointing_enable()
    with pytest.raises(MalformedCheckpoint, match="no folder"):
        type(model).from_pretrained("someone/chain")
    with pytest.raises(MalformedCheckpoint, match="holds no chain, but 'llama'"):
        type(model).from_pretrained(checkpoints.make("llama", tmp_path / "a", tokenizer=False))
    assert AutoModelForCausalLM.from_pretrained(out, dtype="bfloat16", device_map="cpu").dtype == torch.bfloat16
