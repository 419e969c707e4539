"""lm-eval's numbers on stored models equal a direct computation with transformers and peft."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgery.evaluation.harness import EvalOptions, evaluate
from surgery.evaluation.items import cloze_items
from surgery.evaluation.record import EVAL, evaluate_stored
from surgery.evaluation.tasks import want
from tests.adapters import KINDS
from tests.checkpoints import make, make_lora, make_peft
from tests.surgery.evaluation.test_items import TEXTS
from zoo import Zoo
from zoo.errors import InputError

pytest.importorskip("lm_eval", reason="the eval extra is not installed")

LIMIT = 6
MODELS = ("base", "lora", "prompt", "prefix")
ALL = ["library_ppl", "library_cloze", "library_recall"]
OPTIONS = EvalOptions(limit=LIMIT, batch_size=4)
#: Context in tokens, less the virtual tokens; lm-eval drops what lies further back.
CONTEXT = {"base": 256, "lora": 256, "prompt": 256 - 5, "prefix": 256 - 6}
#: Texts longer than one context.
LONG = [text * 2 for text in TEXTS]


def texts(subject):
    return LONG


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A store with a base model and adapters of it, and their folders."""
    root = tmp_path_factory.mktemp("family")
    make("llama", root / "base")
    make_lora(root / "base", root / "lora")
    with Zoo(root / "store") as zoo:
        zoo.ingest(root / "base")
        zoo.ingest(root / "lora", base="base")
        for kind in ("prompt", "prefix"):
            make_peft(root / "base", root / kind, KINDS[kind]("llama"))
            zoo.ingest(root / kind, base="base")
        yield zoo, root


@pytest.fixture(scope="module")
def documents(family):
    zoo, _ = family
    return {name: evaluate_stored(zoo, name, ALL, OPTIONS, texts=texts) for name in MODELS}


def reference(root: Path, name: str):
    model = AutoModelForCausalLM.from_pretrained(root / "base").eval()
    if name != "base":
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, root / name).eval()
    return model, AutoTokenizer.from_pretrained(root / "base")


