"""A checksum of a tensor's bytes, taken on its device: nothing goes to the host but sixteen bytes.

    words x_i of eight bytes, the last filled up with zeros      sum of x_i (2 i + 1)      sum of mix(x_i + (i + 1) c)
                                                                 both modulo 2^64

The first sum finds every change of one word, because odd factors can be inverted; the second, of words that are
stirred together with their places, finds others (two words changed places, say) but for one in 2^64. Integers wrap
around alike on all devices, in whatever order they are added. It finds what went wrong on the way, not what
somebody has made up: for that there is BLAKE3 (`cluster.agent_process.commands`).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Odd numbers of 64 bits, from splitmix64 and murmur3, as signed ones.
_STEP, _FIRST, _SECOND = (n - (1 << 64) for n in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def checksum(data: Tensor) -> str:
    """32 hexadecimal digits, over a flat tensor of uint8, and its length. Waits for the device."""
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
