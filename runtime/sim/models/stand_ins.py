"""What may take the place of a simulated family's blocks: cheaper ones ahead of them (BL-25), and equivalents
instead of them (BL-28).

    with_stand_ins    each block of a chain but the last gets a pruned one, half its bytes and so many times as fast; as
                      `Surrogate`s
    with_variants     chains with blocks of a full fine-tune in the foundation's places, or the other way round; as
                      `Variant`s

Contract: families in, families out, with the chains that engines are to know beside. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.chains import Block, BlockUse, Chain, Stage, Surrogate, Variant
from runtime.sim.models.family import FamilyPart, SimulatedFamily
from runtime.sim.models.variants import ScoredPair, variants_of
from zoo.errors import InputError

#: Of a block's weights (Table 4).
_PRUNED = 0.5


@dataclass(frozen=True, slots=True)
class StandIns:
    """`speed`: how many times as fast as its block one is; the default is Table 4's of three layers. `right`: the part
    of their predictions that stands; the default is the paper's, 192 of 231."""

    speed: float = 18.55
    right: float = 192 / 231

    def __post_init__(self) -> None:
        if not self.speed >= 1 or not 0 <= self.right <= 1:
            raise InputError("stand-ins are at least as fast as their blocks, and right between never and always")


def with_stand_ins(
    family: SimulatedFamily, stand_ins: StandIns
) -> tuple[SimulatedFamily, Mapping[str, tuple[Surrogate, ...]]]:
    """Surrogates by model. Never of a last block: what comes of that has left."""
    chains, parts = dict(family.chains), dict(family.parts)
    found: dict[str, tuple[Surrogate, ...]] = {}
    for model, chain in family.chains.items():
        made = []
        for at, use in enumerate(chain.uses[:-1]):
            part = _pruned(family.parts[use.block], stand_ins.speed)
            parts[part.block.id] = part
            name = f"{model}~{at}"
            chains[name] = _with(chain, at, replace(use, block=part.block.id, domain=f"{use.domain}~", adapter_bytes=0))
            made.append(Surrogate(name, use.lo, use.hi, use.hi - use.lo, part.block.nbytes))
        found[model] = tuple(made)
    return replace(family, chains=chains, parts=parts), found


def _pruned(part: FamilyPart, speed: float) -> FamilyPart:
    block = Block(f"{part.block.id}~", round(part.block.nbytes * _PRUNED), part.block.kv_layers)
    return replace(part, block=block, speed=speed)


def _with(chain: Chain, at: int, use: BlockUse) -> Chain:
    return replace(chain, uses=(*chain.uses[:at], use, *chain.uses[at + 1 :]))


def with_variants(family: SimulatedFamily, least: float) -> tuple[SimulatedFamily, tuple[Variant, ...]]:
    """Of every chain with at least that score; only of blocks that run without adapters, which were trained beside
    their own.
    """
    sizes = {block.id: block.nbytes for block in family.blocks()}
    chains, found = dict(family.chains), []
    for chain in family.chains.values():
        pairs = [
            ScoredPair(use, _instead(use, other), score)
            for use in chain.uses
            for other, score in (family.equivalents.get(use.block, ()) if not use.adapter_bytes else ())
        ]
        found += variants_of(chain, pairs, sizes, least)
    chains |= {variant.name: variant.chain for variant in found}
    return replace(family, chains=chains), tuple(found)


def _instead(use: BlockUse, block: str) -> BlockUse:
    """The same place in a chain, run by another block as it is."""
    return replace(use, block=block, domain=f"{Stage.parse(block).model}[:{use.hi}]")
