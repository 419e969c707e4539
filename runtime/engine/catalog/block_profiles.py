"""What was measured of a model's blocks, for the pieces that a cluster cuts them into (BL-11, BL-21).

`zoo profile` measures the zoo's blocks; `engine.catalog.describe` cuts them further. A piece takes its share of its
block's time, by the bytes that are multiplied (all but embeddings, which are looked up), and its share of the time to
load, by all bytes. That is an estimate: the kernels of a piece are those of its block, and nothing is lost between two
pieces on one device, which run as one stage.

A low-rank delta has its base's pieces, and costs more: where all its blocks were measured, it has a profile as a whole,
too, under the version of its chain.

Reads the catalogue. A model whose blocks were not all measured on this kind of device, or are others by now, has no
profiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.chains import BlockUse, Chain
from runtime.engine.catalog.describe import Sizes
from runtime.engine.profiling.document import KIND, device_key, hardware_of
from runtime.policy.profiles import BlockProfile, DeviceProfile, alike, chain_of, part_of, profile_of
from zoo.catalog import Reader
from zoo.manifest import ChainBlock, Component
from zoo.store import Store


def measured_pieces(store: Store, chains: Mapping[str, Chain], device: str, threads: int) -> tuple[BlockProfile, ...]:
    """Profiles of pieces, under the ids of their blocks in `chains`, which `describe_chain` gave; each once. Those of
    low-rank deltas as a whole beside them.

    Args:
        chains: by the names of the stored models that they were made of.
        device: as agents name theirs.
        threads: that an agent's engine has on a CPU. Without a profile of so many, one of as many as this process has
            is taken.
    """
    with store.catalog.reading() as reader:
        known = _known(reader, device, threads)
        found: dict[str, BlockProfile] = {}
        for name, chain in chains.items() if known else ():
            for piece in _pieces(reader, name, chain, known):
                found.setdefault(piece.block, piece)
    return tuple(found.values())


def _known(reader: Reader, device: str, threads: int) -> dict[str, BlockProfile]:
    """Blocks by digest: the latest profiles of agents' own number of threads go before others."""
    here = hardware_of(device)
    alike = {**here, "threads": threads} if "threads" in here else here
    documents = reader.documents(KIND)
    found: dict[str, BlockProfile] = {}
    for key in dict.fromkeys((device_key(device, here), device_key(device, alike))):
        for document in documents:
            if document.key == key:
                try:
                    found.update(
                        (each.block, each) for each in profile_of(document.value).blocks if each.stands_for is None
                    )
                except (KeyError, TypeError, ValueError):
                    continue  # of another format: as if it had not been measured
    return found


def _pieces(reader: Reader, name: str, chain: Chain, known: Mapping[str, BlockProfile]) -> Iterator[BlockProfile]:
    manifest = reader.model(name)
    components, sizes = [placed.component for placed in manifest.components], Sizes(manifest)
    blocks = reader.chain(name)
    for use in chain.uses:
        block = next((each for each in blocks if each.lo <= use.lo and use.hi <= each.hi), None)
        if block is not None and (whole := known.get(block.digest)) is not None:
            yield _part(whole, block, use, components, sizes)
    if chain.rewriting is not None and all(block.digest in known for block in blocks):
        named = [block.digest for block in blocks]
        tables = DeviceProfile("", alike([known[digest] for digest in dict.fromkeys(named)]), ())
        yield chain_of(tables, chain.version, named)


def _part(
    whole: BlockProfile, block: ChainBlock, use: BlockUse, components: Sequence[Component], sizes: Sizes
) -> BlockProfile:
    piece, all_of_it = components[use.lo : use.hi], components[block.lo : block.hi]
    loaded = _bytes(piece, sizes) / max(_bytes(all_of_it, sizes), 1)
    multiplied = _bytes(_multiplied(all_of_it), sizes)
    time = _bytes(_multiplied(piece), sizes) / multiplied if multiplied else loaded
    return part_of(whole, use.block, time, loaded)


def _multiplied(components: Sequence[Component]) -> list[Component]:
    return [component for component in components if component.kind != "embedding"]


def _bytes(components: Sequence[Component], sizes: Sizes) -> int:
    """Component by component: what two of them share counts twice, or the shares of pieces would not add up to one."""
    return sum(sizes.weights([component]) for component in components)
