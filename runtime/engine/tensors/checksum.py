"""A checksum of a tensor's bytes, computed on its device; only sixteen bytes are copied to the host.

    words x_i of eight bytes, the last padded with zeros
    sum of x_i (2 i + 1)      sum of mix(x_i + (i + 1) c)      both modulo 2^64

The first sum detects every change of a single word, because odd factors are invertible. The second mixes each word with
its index and misses other changes (two swapped words, for example) with probability 2^-64. Integer sums wrap around the
same way on all devices and in any order. The checksum detects transmission errors, not forgery; for that there is
BLAKE3 (`cluster.agent_process.commands`).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Odd 64-bit constants from splitmix64 and murmur3, as signed numbers.
_STEP, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def checksum(data: Tensor) -> str:
    """Return 32 hexadecimal digits for a flat uint8 tensor and its length. Waits for the device."""
    nbytes = data.numel()
    if nbytes % 8 or data.storage_offset() % 8:
        whole = torch.zeros(-(-nbytes // 8) * 8, dtype=torch.uint8, device=data.device)
        whole[:nbytes] = data
        data = whole
    words = data.view(torch.int64)
    places = torch.arange(words.numel(), device=data.device)
    first = (words * (2 * places + 1)).sum()
    stirred = words + (places + 1) * _STEP
    stirred = (stirred ^ (stirred >> 30)) * _FIRST
    stirred = (stirred ^ (stirred >> 27)) * _SECOND
    second = (stirred ^ (stirred >> 31)).sum() + nbytes
    one, other = torch.stack((first, second)).tolist()
    return f"{one % (1 << 64):016x}{other % (1 << 64):016x}"
