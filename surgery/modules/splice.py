"""One stack out of components of several, their modules shared and not copied. Knows nothing of why."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from surgery.modules.stack import Stack


def splice(components: Sequence[tuple[Stack, int]]) -> Stack:
    """A stack of components (stack, index) in this order, the embedding first and the head last.

    Each attention keeps the place in caches that it had: two of one place must not stand in one stack that is to be
    cached.
    """
    stacks = list(dict.fromkeys(stack for stack, _ in components))
    first: dict[Stack, int] = {}
    for stack in stacks:
        first[stack] = sum(len(before.configs) for before in first)
    origins = []
    for stack, index in components:
        origin = stack.origins[index]
        origins.append(
            origin if origin.source is None else dataclasses.replace(origin, source=origin.source + first[stack])
        )
    rotaries = [None if isinstance(rotary, nn.Identity) else rotary for stack in stacks for rotary in stack.rotaries]
    return Stack(
        [stack.placed[index] for stack, index in components],
        [stack.parts[index] for stack, index in components],
        origins,
        [config for stack in stacks for config in stack.configs],
        rotaries,
    ).eval()
