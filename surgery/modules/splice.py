"""Build one stack from components of several stacks; their modules are shared, not copied."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import nn

from surgery.modules.stack import Stack


def splice(components: Sequence[tuple[Stack, int]]) -> Stack:
    """Return a stack of components (stack, index) in this order, the embedding first and the head last.

    Each attention keeps its index in caches, so a stack that is to be cached must not contain two with the same index.
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
