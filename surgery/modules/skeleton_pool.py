"""Skeletons of a chain's sources, created on demand, with a further one for each place that is used again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from surgery.chains.plan import ChainLink
from surgery.families.plain import plain_settings
from surgery.modules.skeleton import Skeleton


class Skeletons:
    """The skeletons of a chain's sources.

    Args:
        sources: The configs of a plan.
        attention: Returns the name of the attention function for a config's layers.
        masked: As for a skeleton.
        parts: Use the parts of plain halves for configs of the plain shape.
    """

    def __init__(
        self,
        sources: Sequence[Mapping[str, Any]],
        attention: Callable[[Mapping[str, Any]], str],
        masked: bool = False,
        parts: bool = False,
    ) -> None:
        self._sources = sources
        self._attention = attention
        self._masked = masked
        self._parts = parts
        self._made: list[list[Skeleton]] = [[] for _ in sources]
        self._taken: Counter[ChainLink] = Counter()

    def first(self, source: int) -> Skeleton:
        """Return a source's first skeleton, for its config and its rotary tables. Raises NotServable."""
        return self._number(source, 0)

    def fresh(self, link: ChainLink) -> Skeleton:
        """Return a skeleton from which this place has not been taken yet, and mark it as taken.

        Raises ValueError for a stitch.
        """
        if link.source is None:
            raise ValueError("a stitch is cut from no model")
        used = self._taken[link]
        self._taken[link] += 1
        return self._number(link.source, used)

    def _number(self, source: int, at: int) -> Skeleton:
        made, config = self._made[source], self._sources[source]
        while len(made) <= at:
            plain = plain_settings(config) if self._parts else None
            made.append(
                Skeleton(config, self._attention(config), self._masked) if plain is None else Skeleton.of_parts(plain)
            )
        return made[at]
