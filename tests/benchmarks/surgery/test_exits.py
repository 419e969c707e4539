"""A model that a benchmark trains for itself is reused only if the training was completed."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.surgery import exits


def test_a_training_that_was_stopped_is_begun_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops, learnt = [True, False], []

    def learn(lesson: object, folder: Path, *_: object) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        if stops.pop(0):
            raise KeyboardInterrupt
        learnt.append((folder / "config.json").write_text("{}"))

    monkeypatch.setattr(exits, "learn", learn)
    monkeypatch.setattr(exits.LibraryCurriculum, "prepare_lesson", lambda self, member: None)
    with pytest.raises(KeyboardInterrupt):
        exits.trained(tmp_path, 2)
    assert (exits.trained(tmp_path, 2) / "config.json").exists()
    assert exits.trained(tmp_path, 2) == tmp_path / "tiny-base-2" and len(learnt) == 1
