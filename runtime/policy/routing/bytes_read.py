"""What a step of a device reads, as the measure of how long it takes.

A step that decodes is bound by memory: it reads the weights of each block that any sequence on the device uses, once
for all of them, and the K and V of all. A sequence gets a token per step, so what all of them wait is the sum over
devices of sequences x bytes read. A new sequence adds to that what it reads itself, and for all there the weights that
none there used before. Hence

    paths.by_bytes      a new sequence goes where its blocks are in use already, until the others are better off alone
    demand.ByBytes      part of a device's sequences goes to another one, which has what they use or gets a copy of it

so devices come to serve few foundations each, where counting sequences mixes them. Prompts, which are bound by
computing, are not in it. Pure; bytes.
"""

from __future__ import annotations


def added(sequences: int, own: int, weights: int, in_use: bool) -> float:
    """Bytes that one more sequence adds to the steps of a device, for one block of its chain.

    Args:
        sequences: on the device before.
        own: bytes of its K and V for the block.
        weights: bytes of the block, which is `in_use` there or not.
    """
    return float((sequences + 1) * (own if in_use else own + weights))
