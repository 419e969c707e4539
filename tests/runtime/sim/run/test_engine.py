"""The simulated engine: shared weights count once in memory and time, and strides equal the steps they stand for."""

from __future__ import annotations

import pytest

from runtime.chains import Array, Stage, cut
from runtime.sim.cost.hardware import GPUS
from runtime.sim.models.family import App, Cutting, SimulatedFamily, family_of
from runtime.sim.run.engine import Hollow, SimEngine
from runtime.types import Row, StepPlan
from zoo.errors import NotFound

GPU = GPUS["A100-80GB"]
APPS = (App("base", "llama-7b", "foundation"), App("lora", "llama-7b", "lora"), App("vicuna", "llama-7b", "full"))
FAMILY = family_of(APPS, Cutting(parts=2))
END = FAMILY.chain("base").length
CUT = FAMILY.chain("base").uses[0].hi


def engine(family: SimulatedFamily = FAMILY, *models: str) -> SimEngine:
    made = SimEngine("s0g0", GPU, family, 1000)
    for model in models:
        made.load(Stage(model, 0, END))
    return made


def row(model: str, start: int, count: int = 1, seq: str = "", lo: int = 0, hi: int = END) -> Row:
    return Row(seq or f"{model}-{start}", Stage(model, lo, hi).id, (0,) * count, start)


def busy(one: SimEngine, rows: list[Row], steps: dict[str, int] | None = None) -> int:
    return one.run(StepPlan(1, tuple(rows)), {}, steps).result.busy


def test_shared_weights_are_held_once():
    one = engine(FAMILY, "base", "lora")
    alone = engine(FAMILY, "base").memory().weights
    adapters = sum(use.adapter_bytes for use in FAMILY.chain("lora").uses)
    assert one.memory().weights == alone + adapters
    assert one.memory().weights_unshared == 2 * alone + adapters
    one.unload(Stage("base", 0, END))
    assert one.memory().weights == alone + adapters
    one.unload(Stage("lora", 0, END))
    assert one.memory().weights == 0
    assert engine(FAMILY, "base", "vicuna").memory().weights == 2 * alone


def test_shared_weights_are_read_once_a_step():
    shared, private = engine(FAMILY, "base", "lora"), engine(FAMILY, "base", "vicuna")
    alone = busy(shared, [row("base", 10)])
    assert busy(shared, [row("base", 10), row("lora", 10)]) < 1.2 * alone
    assert busy(private, [row("base", 10), row("vicuna", 10)]) > 1.9 * alone


def test_a_part_of_a_chain_costs_its_part_and_hands_on_hidden_states():
    one = engine()
    spec = one.load(Stage("lora", 0, CUT))
    assert (spec.name, spec.kv_layers) == (f"lora[0:{CUT}]", 16)
    part = row("lora", 0, 7, "p", 0, CUT)
    found = one.run(StepPlan(3, (Row(part.seq, part.model, part.tokens, 0, sample=False),)), {})
    assert (found.result.step, found.result.sampled) == (3, ())
    assert found.outputs["p"].shape == (7, 4096)
    assert len(found.outputs["p"].data) == 7 * 4096 * 2
    assert busy(one, [row("lora", 10, lo=0, hi=CUT)]) < 0.6 * busy(engine(FAMILY, "lora"), [row("lora", 10)])


def test_tokens_come_from_behind_the_head_where_asked_for():
    found = engine(FAMILY, "base").run(StepPlan(1, (row("base", 0, 3, "a"), row("base", 3, 1, "b"))), {})
    assert [(each.seq, each.token) for each in found.result.sampled] == [("a", 0), ("b", 0)]
    assert found.outputs == {}


@pytest.mark.parametrize("strides", [{}, {"a": 1}, {"a": 5}, {"a": 3, "b": 7}, {"b": 4, "chunk": 6}])
def test_strides_are_the_steps_that_they_stand_for(strides: dict[str, int]):
    one = engine(FAMILY, "base", "lora")
    at = {"a": ("base", 100, 1), "b": ("lora", 40, 1), "chunk": ("base", 0, 64)}
    expected = 0
    for step in range(max((1, *strides.values()))):
        rows = [
            row(model, start + count + step - 1, 1, seq) if step else row(model, start, count, seq)
            for seq, (model, start, count) in at.items()
            if step < strides.get(seq, 1)
        ]
        expected += busy(one, rows)
    found = busy(one, [row(model, start, count, seq) for seq, (model, start, count) in at.items()], strides)
    assert found == pytest.approx(expected, rel=1e-9, abs=20)


def test_what_is_none_is_refused():
    with pytest.raises(NotFound):
        engine().load(Stage("base", 0, CUT - 1))
    with pytest.raises(ValueError, match="2 pages"):
        engine().write_pages((1, 2), Array("uint8", (1, FAMILY.page_bytes), b""))
    assert engine().read_pages((4, 5, 6)).shape == (3, FAMILY.page_bytes)


def test_adapters_of_a_kind_are_launched_together_unless_the_family_branches():
    """Two LoRAs in a step take one pair of launches, and two if run model by model.

    Adapters of other kinds are other operations.
    """
    apps = [App("one", "llama-7b", "lora"), App("two", "llama-7b", "lora"), App("third", "llama-7b", "adapter")]
    joined, branched = (family_of(apps, Cutting(provision, parts=1)) for provision in ("blocks", "ps"))

    def took(family: SimulatedFamily, *models: str) -> int:
        return busy(engine(family, *models), [row(model, 7) for model in models])

    launches = round(32 * GPU.layer_ns * 0.4)
    assert took(joined, "one") == took(branched, "one")
    assert took(branched, "one", "two") - took(joined, "one", "two") == pytest.approx(launches, rel=0.01)
    assert took(joined, "one", "two") - took(joined, "one") < 0.1 * launches
    assert took(branched, "one", "third") == took(joined, "one", "third") > took(joined, "one") + launches


def test_a_buffer_without_bytes_can_be_cut_like_one_with_bytes() -> None:
    array = Array("float16", (4, 2), Hollow(16))
    part = cut(array, 1, 3)
    assert part.shape == (2, 2) and len(part.data) == 8
    assert cut(array, 0, 4) is array


def test_predicting_lengths_slows_steps_with_prompts_alone():
    """By the share that is given (TetriInfer, Figure 17)."""
    plain, slow = engine(FAMILY, "base"), SimEngine("s0g0", GPU, FAMILY, 1000, predicting=0.1)
    slow.load(Stage("base", 0, END))
    prompt, token = [row("base", 0, 512), row("base", 40)], [row("base", 40)]
    assert busy(slow, prompt) == pytest.approx(1.1 * busy(plain, prompt), rel=1e-6)
    assert busy(slow, token) == busy(plain, token)
