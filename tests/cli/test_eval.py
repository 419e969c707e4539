"""`zoo eval` as scripts use it: one JSON document, stored unless told otherwise, and one line per error."""

from __future__ import annotations

import json
import shutil

import pytest

import cli.app
from zoo import Zoo

pytest.importorskip("lm_eval", reason="the eval extra is not installed")


@pytest.fixture
def zoo(store, tmp_path, monkeypatch, capsys):
    """Run the command with this verb only, on a store of the test's own."""
    monkeypatch.setattr(cli.app, "VERBS", {"eval": "cli.eval", "ls": "cli.ls"})
    shutil.copytree(store, tmp_path / "zoo_store")

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main([*map(str, arguments), "--store", str(tmp_path / "zoo_store")])
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def kept(tmp_path):
    with Zoo(tmp_path / "zoo_store") as opened, opened.store.catalog.reading() as reader:
        return reader.documents("eval")


def test_one_document_comes_out_and_is_kept_unless_told_otherwise(zoo, tmp_path):
    arguments = ("eval", "lora", "--limit", "2", "--json", "--tasks", "library_cloze", "library_recall_mail")
    code, out, err = zoo(*arguments, "--no-store")
    assert (code, kept(tmp_path)) == (0, [])
    assert "it/s" not in err, "no bars where there is no terminal"
    document = json.loads(out)
    assert document["model"] == "org/lora"
    assert document["tasks"] == ["library_cloze", "library_recall_mail"]
    assert set(document["results"]["results"]) == {"library_cloze", "library_recall_mail"}
    assert document["results"]["n-samples"]["library_cloze"]["effective"] == 2
    code, out, _ = zoo(*arguments)
    assert code == 0
    assert [found.value for found in kept(tmp_path)] == [json.loads(out)]
    code, out, _ = zoo("eval", "lora", "--limit", "2", "--tasks", "library_cloze,library_recall_mail")
    assert code == 0 and "exact_match" in out and len(kept(tmp_path)) == 1


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("nobody", "--tasks", "library_ppl"), "no model 'nobody'"),
        (("base", "--tasks", "no_such_task_at_all"), "there is no task 'no_such_task_at_all'; built in are"),
        (("base", "--tasks", "{code}"), "--allow-code"),
        (("base", "--limit", "2.5"), "--limit takes"),
        (("base", "--batch-size", "many"), "--batch-size takes"),
        (("bare", "--tasks", "library_ppl"), "tokenizer"),
        (("base", "--device", "abacus"), "device 'abacus' cannot be used"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(zoo, tmp_path, arguments, reason):
    (tmp_path / "code.yaml").write_text("task: mine\nprocess_docs: !function code.text\n")
    code, out, err = zoo("eval", *(each.format(code=tmp_path / "code.yaml") for each in arguments))
    assert (code, out) == (2, "")
    assert reason in err and err.startswith("zoo: ") and err.count("\n") == 1
    assert kept(tmp_path) == []
