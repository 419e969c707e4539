"""The store's verbs as scripts use them: exit codes, one JSON document on standard output, one line per error."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cli.app
from tests.checkpoints import make, make_lora
from tests.surgery.gguf_twin import tiny_model, write_gguf
from tests.surgery.helpers import edit_weights, files_of

MINE = ("ingest", "ls", "show", "rm", "export", "verify", "gc")


@dataclass(frozen=True)
class Result:
    """Exit code and output of one run of the command."""

    returncode: int
    stdout: str
    stderr: str


Runner = Callable[..., Result]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model, a fine-tune of its middle layer and a LoRA, as checkpoints."""
    root = tmp_path_factory.mktemp("family")
    make("llama", root / "base")
    shutil.copytree(root / "base", root / "tuned")
    edit_weights(root / "tuned", lambda key, tensor: tensor + 0.5 if ".layers.1." in key else tensor)
    make_lora(root / "base", root / "lora", layers_to_transform=[1], base_name="org/base-7b")
    return root


@pytest.fixture
def zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Runner:
    """Run the command in this process, in `tmp_path`, with the store's verbs only."""
    monkeypatch.setattr(cli.app, "VERBS", {verb: cli.app.VERBS[verb] for verb in MINE})
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str | Path, store: bool = True) -> Result:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.app.main([*map(str, arguments), *(["--store", str(tmp_path / "zoo_store")] if store else [])])
        printed = capsys.readouterr()
        return Result(int(ended.value.code or 0), printed.out, printed.err)

    return run


def _json(result: Result) -> Any:
    assert result.returncode in (0, 1), result.stderr
    return json.loads(result.stdout)


def test_every_verb_is_in_the_table_of_verbs():
    assert {verb: cli.app.VERBS[verb] for verb in MINE} == {verb: f"cli.{verb}" for verb in MINE}


def test_as_a_process_it_has_the_same_exit_codes_and_little_memory(family, tmp_path):
    start = f"import cli.app as app; app.VERBS = {{verb: app.VERBS[verb] for verb in {MINE!r}}}; app.main()"
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(cli.__file__).parents[1]),
        "ZOO_STORE": str(tmp_path / "zoo_store"),
    }

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", start, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    report = json.loads(run("ingest", str(family / "base"), "--json").stdout)
    assert 20e6 < report["peak_rss_bytes"] < 300e6, "neither torch nor the process that started this one counts"
    refused = run("show", "nobody")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr == "zoo: no model 'nobody'; the zoo has base\n"


def test_a_family_goes_in_is_shown_and_comes_out(zoo, family, tmp_path):
    base = _json(zoo("ingest", family / "base", "--name", "org/base-7b", "--json"))
    assert base.keys() >= {
        "model",
        "kind",
        "base",
        "family",
        "components",
        "blocks",
        "tensors",
        "bytes",
        "seconds",
        "peak_rss_bytes",
    }
    assert (base["model"], base["kind"], base["base"], base["family"]) == ("org/base-7b", "foundation", None, "llama")
    assert (base["components"], base["blocks"]) == (8, 1)
    assert base["tensors"] == {"total": 24, "new": 24}
    assert base["bytes"]["total"] == base["bytes"]["new"] > 0
    tuned = _json(zoo("ingest", family / "tuned", "--json"))
    assert (tuned["kind"], tuned["base"], tuned["blocks"]) == ("full", "org/base-7b", 3)
    lora = _json(zoo("ingest", family / "lora", "--json"))
    assert (lora["kind"], lora["base"], lora["components"]) == ("lora", "org/base-7b", 8)

    listed = _json(zoo("ls", "--json"))
    fields = {"name", "kind", "base", "family", "params", "blocks", "bytes", "bytes_own"}
    assert [model["name"] for model in listed["models"]] == ["lora", "org/base-7b", "tuned"]
    assert all(model.keys() >= fields for model in listed["models"])
    assert listed["store"].keys() >= {"objects", "bytes_stored", "bytes_logical"}
    assert listed["store"]["bytes_stored"] < listed["store"]["bytes_logical"]

    shown = _json(zoo("show", "7b", "--json"))
    assert (shown["name"], shown["kind"], shown["base"]) == ("org/base-7b", "foundation", None)
    assert [block["layers"] for block in shown["chain"]] == [[0, 1], [1, 2], [1, 2], [2, 3]]
    assert [block["shared_with"] for block in shown["chain"]] == [["lora", "tuned"], [], ["lora"], ["lora", "tuned"]]
    assert [[c["kind"] for c in block["components"]] for block in shown["chain"]][1:3] == [["attention"], ["ffn"]]
    assert all(block["equivalents"] == [] and len(block["block"]) == 64 for block in shown["chain"])
    assert all(len(c["digest"]) == 64 for block in shown["chain"] for c in block["components"])

    exported = _json(zoo("export", "lora", tmp_path / "out", "--json"))
    assert files_of(tmp_path / "out") == files_of(family / "lora")
    assert exported == {
        "model": "lora",
        "files": sorted(files_of(family / "lora")),
        "bytes": sum(map(len, files_of(family / "lora").values())),
    }

    assert zoo("rm", "7b").returncode == 2
    assert _json(zoo("rm", "lora", "--json")) == {"removed": "lora"}
    dry = _json(zoo("gc", "--dry-run", "--json"))
    assert dry["objects_removed"] > 0
    assert _json(zoo("gc", "--json")) == dry
    assert _json(zoo("gc", "--json")) == {"objects_removed": 0, "bytes_removed": 0}


