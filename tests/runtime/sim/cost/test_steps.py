"""Step costs against a plain sum over pieces, rows and steps; the memory for remembered mixes has a bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.chains import Stage
from runtime.sim.cost import steps as pricing
from runtime.sim.cost.blocks import BlockWork
from runtime.sim.cost.hardware import GPUS
from runtime.sim.cost.steps import Pricing
from runtime.sim.models.family import App, Cutting, family_of
from runtime.types import Row

GPU = GPUS["A100-80GB"]
NAMES = ("base", "lora", "other", "vicuna")
APPS = tuple(
    App(name, "llama-7b", kind) for name, kind in zip(NAMES, ("foundation", "lora", "lora", "full"), strict=True)
)
FAMILY = family_of(APPS, Cutting(parts=3))
STAGES = [Stage(name, 0, FAMILY.chain(name).length) for name in NAMES] + [
    Stage("lora", 0, FAMILY.chain("lora").uses[0].hi)
]


def priced() -> Pricing:
    made = Pricing(GPU, FAMILY)
    for stage in STAGES:
        made.pieces(stage)
    return made


SHARED = priced()
ROWS = st.lists(
    st.tuples(st.sampled_from(STAGES), st.integers(0, 900), st.sampled_from([1, 1, 1, 7, 200]), st.integers(1, 9)),
    max_size=9,
)


def plain(made: Pricing, rows: list[Row], strides: dict[str, int]) -> float:
    """Return the cost step by step, with each piece once for the rows of all stages that have it."""
    total = 0.0
    for step in range(max((strides.get(row.seq, 1) for row in rows), default=0)):
        works: dict[str, BlockWork] = {}
        costs = {}
        for row in (each for each in rows if step < strides.get(each.seq, 1)):
            for piece in made.pieces(next(stage for stage in STAGES if stage.id == row.model)):
                costs[piece.name] = piece.cost
                count = len(row.tokens)
                works.setdefault(piece.name, BlockWork()).add_row(
                    row.start + (count + step - 1 if step else 0), 1 if step else count
                )
        total += sum(costs[name].ns(work) for name, work in works.items()) + GPU.part_ns
    return total


@given(ROWS, st.randoms(use_true_random=False))
def test_a_step_is_the_sum_of_its_pieces_whatever_the_order_of_its_rows(
    asked: list[tuple[Stage, int, int, int]], chance
) -> None:
    rows = [Row(f"r{at}", stage.id, (0,) * count, start) for at, (stage, start, count, _) in enumerate(asked)]
    strides = {f"r{at}": steps for at, (_, _, _, steps) in enumerate(asked) if steps > 1}
    found = SHARED.step(rows, strides)
    assert found == pytest.approx(plain(SHARED, rows, strides), rel=2e-5, abs=20)
    chance.shuffle(rows)
    assert SHARED.step(rows, strides) == found


def test_without_strides_the_sum_is_exact() -> None:
    rows = [Row(f"r{at}", stage.id, (0,) * (1 + 5 * at), 30 * at) for at, stage in enumerate(STAGES)]
    assert SHARED.step(rows, {}) == pytest.approx(plain(SHARED, rows, {}), abs=1)


def test_what_is_remembered_has_a_bound(monkeypatch) -> None:
    monkeypatch.setattr(pricing, "_MOST", 3)
    made = priced()
    for mask in range(1, 1 << len(STAGES)):
        rows = [Row(stage.id, stage.id, (0,), 10) for at, stage in enumerate(STAGES) if mask >> at & 1]
        assert made.step(rows, {}) == SHARED.step(rows, {})
        assert len(made._mixes) <= 3
