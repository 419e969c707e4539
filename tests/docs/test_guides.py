"""Each guide of docs/guides runs as it stands there, on tiny models with the names that it uses."""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.checkpoints import make, tokenizer_files
from tests.docs.guiding import GUIDES, blocks_of, matches, run_guide
from zoo import Zoo

NAMES = ("fifty-fine-tunes", "nightly-batch", "operating", "stand-ins", "stitch", "trainer-to-production", "vllm")
VLLM = os.environ.get("BLOCKZOO_VLLM", "")
METRIC = re.compile(r"\b(?:vllm|blockzoo):\w+")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what guides name: `base`, its fine-tunes `tune` and `tunes/`, the wider `large`, `texts.txt`."""
    root = tmp_path_factory.mktemp("models")
    base = make("llama", root / "base")
    make("llama", root / "large", seed=1, hidden_size=96)
    for number in range(50):
        tuned(base, root / "tunes" / f"tune-{number:02}", number)
    tuned(base, root / "tune", 99)
    lines = [line.strip() for line in Path(functools.__file__).read_text().splitlines()]
    (root / "texts.txt").write_text("\n".join([line for line in lines if len(line) > 20][:200]))
    return root


def tuned(base: Path, folder: Path, seed: int) -> None:
    """Write a fine-tune: the last layer differs from its base."""
    model = AutoModelForCausalLM.from_pretrained(base)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.model.layers[-1].parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(folder)
    tokenizer_files(folder)


@pytest.fixture
def folder(tmp_path: Path, models: Path) -> Path:
    """A fresh folder with the models, as a reader has them."""
    shutil.copytree(models, tmp_path / "here")
    return tmp_path / "here"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "operating"])
def test_a_guide_runs(name: str, folder: Path) -> None:
    if name == "trainer-to-production":
        pytest.importorskip("lm_eval", reason="the eval extra is not installed")
    run_guide(name, folder)


@pytest.mark.skipif(not VLLM, reason="THE GUIDE FOR VLLM RUNS WITHOUT VLLM: BLOCKZOO_VLLM names no Python with vLLM")
def test_the_guide_for_vllm_runs_with_vllm(folder: Path) -> None:
    for name in ("base", "tune"):
        shutil.rmtree(folder / name)
    wide = {"num_hidden_layers": 4, "hidden_size": 128, "intermediate_size": 192}  # it has no narrower heads on CPUs
    tuned(make("llama", folder / "base", **wide), folder / "tune", 1)
    # `vllm serve`, which lacks its package's name on CPUs.
    start = 'shift; model=$1; shift; exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" "$@"'
    settings = "-u PYTHONPATH VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind"
    command = f"env {settings} python={shlex.quote(VLLM)} sh -c {shlex.quote(start)} vllm"
    run_guide("vllm", folder, {"vllm": command}, seconds=600)


def test_the_operating_guide_runs_and_its_dashboard_and_alerts_name_metrics_that_are_served(folder: Path) -> None:
    run_guide("operating", folder)
    served = set(re.findall(r"^# TYPE (\S+)", (folder / "metrics.txt").read_text(), re.MULTILINE))
    dashboard = json.loads((GUIDES / "operating" / "grafana.json").read_text())
    rules = yaml.safe_load((GUIDES / "operating" / "alerts.yml").read_text())["groups"][0]["rules"]
    asked = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked += [rule["expr"] for rule in rules]
    assert len(asked) > 20 and all(METRIC.search(each) or each.startswith("up{") for each in asked)
    named = {re.sub(r"_bucket$", "", name) for each in asked for name in METRIC.findall(each)}
    assert named - served == set()
    assert all(text.count("(") == text.count(")") for text in asked)
    assert len({rule["alert"] for rule in rules}) == len(rules) and all(
        rule["annotations"]["summary"] for rule in rules
    )
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
    assert len(set(places)) == len(places)


@pytest.mark.parametrize("as_said", [True, False])
def test_a_backup_in_the_order_of_the_guide_is_whole_whatever_comes_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, as_said: bool
) -> None:
    page = (GUIDES / "operating.md").read_text()
    catalogue = next(block for block in blocks_of(page) if "live.backup" in block.code)
    files = next(block for block in blocks_of(page) if "cp --archive --update" in block.code)
    monkeypatch.chdir(folder)
    with Zoo("zoo_store") as zoo:
        zoo.ingest("base", name="base")
        (folder / "backup").mkdir()
        for block in (catalogue, files) if as_said else (files, catalogue):
            program = [sys.executable, "-c"] if block is catalogue else ["bash", "-euc"]
            subprocess.run([*program, block.code], check=True)
            if not (folder / "zoo_store" / "came").exists():
                zoo.ingest("tune", name="tune", base="base")
                (folder / "zoo_store" / "came").touch()
    with Zoo("backup") as backup:
        assert sorted(model.name for model in backup.models()) == (["base"] if as_said else ["base", "tune"])
        assert (not backup.verify().damaged) is as_said


def test_every_guide_is_run_and_in_the_index() -> None:
    assert {path.stem for path in GUIDES.glob("*.md")} - {"README"} == set(NAMES)
    index = (GUIDES / "README.md").read_text()
    assert all(f"]({name}.md)" in index for name in NAMES)


def test_blocks_and_their_outputs_are_read_as_they_stand() -> None:
    page = "```sh\na\n```\nprints\n```text\n1 … 3\n…\nlast\n```\n```yaml\nc: d\n```\n```python vllm\nb\n```\n"
    first, second = blocks_of(page)
    assert (first.language, first.code, first.needs) == ("sh", "a\n", "")
    assert (second.language, second.code, second.needs, second.expected) == ("python", "b\n", "vllm", None)
    assert first.expected is not None
    assert matches(first.expected, "1 2 3\nx\ny\nlast\n") and matches(first.expected, "1  2  3\n\nlast")
    assert not matches(first.expected, "1 2 4\nx\nlast") and not matches(first.expected, "1 2 3\nx\nlast\nmore")
    for wrong in ("```text\na\n```\n", "```\na\n```\n"):
        with pytest.raises(ValueError):
            blocks_of(wrong)
