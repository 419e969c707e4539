"""Names of stages and of model versions survive the conversion to text and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.chains import ModelKey, Stage
from runtime.engine.models.versions import pinned, unpinned

NAMES = st.text(min_size=1)
DIGITS = st.text("0123456789abcdef", min_size=16, max_size=16)


@given(NAMES, st.integers(0, 999), st.integers(0, 999))
def test_a_stage_is_found_again_in_its_id(model: str, lo: int, hi: int) -> None:
    """The model may have any name: `m[0:2]` can be a model's name."""
    stage = Stage(model, lo, hi)
    assert Stage.parse(stage.id) == stage


@given(NAMES, DIGITS)
def test_a_version_is_found_again_in_its_text(model: str, version: str) -> None:
    key = ModelKey(model, version)
    assert ModelKey.parse(key.text) == key == Stage(key.text, 0, 1).key
    assert (key.text, unpinned(key.text)) == (pinned(model, version), (model, version)), (
        "engines find it by the same name"
    )


def test_a_name_without_a_version_is_the_model_as_it_stands() -> None:
    for name in ("m", "m#", "m#12", "m#0123456789ABCDEF", "#0123456789abcdef"):
        assert ModelKey.parse(name) == ModelKey(name) and ModelKey(name).text == name


@pytest.mark.parametrize("text", ["m", "m[0:2", "[0:2]", "m[0:2] ", "m[-1:2]", "m[a:b]", ""])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not the id of a stage"):
        Stage.parse(text)
