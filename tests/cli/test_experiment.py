"""`zoo experiment` as scripts use it: one document, a plot, and one line per error."""

from __future__ import annotations

import json
import shutil

import pytest

import cli.app
from tests.checkpoints import make
from tests.surgery.evaluation.test_items import source
from tests.surgery.helpers import edit_weights
from zoo import Zoo

SMALL = ("--windows", "3", "--length", "16", "--lines", "0", "--batch-size", "2")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """Two models of one shape, one of another, and a text."""
    root = tmp_path_factory.mktemp("family")
    make("llama", root / "base")
    shutil.copytree(root / "base", root / "tuned")
    edit_weights(root / "tuned", lambda key, tensor: tensor * 1.5 if ".layers.0." in key else tensor)
    make("llama", root / "deep", num_hidden_layers=4)
    with Zoo(root / "zoo_store") as zoo:
        for name in ("base", "tuned", "deep"):
            zoo.ingest(root / name, f"org/{name}")
    (root / "text.jsonl").write_text("".join(json.dumps({"text": source(seed)}) + "\n" for seed in range(40)))
    return root


@pytest.fixture
def zoo(family, tmp_path, monkeypatch, capsys):
    """Run the command with this verb only, in a folder of its own."""
    monkeypatch.setattr(cli.app, "VERBS", {"experiment": "cli.experiment", "ls": "cli.ls"})
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main(
                [
                    "experiment",
                    *map(str, arguments),
                    "--text",
                    str(family / "text.jsonl"),
                    "--store",
                    str(family / "zoo_store"),
                ]
            )
        printed = capsys.readouterr()
        return int(ended.value.code or 0), printed.out, printed.err

    return run


def test_sharing_gives_a_document_and_a_plot_and_says_what_the_first_layer_costs(zoo, tmp_path):
    code, out, _ = zoo("sharing", "base", "tuned", *SMALL, "--counts", "1", "--json", "--no-store")
    assert code == 0
    document = json.loads(out)
    stem = tmp_path / "zoo_experiments" / next(path.stem for path in (tmp_path / "zoo_experiments").glob("*.png"))
    assert stem.name.startswith("sharing-org--base-org--tuned")
    assert json.loads(stem.with_suffix(".json").read_text()) == document
    assert stem.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    changes = [point["loss"]["difference"] for point in document["points"]]
    assert changes[0] != 0 and changes[1:] == [0.0, 0.0], "only the first layer differs between these two"


def test_switching_is_drawn_kept_and_printed(zoo, family):
    code, out, err = zoo("switching", "base", "tuned", *SMALL, "--start", "0,1", "--every", "1,2")
    assert (code, out.count("switched")) == (0, 4)
    assert ".png" in err
    with Zoo(family / "zoo_store") as opened, opened.store.catalog.reading() as reader:
        assert [found.value["experiment"] for found in reader.documents("experiment", "org/tuned")] == ["switching"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("sharing", "base", "deep"), "model a has 3 layers and b 4"),
        (("sharing", "base", "nobody"), "no model 'nobody'"),
        (("sharing", "base", "tuned", "--counts", "1,x"), "--counts takes whole numbers"),
        (("sharing", "base", "tuned", "--counts", "9"), "9 layers in a row cannot be shared"),
        (("switching", "base", "tuned", "--start", "3"), "behind layer 3 nothing can be switched"),
        (("sharing", "base", "tuned", "--surrogates", "tuned"), "stands in for no layer"),
        (("sharing", "base", "tuned", "--windows", "0"), "at least one"),
        (("sharing", "base", "tuned", "--tasks", "no_such_task_at_all"), "there is no task 'no_such_task_at_all'"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(zoo, tmp_path, arguments, reason):
    code, out, err = zoo(*arguments)
    assert (code, out) == (2, "")
    assert reason in err and err.startswith("zoo: ") and err.count("\n") == 1
    assert not list(tmp_path.glob("zoo_experiments/*.png"))
