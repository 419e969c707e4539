"""Which models share what under the three ways of provisioning; chains cover their models."""

from __future__ import annotations

import pytest

from runtime.chains import Stage
from runtime.sim.models.family import App, Cutting, Provision, family_of
from runtime.sim.models.shapes import SHAPES
from zoo.errors import InputError, NotFound

APPS = (
    App("base", "llama-7b", "foundation"),
    App("lora", "llama-7b", "lora"),
    App("adapter", "llama-7b", "adapter"),
    App("vicuna", "llama-7b", "full"),
    App("glm", "chatglm-6b", "bitfit"),
)


def total(provision: Provision) -> int:
    return sum(block.nbytes for block in family_of(APPS, Cutting(provision)).blocks())


@pytest.mark.parametrize("provision", ["blocks", "pm", "ps"])
@pytest.mark.parametrize("parts", [1, 3, 4, 64])
def test_chains_cover_their_model_once_and_in_order(provision: Provision, parts: int):
    family = family_of(APPS, Cutting(provision, parts))
    for app in APPS:
        chain = family.chain(app.name)
        shape = SHAPES[app.foundation]
        assert [use.lo for use in chain.uses] == [0, *(use.hi for use in chain.uses[:-1])]
        assert chain.length == shape.components
        assert chain.spec.kv_layers == sum(use.kv_layers for use in chain.uses) == shape.layers
        assert sum(family.parts[use.block].block.nbytes for use in chain.uses) == shape.bytes_of(0, shape.components)
        assert chain.spec.page_tokens * shape.kv_bytes <= family.page_bytes


def test_what_is_shared_is_there_once():
    llama, glm = SHAPES["llama-7b"], SHAPES["chatglm-6b"]
    whole, other = llama.bytes_of(0, llama.components), glm.bytes_of(0, glm.components)
    assert total("pm") == 4 * whole + other
    assert total("ps") == total("blocks") == 2 * whole + other


def test_blocks_of_adapted_models_are_their_foundations_with_a_domain_of_their_own():
    family = family_of(APPS, Cutting(parts=4))
    base, lora, vicuna = (family.chain(name) for name in ("base", "lora", "vicuna"))
    assert [use.block for use in base.uses] == [use.block for use in lora.uses]
    assert not {use.block for use in base.uses} & {use.block for use in vicuna.uses}
    assert len({use.domain for chain in (base, lora, vicuna) for use in chain.uses}) == 12
    share = sum(use.adapter_bytes for use in lora.uses) / SHAPES["llama-7b"].nbytes
    assert share == pytest.approx(0.0006, rel=1e-3)  # Table 1: 99.94 % are shared
    assert sum(use.adapter_bytes for use in base.uses) == sum(use.adapter_bytes for use in vicuna.uses) == 0


def test_models_served_alone_carry_only_adapters_that_do_not_merge():
    """Adapters that are sums of matrices merge; bottlenecks with an activation, and virtual tokens, stay separate."""
    family = family_of(APPS, Cutting("pm"))
    assert all(len(family.chain(app.name).uses) == 1 for app in APPS)
    beside = {app.kind for app in APPS if family.chain(app.name).uses[0].adapter_bytes}
    assert beside == {app.kind for app in APPS} & {"adapter", "prefix", "prompt"}
    assert len(family.parts) == len(APPS)
    assert not family.equivalents


def test_full_fine_tunes_are_equivalent_at_their_places():
    family = family_of(APPS, Cutting(parts=2))
    for mine, its in zip(family.chain("vicuna").uses, family.chain("base").uses, strict=True):
        assert family.equivalents[mine.block] == ((its.block, 0.998),)
        assert family.equivalents[its.block] == ((mine.block, 0.998),)


def test_pages_may_stand_for_more_layers():
    one, eight = (family_of(APPS, Cutting(parts=4, page_layers=layers)) for layers in (1, 8))
    assert eight.page_bytes == 8 * one.page_bytes
    assert one.chain("base").spec.kv_layers == 32
    assert eight.chain("base").spec.kv_layers == 4
    assert one.chain("base").spec.page_tokens == eight.chain("base").spec.page_tokens


def test_stages_are_runs_of_blocks():
    family = family_of(APPS, Cutting(parts=4))
    uses = family.chain("base").uses
    assert family.uses(Stage("base", 0, uses[1].hi)) == uses[:2]
    for wrong in (Stage("nobody", 0, 1), Stage("base", 0, uses[1].hi - 1), Stage("base", 5, 5)):
        with pytest.raises(NotFound):
            family.uses(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: App("x", "abacus", "lora"),
        lambda: App("x", "llama-7b", "tuned"),  # type: ignore[arg-type]
        lambda: Cutting("all"),  # type: ignore[arg-type]
        lambda: Cutting(parts=0),
        lambda: family_of((), Cutting()),
        lambda: family_of((APPS[0], APPS[0]), Cutting()),
    ],
)
def test_nonsense_is_refused(wrong):
    with pytest.raises(InputError):
        wrong()
