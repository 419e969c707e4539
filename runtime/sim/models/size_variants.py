"""Serve sizes of one model as variants of each other (BlockLLM, Figure 16; BL-29).

The first size is the requested one, the rest are its variants. Accuracies are given by the scenario; nothing is
computed here. Times of blocks are tables of the same costs that the simulated devices use, so estimates are as good as
profiles.
"""

from __future__ import annotations

from dataclasses import replace

from runtime.chains import Chain, Variant
from runtime.policy.profiles import BlockProfile, DeviceProfile, Grid, Line
from runtime.policy.routing.variants import DispatchLimits
from runtime.scheduler.admission.variant_choice import VariantChoice
from runtime.sim.cost.blocks import BlockWork, table_cost
from runtime.sim.cost.hardware import Gpu
from runtime.sim.models.family import FamilyPart, SimulatedFamily

_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_CONTEXTS = (1, 256, 512, 1024)
_CHUNKS = (1, 64, 256, 1024)


def ladder_of(
    family: SimulatedFamily, names: tuple[str, ...], scores: tuple[float, ...], limit: float, gpu: Gpu
) -> VariantChoice:
    """Return the variants of the first model.

    Args:
        names: Models, the requested one first.
        scores: Agreement of each with the requested one.
        limit: Seconds of a step up to which the more accurate model is taken.
    """
    asked = family.chain(names[0])
    variants = tuple(
        Variant(name, _standing_for(asked, family.chain(name)), asked.version, score)
        for name, score in zip(names[1:], scores[1:], strict=True)
    )
    profiles = tuple(_profile(part, gpu) for part in family.parts.values())
    return VariantChoice(
        variants, DispatchLimits("accuracy", equivalent=0.0, limit=limit), DeviceProfile(gpu.name, profiles, ())
    )


def _standing_for(asked: Chain, chain: Chain) -> Chain:
    return replace(chain, spec=replace(chain.spec, name=asked.model), source=chain.model)


def _profile(part: FamilyPart, gpu: Gpu) -> BlockProfile:
    cost = table_cost(part.shape, part.lo, part.hi, gpu)
    decode = tuple(tuple(cost.ns(BlockWork(rows, rows * context)) / 1e9 for context in _CONTEXTS) for rows in _ROWS)
    prefill = tuple(cost.ns(BlockWork(0, 0, 1, count, count, count * (count + 1) // 2)) / 1e9 for count in _CHUNKS)
    grid = Grid(tuple(map(float, _ROWS)), tuple(map(float, _CONTEXTS)), decode)
    return BlockProfile(part.block.id, part.block.nbytes, grid, Line(tuple(map(float, _CHUNKS)), prefill), 0.0)
