"""Broken or malicious checkpoints in Meta's layout: refused in one line, no code run, nothing left in the store."""

from __future__ import annotations

import json
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from surgery.sources.meta import open_meta
from tests.surgery import meta_twin
from zoo.errors import InputError, MalformedCheckpoint, UnsafeCheckpoint

torch = pytest.importorskip("torch")


class Payload:
    """A pickle that runs a command when loaded."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return (os.system, (self.command,))


def test_a_malicious_pickle_is_refused_and_not_run(tmp_path: Path) -> None:
    folder = meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta")
    trace = tmp_path / "it-ran"
    torch.save({"tok_embeddings.weight": Payload(f"touch {trace}")}, folder / "consolidated.00.pth")
    with pytest.raises(
        UnsafeCheckpoint, match=r"^consolidated\.00\.pth holds more than tensors; it was refused"
    ) as caught:
        open_meta(folder)
    assert "\n" not in str(caught.value)
    assert not trace.exists()


def edit_params(folder: Path, **changes: Any) -> None:
    params = json.loads((folder / "params.json").read_text()) | changes
    (folder / "params.json").write_text(json.dumps(params))


def edit_state(folder: Path, change: Any, number: int = 0) -> None:
    path = folder / f"consolidated.{number:02d}.pth"
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path)


BROKEN: dict[str, tuple[Any, str]] = {
    "params not JSON": (lambda f: (f / "params.json").write_text("{"), "params.json"),
    "params NaN": (lambda f: (f / "params.json").write_text('{"dim": NaN}'), "params.json"),
    "params list": (lambda f: (f / "params.json").write_text("[]"), "params.json"),
    "no dim": (lambda f: edit_params(f, dim=None), "dim must be a whole number"),
    "bool layers": (lambda f: edit_params(f, n_layers=True), "n_layers"),
    "huge dim": (lambda f: edit_params(f, dim=1 << 60), "dim"),
    "heads": (lambda f: edit_params(f, n_heads=7), "do not divide"),
    "layers too many": (lambda f: edit_params(f, n_layers=4), "layers.3"),
    "layers too few": (lambda f: edit_params(f, n_layers=2), "layers.2"),
    "feed-forward width": (lambda f: edit_params(f, multiple_of=256), "feed_forward.w1"),
    "vocabulary": (lambda f: edit_params(f, vocab_size=601), "601"),
    "other settings": (lambda f: edit_params(f, moe={"num_experts": 8}), "moe"),
    "shard missing": (lambda f: (f / "consolidated.00.pth").unlink(), "consolidated.00.pth is missing"),
    "shard truncated": (lambda f: os.truncate(f / "consolidated.01.pth", 5000), "consolidated.01.pth"),
    "shard not a zip": (lambda f: (f / "consolidated.01.pth").write_bytes(b"x" * 100), "consolidated.01.pth"),
    "names disagree": (lambda f: edit_state(f, lambda s: s.pop("norm.weight"), 1), "norm.weight"),
    "dtypes disagree": (
        lambda f: edit_state(f, lambda s: s.update({"output.weight": s["output.weight"].half()})),
        "dtype of 'output",
    ),
    "shapes disagree": (
        lambda f: edit_state(f, lambda s: s.update({"output.weight": s["output.weight"][:7].clone()})),
        "output.weight",
    ),
    "unknown tensor": (
        lambda f: [edit_state(f, lambda s: s.update(x=torch.zeros(2)), n) for n in (0, 1)],
        "'x' has no place",
    ),
    "integers": (
        lambda f: edit_state(f, lambda s: s.update({"norm.weight": torch.zeros(64, dtype=torch.int8)})),
        "float32",
    ),
    "strided": (lambda f: edit_state(f, lambda s: s.update({"norm.weight": torch.zeros(128)[::2]})), "contiguous"),
    "no state dict": (lambda f: torch.save([1, 2], f / "consolidated.00.pth"), "state dict"),
    "no tokenizer": (lambda f: (f / "tokenizer.model").unlink(), "tokenizer.model is missing"),
    "broken tokenizer": (lambda f: (f / "tokenizer.model").write_bytes(b"\xff\x00" * 50), "tokenizer.model"),
    "broken ranks": (lambda f: (f / "tokenizer.model").write_bytes(b"YQ== 0\nYg== 2\n"), "ranks"),
    "tokenizer too large": (lambda f: edit_tokenizer(f), "only 600 rows"),
}


def edit_tokenizer(folder: Path) -> None:
    """Give the tokenizer more tokens than the embedding has rows."""
    import base64

    ranks = [bytes([low]) for low in range(256)] + [bytes([97, low]) for low in range(200)]
    (folder / "tokenizer.model").write_bytes(
        b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(ranks))
    )


@pytest.mark.parametrize("case", BROKEN)
def test_broken_input_is_refused_with_one_clear_line(tmp_path: Path, case: str) -> None:
    change, message = BROKEN[case]
    folder = meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta", shards=2)
    change(folder)
    with pytest.raises(InputError) as caught:
        open_meta(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def rezip(path: Path, compression: int) -> None:
    """Rewrite a checkpoint's archive in alphabetical order and without torch's alignment."""
    with zipfile.ZipFile(path) as archive:
        records = {record.filename: archive.read(record) for record in archive.infolist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name in sorted(records):
            archive.writestr(name, records[name])


def test_a_compressed_archive_is_refused(tmp_path: Path) -> None:
    folder = meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta")
    rezip(folder / "consolidated.00.pth", zipfile.ZIP_DEFLATED)
    with pytest.raises(MalformedCheckpoint, match="compressed"):
        open_meta(folder)


def test_places_that_torch_computes_wrongly_are_refused(tmp_path: Path) -> None:
    """torch derives offsets from its own writer's layout; in an archive of another writer they are silently wrong."""
    folder = meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta")
    rezip(folder / "consolidated.00.pth", zipfile.ZIP_STORED)
    with pytest.raises(MalformedCheckpoint, match="does not lie inside a record"):
        open_meta(folder)


def test_without_sentencepiece_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(InputError, match=r"blockzoo\[meta\]"):
        open_meta(folder)


def test_a_refused_checkpoint_leaves_nothing(tmp_path: Path) -> None:
    from zoo import Zoo

    folder = meta_twin.write_meta(meta_twin.tiny_llama(), tmp_path / "meta", shards=2)
    edit_state(folder, lambda state: state.pop("norm.weight"), 1)
    with Zoo(tmp_path / "store") as zoo:
        with pytest.raises(MalformedCheckpoint):
            zoo.ingest(str(folder))
        assert not list(zoo.models())
        assert zoo.gc().objects_removed == 0
