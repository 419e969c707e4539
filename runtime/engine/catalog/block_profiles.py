"""Profiles of the pieces that a cluster cuts a model's blocks into, estimated from measured blocks (BL-11, BL-21).

`zoo profile` measures the zoo's blocks; `engine.catalog.describe` cuts them into pieces. A piece gets a share of its
block's time by the bytes that are multiplied (all but embeddings, which are lookups), and a share of the time to load
by all bytes. The estimate is reasonable because a piece runs the kernels of its block, and pieces of one device run as
one stage, so cutting costs nothing there.

A low-rank delta has its base's pieces but costs more. If all its blocks were measured it also has a profile as a whole,
under the version of its chain.

Reads the catalogue. A block that was not measured on this kind of device, or has changed since, has no profile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from runtime.chains import BlockUse, Chain
from runtime.engine.catalog.held_bytes import HeldBytes
from runtime.engine.models.swapped import read_model
from runtime.engine.profiling.document import KIND, device_key, hardware_of
from runtime.policy.profiles import BlockProfile, DeviceProfile, LinkProfile, alike, chain_of, part_of, profile_of
from zoo.catalog import Reader
from zoo.manifest import ChainBlock, Component
from zoo.store import Store


def measured_pieces(store: Store, chains: Mapping[str, Chain], device: str, threads: int) -> tuple[BlockProfile, ...]:
    """Return the profiles of pieces by the block ids in `chains`, which `describe_chain` returned; each piece once.
    Low-rank deltas also have one of their whole chain, by its version.

    Args:
        chains: the chains by the names of the stored models that they were made of.
        device: the device as agents name it.
        threads: CPU threads of an agent's engine. If there is no profile with as many, one with this process's number
            is used.
    """
    with store.catalog.reading() as reader:
        known = _known(reader, device, threads)
        found: dict[str, BlockProfile] = {}
        for name, chain in chains.items() if known else ():
            for piece in _pieces(reader, name, chain, known):
                found.setdefault(piece.block, piece)
    return tuple(found.values())


def measured_links(store: Store, device: str, threads: int) -> tuple[LinkProfile, ...]:
    """Return the links of the latest profile of this kind of device; none without a profile."""
    with store.catalog.reading() as reader:
        profiles = list(_profiles(reader, device, threads))
    return profiles[-1].links if profiles else ()


def _known(reader: Reader, device: str, threads: int) -> dict[str, BlockProfile]:
    """Return measured blocks by digest."""
    profiles = _profiles(reader, device, threads)
    return {each.block: each for profile in profiles for each in profile.blocks if each.stands_for is None}


def _profiles(reader: Reader, device: str, threads: int) -> Iterator[DeviceProfile]:
    """Yield profiles of this kind of device; those that count most come last.

    Profiles with this number of threads override those with this process's number; of a key the latest counts.
    """
    here = hardware_of(device)
    alike = {**here, "threads": threads} if "threads" in here else here
    documents = reader.documents(KIND)
    for key in dict.fromkeys((device_key(device, here), device_key(device, alike))):
        for document in documents:
            if document.key == key:
                try:
                    yield profile_of(document.value)
                except (KeyError, TypeError, ValueError):
                    continue  # a profile in another format is ignored


def _pieces(reader: Reader, name: str, chain: Chain, known: Mapping[str, BlockProfile]) -> Iterator[BlockProfile]:
    manifest, blocks = read_model(reader, name)
    components, sizes = [placed.component for placed in manifest.components], HeldBytes(manifest)
    for use in chain.uses:
        block = next((each for each in blocks if each.lo <= use.lo and use.hi <= each.hi), None)
        if block is not None and (whole := known.get(block.digest)) is not None:
            yield _part(whole, block, use, components, sizes)
    if chain.rewriting is not None and all(block.digest in known for block in blocks):
        named = [block.digest for block in blocks]
        tables = DeviceProfile("", alike([known[digest] for digest in dict.fromkeys(named)]), ())
        yield chain_of(tables, chain.version, named)


def _part(
    whole: BlockProfile, block: ChainBlock, use: BlockUse, components: Sequence[Component], sizes: HeldBytes
) -> BlockProfile:
    piece, all_of_it = components[use.lo : use.hi], components[block.lo : block.hi]
    loaded = _bytes(piece, sizes) / max(_bytes(all_of_it, sizes), 1)
    multiplied = _bytes(_multiplied(all_of_it), sizes)
    time = _bytes(_multiplied(piece), sizes) / multiplied if multiplied else loaded
    return part_of(whole, use.block, time, loaded)


def _multiplied(components: Sequence[Component]) -> list[Component]:
    return [component for component in components if component.kind != "embedding"]


def _bytes(components: Sequence[Component], sizes: HeldBytes) -> int:
    """Return the sum of the components' bytes.

    A tensor that two components share counts twice; otherwise the shares of pieces would not add up to one.
    """
    return sum(sizes.weights([component]) for component in components)