def test_verify_finds_a_flipped_byte_names_the_models_and_exits_with_1(zoo, family, tmp_path):
    zoo("ingest", family / "base")
    sound = zoo("verify", "--json")
    assert sound.returncode == 0
    assert _json(sound)["damaged"] == []
    path = next((tmp_path / "zoo_store" / "objects").glob("??/*"))
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    damaged = zoo("verify", "--json")
    assert damaged.returncode == 1
    assert _json(damaged)["damaged"] == [{"digest": path.name, "models": ["base"]}]
    spoken = zoo("verify")
    assert spoken.returncode == 1
    assert "base" in spoken.stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("ingest", "no/such/folder"), "no folder"),
        (("ingest", "."), "not a checkpoint"),
        (("show", "nobody"), "the zoo is empty"),
        (("rm", "nobody"), "the zoo is empty"),
        (("export", "nobody", "out"), "the zoo is empty"),
    ],
)
def test_bad_input_is_exit_code_2_and_one_line(zoo, tmp_path, arguments, reason):
    from zoo import Zoo

    Zoo(tmp_path / "zoo_store").close()
    result = zoo(*arguments)
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert reason in result.stderr


@pytest.mark.parametrize(
    "arguments", [("ls",), ("show", "x"), ("verify",), ("gc",), ("rm", "x"), ("export", "x", "out")]
)
def test_reading_verbs_do_not_make_a_store(zoo, tmp_path, arguments):
    result = zoo(*arguments)
    assert (result.returncode, result.stdout) == (2, "")
    assert "there is no store" in result.stderr
    assert not (tmp_path / "zoo_store").exists()


def test_bad_usage_is_exit_code_2(zoo):
    assert zoo("ingest").returncode == 2
    assert zoo("ls", "--no-such-option").returncode == 2


def test_an_ambiguous_ending_lists_the_candidates(zoo, family):
    zoo("ingest", family / "base", "--name", "a/7b")
    zoo("ingest", family / "base", "--name", "b/7b")
    result = zoo("show", "7b")
    assert result.returncode == 2
    assert "a/7b" in result.stderr
    assert "b/7b" in result.stderr


def test_what_people_read_is_on_standard_output_and_notes_are_not(zoo, family):
    for name in ("base", "tuned"):
        spoken = zoo("ingest", family / name)
        assert spoken.returncode == 0
        assert spoken.stderr == ""
    assert "full of base" in spoken.stdout
    assert "saved by sharing" in zoo("ls").stdout
    assert "no other model" in zoo("show", "tuned").stdout


def test_the_store_and_the_catalogue_can_be_elsewhere(zoo, family, tmp_path, monkeypatch):
    monkeypatch.setenv("ZOO_STORE", str(tmp_path / "other"))
    url = f"sqlite:///{tmp_path / 'catalogue.db'}"
    assert zoo("ingest", family / "base", "--database", url, store=False).returncode == 0
    assert (tmp_path / "catalogue.db").exists()
    assert not (tmp_path / "other" / "catalog.sqlite").exists()
    listed = _json(zoo("ls", "--json", "--database", url, store=False))
    assert [model["name"] for model in listed["models"]] == ["base"]


def test_a_gguf_file_goes_in_and_comes_out_the_same(zoo: Runner, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    folder.mkdir()
    for kind in ("Q4_0", "Q8_0"):
        write_gguf(tiny_model("llama"), folder / f"m-{kind}.gguf", kind)
    several = zoo("ingest", folder)
    assert several.returncode == 2 and "say which with --file (m-Q4_0.gguf, m-Q8_0.gguf)" in several.stderr
    report = json.loads(zoo("ingest", folder, "--file", "m-Q8_0.gguf", "--dtype", "bfloat16", "--json").stdout)
    assert (report["model"], report["family"]) == ("quantised", "llama")
    assert zoo("export", "quantised", "out").returncode == 0
    assert files_of(tmp_path / "out") == {"m-Q8_0.gguf": (folder / "m-Q8_0.gguf").read_bytes()}
    broken = folder / "m-Q4_0.gguf"
    broken.write_bytes(broken.read_bytes()[:-100])
    refused = zoo("ingest", broken)
    assert refused.returncode == 2 and refused.stderr.count("\n") == 1
    assert "m-Q4_0.gguf: the file is truncated" in refused.stderr


def test_export_for_vllm_writes_no_weights_and_refuses_a_card(zoo, family, tmp_path):
    zoo("ingest", str(family / "base"), "--name", "org/base")
    out = tmp_path / "out"
    done = zoo("export", "org/base", str(out), "--for", "vllm", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report["files"] == sorted(path.name for path in out.iterdir())
    assert "blockzoo.json" in report["files"] and not [each for each in report["files"] if "safetensors" in each]
    refused = zoo("export", "org/base", str(tmp_path / "other"), "--for", "vllm", "--card")
    assert refused.returncode == 2 and "--card" in refused.stderr and not (tmp_path / "other").exists()
