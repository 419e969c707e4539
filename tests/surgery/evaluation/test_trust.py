"""Task files run no code of their author's unless allowed, however they refer to it."""

from __future__ import annotations

import json

import pytest

from surgery.evaluation import trust
from surgery.evaluation.harness import evaluate
from surgery.evaluation.tasks import want
from tests.checkpoints import build, make
from zoo import Zoo
from zoo.errors import InputError

pytest.importorskip("lm_eval", reason="the eval extra is not installed")


def task(folder, text: str = "{{q}}", **more) -> dict:
    """Return the settings of a task of one question, and write its data."""
    data = folder / "rows.jsonl"
    data.write_text(json.dumps({"q": "a = ", "options": ["1", "2"], "right": 1}) + "\n")
    return {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": str(folder / "cache")},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": text,
        "doc_to_choice": "options",
        "doc_to_target": "right",
        "metric_list": [{"metric": "acc"}],
        **more,
    }


def written(folder, settings: dict, tail: str = "", name: str = "mine.yaml"):
    """Write settings as YAML, followed by lines that JSON cannot express."""
    path = folder / name
    path.write_text("\n".join(f"{key}: {json.dumps(value)}" for key, value in settings.items()) + "\n" + tail)
    return path


@pytest.fixture
def canary(tmp_path):
    """A module beside the task file that leaves a file when it is imported or called."""
    (tmp_path / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\n\n\ndef text(doc):\n    return doc['q']\n"
    )
    return tmp_path / "ran"


FUNCTION = "process_docs: !function code.text\n"


def test_a_function_is_refused_and_never_imported(tmp_path, canary):
    path = written(tmp_path, task(tmp_path), FUNCTION)
    with pytest.raises(InputError, match=r"mine\.yaml names the Python function 'code\.text': --allow-code"):
        want([str(path)])
    with pytest.raises(InputError, match="--allow-code"):
        want([str(tmp_path)])
    assert not canary.exists()


def test_so_it_is_where_another_file_is_included(tmp_path, canary):
    (tmp_path / "deep").mkdir()
    written(tmp_path, {}, FUNCTION, "inner.yaml")
    written(tmp_path / "deep", {"include": ["../inner.yaml", "outer.yaml"]}, name="outer.yaml")
    path = written(tmp_path, task(tmp_path, include="deep/outer.yaml"))
    with pytest.raises(InputError, match=r"inner\.yaml names the Python function"):
        want([str(path)])
    assert not canary.exists()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"metric_list": [{"metric": "someone/metric"}]}, "fetches the metric 'someone/metric' as a script"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "fetches the metric 'acc'"),
        ({"dataset_path": "pandas"}, "reads pickles"),
        ({"unsafe_code": True}, "runs what the model writes"),
        ({"task": [{"task": "inner", "dataset_path": "pandas"}]}, "reads pickles"),
    ],
)
def test_other_ways_to_code_are_refused(tmp_path, change, reason):
    path = written(tmp_path, {**task(tmp_path), **change})
    with pytest.raises(InputError, match=reason):
        want([str(path)])
    assert want([str(path)], allow_code=True).code


@pytest.mark.parametrize(
    "text", ["task: !!python/object/apply:os.system ['true']\n", "a: [\n", "a: &a [*a]\n" + "[" * 3000]
)
def test_what_is_no_plain_yaml_is_one_line(tmp_path, text):
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(InputError, match=r"bad\.yaml is no YAML") as raised:
        want([str(tmp_path / "bad.yaml")])
    assert "\n" not in str(raised.value)


def test_a_huge_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(trust, "MOST_BYTES", 100)
    with pytest.raises(InputError, match="larger than"):
        want([str(written(tmp_path, task(tmp_path)))])


@pytest.fixture(scope="module")
def subject(tmp_path_factory):
    root = tmp_path_factory.mktemp("subject")
    with Zoo(root / "store") as zoo:
        zoo.ingest(make("llama", root / "base"), name="base")
        yield build("llama").eval(), zoo.model("base").tokenizer()


ESCAPE = "{{ q.__class__.__mro__[1].__subclasses__() | length }}"


def test_templates_cannot_leave_their_sandbox_unless_allowed(tmp_path, subject):
    path = written(tmp_path, task(tmp_path, ESCAPE))
    with pytest.raises(InputError, match=r"reaches into Python.*--allow-code"):
        evaluate(*subject, want([str(path)]))
    allowed = evaluate(*subject, want([str(path)], allow_code=True))
    harmless = evaluate(*subject, want([str(written(tmp_path, task(tmp_path, "{{ q.strip() | upper }}")))]))
    assert allowed.texts["mine"]["items"] == harmless.texts["mine"]["items"] == 1


def test_allowed_code_runs(tmp_path, canary, subject):
    path = written(tmp_path, task(tmp_path), "doc_to_text: !function code.text\n")
    assert evaluate(*subject, want([str(path)], allow_code=True)).texts["mine"]["items"] == 1
    assert canary.exists()
