"""Hub IDs: what is downloaded from a fake hub on loopback, and each failure as one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from surgery.sources.hub import wanted
from tests.checkpoints import build
from tests.surgery import meta_twin
from tests.surgery.fake_hub import COMMIT, FakeHub, serving
from zoo.errors import InputError, UnsafeCheckpoint

ROOT = Path(__file__).parents[3]
CHILD = """
import sys
from surgery.sources.hub import fetch
from zoo.errors import ZooError
try:
    print(fetch(sys.argv[1], sys.argv[2] or None, bool(sys.argv[3])))
except ZooError as error:
    print(type(error).__name__, error, sep=": ", file=sys.stderr)
    sys.exit(2)
"""

CLI = "import sys; from cli.app import main; main(sys.argv[1:])"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serving(FakeHub()) as running:
        yield running


def environment(tmp_path: Path, url: str, **extra: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "HUGGING", "TRANSFORMERS_"))}
    return kept | {"HF_ENDPOINT": url, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_TELEMETRY": "1", **extra}


def fetch(
    tmp_path: Path, url: str, repo: str, revision: str = "", pickle: str = "", **extra: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CHILD, repo, revision, pickle]
    return subprocess.run(
        command, env=environment(tmp_path, url, **extra), cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def write(folder: Path, *names: str) -> Path:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    return folder


def test_a_repository_is_downloaded_without_what_is_not_the_checkpoint(tmp_path: Path, hub: FakeHub) -> None:
    names = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "chat_template.jinja",
        "README.md",
        "LICENSE",
        "merges.txt",
    ]
    others = [
        "pytorch_model.bin",
        "consolidated.00.pth",
        "original/params.json",
        "onnx/model.onnx",
        "run.py",
        "flax_model.msgpack",
    ]
    hub.repositories["org/tiny"] = write(tmp_path / "repo", *names, *others, "additional_chat_templates/tool.jinja")
    done = fetch(tmp_path, hub.url, "org/tiny", "v1")
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.name == COMMIT
    assert hub.downloads() == {*names, "additional_chat_templates/tool.jinja"}
    assert (folder / "config.json").read_text() == "config.json"


def test_a_second_fetch_without_a_network_finds_the_cache(tmp_path: Path, hub: FakeHub) -> None:
    hub.repositories["org/tiny"] = write(tmp_path / "repo", "config.json", "model.safetensors", "original/config.json")
    first = fetch(tmp_path, hub.url, "org/tiny")
    assert first.returncode == 0, first.stderr
    offline = fetch(tmp_path, hub.url, "org/tiny", HF_HUB_OFFLINE="1")
    assert (offline.returncode, offline.stdout) == (0, first.stdout)
    nobody = fetch(tmp_path, "http://127.0.0.1:9", "org/tiny")
    assert (nobody.returncode, nobody.stdout) == (0, first.stdout)


def test_a_gated_repository_needs_the_token_which_is_never_shown(tmp_path: Path, hub: FakeHub) -> None:
    hub.repositories["org/gated"] = write(tmp_path / "repo", "config.json", "model.safetensors")
    hub.gated.add("org/gated")
    wrong = fetch(tmp_path, hub.url, "org/gated", HF_TOKEN="hf_wrong_token")  # noqa: S106
    assert wrong.returncode == 2
    assert (
        "InputError: org/gated is gated: accept its terms on its hub page, then log in with 'hf auth login'"
        in wrong.stderr
    )
    assert "hf_wrong_token" not in wrong.stdout + wrong.stderr
    right = fetch(tmp_path, hub.url, "org/gated", HF_TOKEN=hub.token)
    assert right.returncode == 0, right.stderr
    assert hub.token not in right.stdout + right.stderr


@pytest.mark.parametrize(
    ("repo", "revision", "extra", "message"),
    [
        ("org/none", "", {}, "InputError: org/none: no folder here and no repository on the hub has this name"),
        ("org/tiny", "v9", {}, "InputError: org/tiny has no revision 'v9'"),
        ("a/b/c", "", {}, "InputError: 'a/b/c' is neither a folder here nor a possible hub id (owner/name)"),
        (
            "org/tiny",
            "",
            {"HF_HUB_OFFLINE": "1"},
            "InputError: org/tiny is not a folder here, the hub cannot be reached",
        ),
        (
            "org/tiny",
            "",
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "InputError: org/tiny is not a folder here, the hub cannot be reached",
        ),
        ("org/pickled", "", {}, "UnsafeCheckpoint: org/pickled has pickled weights only (pytorch_model.bin)"),
        ("org/empty", "", {}, "InputError: org/empty holds no weights at its top"),
    ],
)
def test_each_failure_is_one_line(
    tmp_path: Path, hub: FakeHub, repo: str, revision: str, extra: dict[str, str], message: str
) -> None:
    hub.repositories["org/tiny"] = write(tmp_path / "tiny", "config.json", "model.safetensors")
    hub.repositories["org/pickled"] = write(tmp_path / "pickled", "config.json", "pytorch_model.bin")
    hub.repositories["org/empty"] = write(tmp_path / "empty", "config.json", "original/consolidated.00.pth")
    done = fetch(tmp_path, hub.url, repo, revision, **extra)
    assert done.returncode == 2
    lines = [line for line in done.stderr.splitlines() if line.startswith(("InputError", "UnsafeCheckpoint"))]
    assert len(lines) == 1
    assert lines[0].startswith(message)
    assert "Traceback" not in done.stderr
    assert not hub.downloads()


def test_pickles_are_downloaded_when_allowed(tmp_path: Path, hub: FakeHub) -> None:
    hub.repositories["org/pickled"] = write(tmp_path / "repo", "config.json", "pytorch_model.bin", "training_args.bin")
    done = fetch(tmp_path, hub.url, "org/pickled", pickle="yes")
    assert done.returncode == 0, done.stderr
    assert hub.downloads() == {"config.json", "pytorch_model.bin"}


def test_names_that_look_like_patterns_stand_for_themselves(tmp_path: Path, hub: FakeHub) -> None:
    hub.repositories["org/odd"] = write(
        tmp_path / "repo", "model.safetensors", "config[1].json", "original/config1.json"
    )
    done = fetch(tmp_path, hub.url, "org/odd")
    assert done.returncode == 0, done.stderr
    assert hub.downloads() == {"model.safetensors", "config[1].json"}


def test_wanted_files_of_each_kind_of_repository() -> None:
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "model.safetensors.index.json"]
    assert set(wanted([*shards, "consolidated.safetensors", "pytorch_model.bin"], "x")) == set(shards)
    meta = ["params.json", "consolidated.00.pth", "consolidated.01.pth", "tokenizer.model", "checklist.chk"]
    assert set(wanted(meta, "x")) == set(meta) - {"checklist.chk"}
    assert set(wanted(["adapter_model.safetensors", "adapter_config.json", "optimizer.pt"], "x")) == {
        "adapter_model.safetensors",
        "adapter_config.json",
    }
    with pytest.raises(UnsafeCheckpoint):
        wanted(["pytorch_model-00001-of-00001.bin", "config.json"], "x")
    with pytest.raises(InputError, match="no weights"):
        wanted(["config.json", "model.onnx"], "x")
    ggufs = ["a-Q4_0.gguf", "b-Q8_0.gguf", "README.md"]
    assert set(wanted(ggufs[1:], "x")) == set(ggufs[1:])
    assert set(wanted([*ggufs, "model.safetensors"], "x", gguf="a-Q4_0.gguf")) == {"a-Q4_0.gguf", "README.md"}
    assert "b-Q8_0.gguf" not in wanted([*ggufs, "model.safetensors"], "x")
    assert "pytorch_model.bin" in wanted([*ggufs, "pytorch_model.bin"], "x", allow_pickle=True)
    with pytest.raises(InputError, match=r"say which with --file \(a-Q4_0.gguf, b-Q8_0.gguf\)"):
        wanted(ggufs, "x")
    with pytest.raises(InputError, match=r"holds no GGUF file 'c\.gguf'"):
        wanted(ggufs, "x", gguf="c.gguf")


def zoo_command(tmp_path: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", CLI, *arguments, "--store", str(tmp_path / "store"), "--json"]
    return subprocess.run(
        command, env=environment(tmp_path, url), cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_the_command_of_the_card_ingests_metas_repository(tmp_path: Path, hub: FakeHub) -> None:
    """`zoo ingest meta-llama/Llama-2-7b` ingests a repository in Meta's layout; the model is then found as `7b`."""
    model = build("llama", intermediate_size=192, vocab_size=600, rms_norm_eps=1e-5, dtype="bfloat16")
    hub.repositories["meta-llama/Llama-2-7b"] = meta_twin.write_meta(model, tmp_path / "repo", shards=2)
    done = zoo_command(tmp_path, hub.url, "ingest", "meta-llama/Llama-2-7b")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["model"], report["kind"], report["family"]) == ("meta-llama/Llama-2-7b", "foundation", "llama")
    # Equal tensors count once; a new model's norms are all ones.
    distinct = [tensor for key, tensor in model.state_dict().items() if "norm" not in key]
    assert report["tensors"] == {"total": len(distinct) + 1, "new": len(distinct) + 1}
    shown = zoo_command(tmp_path, hub.url, "show", "7b")
    assert shown.returncode == 0, shown.stderr
    assert json.loads(shown.stdout)["name"] == "meta-llama/Llama-2-7b"


def test_the_command_fails_with_one_line(tmp_path: Path, hub: FakeHub) -> None:
    done = zoo_command(tmp_path, hub.url, "ingest", "meta-llama/Llama-9-7b")
    assert (done.returncode, done.stdout) == (2, "")
    assert [line for line in done.stderr.splitlines() if line.startswith("zoo: ")] == done.stderr.splitlines()[-1:]
    assert "no repository on the hub has this name" in done.stderr