@torch.inference_mode()
def score(model, ids: list[int], of: int) -> float:
    """Return the log-probability of the last `of` IDs after those before them."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, -len(ids) :].double().log_softmax(-1)
    return sum(float(logits[at - 1, ids[at]]) for at in range(len(ids) - of, len(ids)))


def bits_per_byte(model, tokenizer, context: int) -> float:
    """Compute bits per byte as lm-eval does.

    Each token is predicted once, in runs of the model's context, the first after `<s>`; the last run has a full
    context.
    """
    total = 0.0
    for text in LONG[:LIMIT]:
        ids = [tokenizer.bos_token_id, *tokenizer.encode(text)]
        for start in range(0, len(ids) - 1, context):
            end = min(start + context, len(ids) - 1)
            total += score(model, ids[max(0, end - context) : end + 1], end - start)
    return -total / math.log(2) / sum(len(text.encode()) for text in LONG[:LIMIT])


def cloze_accuracy(model, tokenizer, context: int) -> float:
    right = 0
    for item in cloze_items(LONG, 400)[:LIMIT]:
        scores = []
        for choice in item.choices:
            stem, whole = tokenizer.encode(item.context.rstrip()), tokenizer.encode(item.context + choice)
            scores.append(score(model, whole[-context - 1 :], len(whole) - len(stem)))
        right += max(range(4), key=lambda at: scores[at]) == item.answer
    return right / LIMIT


@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_transformers_and_peft(family, documents, name):
    model, tokenizer = reference(family[1], name)
    measured = documents[name]["results"]["results"]
    assert measured["library_cloze"]["acc,none"] == cloze_accuracy(model, tokenizer, CONTEXT[name])
    assert measured["library_ppl"]["bits_per_byte,none"] == pytest.approx(
        bits_per_byte(model, tokenizer, CONTEXT[name]), rel=1e-5
    )


def successor_(model, ids: list[int]) -> None:
    """Make the model generate each of these IDs after the one before it, whatever else it reads."""
    with torch.no_grad():
        for layer in model.model.layers:
            getattr(layer.self_attn.o_proj, "base_layer", layer.self_attn.o_proj).weight.zero_()
            for adapter in getattr(layer.self_attn.o_proj, "lora_B", {}).values():
                adapter.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.lm_head.weight.zero_()
        for before, after in itertools.pairwise(ids):
            model.lm_head.weight[after] += model.model.embed_tokens.weight[before]


@pytest.mark.parametrize("name", MODELS)
def test_a_name_is_right_exactly_when_it_is_generated(family, name):
    model, tokenizer = family[0].model(name).load(), family[0].model(name).tokenizer()
    spoken = tokenizer.encode(".width(")
    assert len(set(spoken)) == len(spoken)
    successor_(model.get_base_model() if hasattr(model, "get_base_model") else model, spoken)
    asked = ["x = self.width(1)\ny = self.width(2)\n", "x = self.depth(1)\ny = self.depth(2)\n", "a.width = a.width\n"]
    done = evaluate(model, tokenizer, want(["library_recall"]), texts=lambda subject: asked)
    assert done.texts["library_recall"]["items"] == 3
    assert done.results["results"]["library_recall"]["exact_match,none"] == pytest.approx(2 / 3)


def test_the_same_run_gives_the_same_document_and_is_kept_once(family, documents):
    zoo, _ = family
    again = evaluate_stored(zoo, "base", ALL, OPTIONS, texts=texts)
    assert {**again, "seconds": 0} == {**documents["base"], "seconds": 0}
    json.dumps(again, allow_nan=False)
    with zoo.store.catalog.reading() as reader:
        kept = reader.documents(EVAL, "base")
    assert [document.value for document in kept] == [again]
    other = evaluate_stored(zoo, "base", ALL[1:2], EvalOptions(limit=2), texts=texts)
    with zoo.store.catalog.reading() as reader:
        assert [document.value for document in reader.documents(EVAL, "base")] == [again, other]


def task_file(folder: Path) -> Path:
    """Write a task of two questions with its data; return the task file."""
    rows = [{"q": "a = ", "options": ["1", "2"], "right": 1}, {"q": "b = ", "options": ["x", "y"], "right": 0}]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": "options",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
    }
    path = folder / "mine.yaml"
    path.write_text(json.dumps(settings))
    return path


def test_a_task_of_ones_own_runs_by_its_file_and_by_its_folder(family, tmp_path, monkeypatch):
    zoo, _ = family
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = task_file(tmp_path)
    model, tokenizer = zoo.model("base").load(), zoo.model("base").tokenizer()
    by_file, by_folder = (evaluate(model, tokenizer, want([str(spec)])) for spec in (path, tmp_path))
    assert by_file.results == by_folder.results
    assert by_file.texts["mine"]["items"] == 2
    path.write_text(path.read_text().replace("{{q}}", "{{q}} "))
    assert evaluate(model, tokenizer, want([str(path)])).texts != by_file.texts, (
        "the digest is of what the model is asked"
    )


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("library_close", "library_close.*near it are.*library_cloze.*built in are library_ppl"),
        ("folder/none.yaml", "no task file folder/none.yaml"),
        ("{broken}", "cannot be loaded"),
        ("{empty}", "no YAML file that names a task"),
    ],
)
def test_tasks_that_do_not_exist_are_refused_in_one_line(family, tmp_path, spec, reason):
    zoo, _ = family
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.yaml").write_text("task: broken\ndataset_path: json\noutput_type: multiple_choice\n")
    spec = spec.format(broken=tmp_path / "broken.yaml", empty=tmp_path / "empty")
    with pytest.raises(InputError, match=reason):
        evaluate_stored(zoo, "base", [spec], OPTIONS, keep=False)


def test_without_lm_eval_the_error_names_the_extra(family, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(InputError, match=r"lm_eval.*blockzoo\[eval\]"):
        evaluate_stored(family[0], "base", ALL, OPTIONS, texts=texts)
