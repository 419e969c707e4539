"""Measure a device's step time by the bytes that the step reads.

A decode step is bound by memory: it reads the weights of every block that a sequence on the device uses, once for all
of them, and the K and V of all sequences. Each sequence gets one token per step, so the total waiting time is the sum
over devices of sequences x bytes read.

A new sequence adds its own K and V to that, and, for all sequences there, weights that none of them used before. Hence

    paths.by_bytes       a new sequence goes where its blocks are in use, until this slows the sequences there too much
    replicate.ByBytes    part of a device's sequences goes to another device, which has their blocks or loads them

so each device comes to serve few base models, where counting sequences would mix them. Prompts are bound by compute and
not counted. Pure functions, in bytes.
"""

from __future__ import annotations


def added(sequences: int, own: int, weights: int, in_use: bool) -> float:
    """Return the bytes that one more sequence adds to the steps of a device, for one block of its chain.

    Args:
        sequences: Sequences on the device before.
        own: Bytes of its K and V for the block.
        weights: Bytes of the block's weights.
        in_use: Whether a sequence there uses the block already.
    """
    return float((sequences + 1) * (own if in_use else own + weights))
