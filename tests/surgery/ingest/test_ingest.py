"""Ingest, export and removal as users see them: the same bytes come out, and what models share is stored once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import zoo as zoo_package
from tests.checkpoints import CONFIGS, VARIANTS
from tests.surgery.helpers import edit_weights, files_of, spans, stored
from zoo import Zoo
from zoo.errors import InputError, InUse, NameTaken, NotFound, WrongBase
from zoo.objects.headers import read_header

ROUND_TRIPS = [(name, {}) for name in (*CONFIGS, *VARIANTS)]
ROUND_TRIPS += [(name, {"dtype": "bfloat16", "shards": "60KB"}) for name in CONFIGS]


@pytest.mark.parametrize(("name", "options"), ROUND_TRIPS)
def test_export_gives_back_every_byte(zoo, made, tmp_path, name, options):
    folder = made(name, **options)
    report = zoo.ingest(folder, name=name)
    exported = zoo.model(name).export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)
    assert list(exported.files) == sorted(files_of(folder))
    assert exported.bytes == sum(len(data) for data in files_of(folder).values())
    assert (report.kind, report.base, report.blocks) == ("foundation", None, 1)
    assert report.tensors.new == report.tensors.total > 0
    assert report.bytes.new == report.bytes.total
    if options:
        assert (folder / "model.safetensors.index.json").exists()


@pytest.mark.parametrize("name", ["llama", "gpt_neox", "mixtral"])
def test_an_export_loads_in_stock_transformers(zoo, made, tmp_path, name):
    import torch
    from transformers import AutoModelForCausalLM

    zoo.ingest(made(name, shards="60KB"), name=name)
    zoo.model(name).export(tmp_path / "out")
    ours, theirs = (
        AutoModelForCausalLM.from_pretrained(folder) for folder in (tmp_path / "out", made(name, shards="60KB"))
    )
    for (key, mine), (other, their) in zip(ours.state_dict().items(), theirs.state_dict().items(), strict=True):
        assert key == other
        assert torch.equal(mine, their)


def test_nested_and_unusual_side_files_come_back_and_leftovers_of_training_do_not(zoo, copied, tmp_path):
    folder = copied("llama")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}\n")
    (folder / "LICENSE").write_bytes(b"\xff\x00 not text")
    (folder / ".gitattributes").write_text("* text\n")
    kept = files_of(folder)
    for leftover in ("optimizer.pt", "pytorch_model.bin", "model.gguf", "events.out.tfevents.1"):
        (folder / leftover).write_bytes(b"x")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "config.json").write_text("{}")
    report = zoo.ingest(folder, name="m")
    zoo.model("m").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == kept
    assert any("optimizer.pt" in note or "4 files" in note for note in report.notes)


def test_the_same_again_adds_nothing_and_succeeds(zoo, made):
    zoo.ingest(made("llama"), name="base")
    before = stored(zoo.store)
    report = zoo.ingest(made("llama"), name="base")
    assert stored(zoo.store) == before
    assert (report.tensors.new, report.bytes.new, report.kind) == (0, 0, "foundation")


def test_the_same_again_keeps_its_kind_when_others_were_made_from_it(zoo, made, copied):
    zoo.ingest(made("llama"), name="base")
    tuned = copied("llama", "tuned")
    edit_weights(tuned, lambda key, tensor: tensor + 1 if ".layers.1." in key else tensor)
    assert zoo.ingest(tuned).base == "base"
    assert zoo.ingest(made("llama"), name="base").kind == "foundation"


def test_a_name_holds_one_model(zoo, made, copied):
    zoo.ingest(made("llama"), name="m")
    before = stored(zoo.store)
    other_layout = copied("llama", "other", seed=5)
    other_file = copied("llama", "side")
    (other_file / "README.md").write_text("another")
    for folder in (other_layout, other_file, made("gpt2")):
        with pytest.raises(NameTaken, match="'m'"):
            zoo.ingest(folder, name="m")
        assert stored(zoo.store) == before


def test_a_fine_tune_costs_its_changed_layers_and_cuts_only_there(zoo, made, copied):
    """Components: embedding, then attention and FFN of three layers, then the head; layer 1 is components 3 and 4."""
    zoo.ingest(made("llama"), name="base")
    tuned = copied("llama", "tuned")
    changed = edit_weights(tuned, lambda key, tensor: tensor + 0.5 if ".layers.1." in key else tensor)
    entries = {entry.key: entry for entry in read_header(tuned / "model.safetensors").entries}
    objects = stored(zoo.store)["objects"]
    report = zoo.ingest(tuned)
    added = stored(zoo.store)["objects"] - objects
    distinct = report.tensors.new
    assert report.bytes.new <= sum(entries[key].nbytes for key in changed)
    assert len(added) == distinct == len(changed) - 1, "both norms of the layer are equal, all else is distinct"
    headers = sum(zoo.store.objects.path(digest).stat().st_size for digest in added) - report.bytes.new
    assert headers <= 256 * len(added)
    assert (report.kind, report.base) == ("full", "base")
    assert spans(zoo, "base") == spans(zoo, "tuned") == [(0, 3), (3, 5), (5, 8)]
    shared = [block.shared_with for block in zoo.model("tuned").chain]
    assert shared == [("base",), (), ("base",)]


def test_removal_joins_blocks_again_and_gc_frees_what_only_it_used(zoo, made, copied):
    zoo.ingest(made("llama"), name="base")
    before = stored(zoo.store)
    tuned = copied("llama", "tuned")
    edit_weights(tuned, lambda key, tensor: tensor + 0.5 if ".layers.1." in key else tensor)
    zoo.ingest(tuned)
    with pytest.raises(InUse, match="tuned"):
        zoo.remove("base")
    assert zoo.remove("tuned") == "tuned"
    assert spans(zoo, "base") == [(0, 8)]
    assert zoo.gc(dry_run=True) == zoo.gc()
    assert stored(zoo.store) == before


def test_the_base_is_the_model_that_shares_most(zoo, made, copied):
    zoo.ingest(made("llama"), name="base")
    first = copied("llama", "first")
    edit_weights(first, lambda key, tensor: tensor + 0.5 if ".layers." in key else tensor)
    zoo.ingest(first)
    second = Path(shutil.copytree(first, first.parent / "second"))
    edit_weights(second, lambda key, tensor: tensor + 0.5 if ".layers.0." in key else tensor)
    assert zoo.ingest(second).base == "first"
    twin = copied("llama", "twin")
    (twin / "README.md").write_text("another")
    assert zoo.ingest(twin).base == "base"


def test_norms_of_ones_do_not_make_a_parent(zoo, made):
    """Two models from different seeds share only norms with their initial values."""
    zoo.ingest(made("llama"), name="a")
    report = zoo.ingest(made("llama", seed=9), name="b")
    assert report.tensors.new < report.tensors.total
    assert (report.kind, report.base) == ("foundation", None)


def test_a_base_may_be_named_and_must_be_of_the_family(zoo, made):
    zoo.ingest(made("llama"), name="org/base-7b")
    assert zoo.ingest(made("llama", seed=9), name="b", base="7b").base == "org/base-7b"
    with pytest.raises(WrongBase, match="gpt2"):
        zoo.ingest(made("gpt2"), name="c", base="b")
    with pytest.raises(NotFound):
        zoo.ingest(made("gpt2"), name="c", base="nobody")


def test_a_checkpoint_that_differs_in_biases_only_is_bitfit(zoo, made, copied):
    zoo.ingest(made("opt"), name="base")
    tuned = copied("opt", "tuned")
    changed = edit_weights(tuned, lambda key, tensor: tensor + 0.5 if key.endswith(".bias") else tensor)
    report = zoo.ingest(tuned)
    assert (report.kind, report.base) == ("bitfit", "base")
    assert 0 < report.tensors.new <= len(changed)


def test_metadata_and_key_order_of_a_file_survive(zoo, copied, tmp_path):
    folder = copied("llama")
    edit_weights(folder, lambda key, tensor: tensor, {"format": "pt", "zz": "1", "note": "ü"})
    kept = files_of(folder)
    zoo.ingest(folder, name="m")
    zoo.model("m").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == kept


def test_keys_that_no_module_reads_are_kept_for_export_only(zoo, copied, tmp_path):
    import torch
    from safetensors.torch import load_file, save_file

    folder = copied("gpt2")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer.h.0.attn.bias"] = torch.ones(1, 1, 8, 8)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    zoo.ingest(folder, name="m")
    names = [name for placed in zoo.model("m").manifest.components for name, _ in placed.component.tensors]
    assert "attn.bias" not in names
    zoo.model("m").export(tmp_path / "out")
    assert files_of(tmp_path / "out") == files_of(folder)


def test_pickles_need_the_switch_and_come_back_as_safetensors(zoo, made, copied, tmp_path):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    folder = copied("llama")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)
    parts = {"pytorch_model-00001-of-00002.bin": keys[:9], "pytorch_model-00002-of-00002.bin": keys[9:]}
    for file, held in parts.items():
        torch.save({key: tensors[key] for key in held}, folder / file)
    table = {key: file for file, held in parts.items() for key in held}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": table}))
    report = zoo.ingest(folder, name="m", allow_pickle=True)
    assert any("pickled" in note for note in report.notes)
    zoo.model("m").export(tmp_path / "out")
    assert sorted(path.name for path in (tmp_path / "out").glob("*model*")) == [
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
    ]
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in tensors.items())
    assert zoo.ingest(made("llama"), name="plain").tensors.new == 0


def test_an_ingest_loads_neither_torch_nor_transformers(made, tmp_path):
    code = (
        "import sys; from zoo import Zoo\n"
        "with Zoo(sys.argv[1]) as zoo: zoo.model(zoo.ingest(sys.argv[2]).model).export(sys.argv[3])\n"
        "heavy = {'torch', 'transformers', 'numpy', 'peft'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    arguments = [sys.executable, "-c", code, str(tmp_path / "z"), str(made("llama")), str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(Path(zoo_package.__file__).parents[1])}
    done = subprocess.run(arguments, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("what", ["file", "full folder", "link"])
def test_an_export_never_writes_over_anything(zoo, made, tmp_path, what):
    zoo.ingest(made("llama"), name="m")
    target = tmp_path / "out"
    if what == "file":
        target.write_text("mine")
    elif what == "full folder":
        target.mkdir()
        (target / "mine").write_text("mine")
    else:
        (tmp_path / "elsewhere").mkdir()
        target.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="not an empty folder"):
        zoo.model("m").export(target)
    assert not list((tmp_path / "elsewhere").iterdir()) if what == "link" else True


def test_an_export_appears_whole_or_not_at_all(zoo, made, tmp_path):
    from zoo.errors import DamagedObject

    zoo.ingest(made("llama"), name="m")
    digest = zoo.model("m").manifest.weight_files[0].entries[-1][1]
    path = zoo.store.objects.path(digest)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    (tmp_path / "outs" / "m").mkdir(parents=True)
    with pytest.raises(DamagedObject, match="m"):
        zoo.model("m").export(tmp_path / "outs" / "m")
    assert [path.name for path in (tmp_path / "outs").iterdir()] == ["m"]
    assert not list((tmp_path / "outs" / "m").iterdir())


def test_the_default_name_is_the_folders_or_the_hub_id(zoo: Zoo):
    from surgery.ingest.ingest import default_name

    assert default_name("/models/llama-7b") == "llama-7b"
    assert default_name("meta-llama/Llama-2-7b@main") == "meta-llama/Llama-2-7b"
    assert default_name("/cache/models--org--name/snapshots/0123abc") == "org/name"
