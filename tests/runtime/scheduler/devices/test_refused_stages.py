"""A stage that could not be loaded is requested again after a pause, which doubles with each refusal in a row."""

from __future__ import annotations

from runtime.chains import Stage
from runtime.scheduler.devices.devices import DeviceStages

SECOND = 1_000_000_000


def test_the_pause_before_a_refused_stage_doubles_up_to_16_minutes() -> None:
    stages, stage, now = DeviceStages(), Stage("m", 0, 2), 0
    for pause in (15, 30, 60, 120, 240, 480, 960, 960):
        stages.loading.add(stage)
        stages.refuses(stage, "the disk fails", now)
        assert stages.refused == {stage: "the disk fails"} and not stages.loading
        assert not stages.relents(now + pause * SECOND - 1) and stage in stages.refused
        now += pause * SECOND
        assert stages.relents(now) and not stages.refused


def test_a_load_that_succeeds_ends_the_row() -> None:
    stages, stage = DeviceStages(), Stage("m", 0, 2)
    stages.refuses(stage, "once", 0)
    stages.refuses(stage, "twice", 0)
    stages.pardon(stage)
    assert not stages.refused
    stages.refuses(stage, "again", 0)
    assert not stages.relents(15 * SECOND - 1) and stages.relents(15 * SECOND)
