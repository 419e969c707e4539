"""Add stand-ins (BL-25) and variants with equivalent blocks (BL-28) to a simulated family.

- `with_stand_ins`: each block of a chain except the last gets a pruned one, with half its bytes and a given speed, as
  `Surrogate`s.
- `with_variants`: chains with blocks of a full fine-tune in the foundation's places, or the other way round, as
  `Variant`s.

Both return a new family that contains the chains which engines need.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from runtime.chains import Block, BlockUse, Chain, Stage, Surrogate, Variant
from runtime.sim.models.family import FamilyPart, SimulatedFamily
from runtime.sim.models.variants import ScoredPair, variants_of
from zoo.errors import InputError

#: Share of a block's weights that a pruned one keeps (Table 4).
_PRUNED = 0.5


@dataclass(frozen=True, slots=True)
class StandIns:
    """The simulated stand-ins.

    Fields:
        speed: Factor by which a stand-in is faster than its block; default: Table 4's of three layers.
        right: Share of their predictions that stand; default: the paper's, 192 of 231.
    """

    speed: float = 18.55
    right: float = 192 / 231

    def __post_init__(self) -> None:
        if not self.speed >= 1 or not 0 <= self.right <= 1:
            raise InputError("stand-ins are at least as fast as their blocks, and right between never and always")


def with_stand_ins(
    family: SimulatedFamily, stand_ins: StandIns
) -> tuple[SimulatedFamily, Mapping[str, tuple[Surrogate, ...]]]:
    """Return the family with stand-ins, and surrogates by model.

    A last block has none: its output cannot be corrected.
    """
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
    """Return the family with variants of at least that score, and the variants.

    Only blocks that run without adapters are replaced: adapters were trained with their own blocks.
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
    """Return the same place in a chain, run by another block."""
    return replace(use, block=block, domain=f"{Stage.parse(block).model}[:{use.hi}]")
