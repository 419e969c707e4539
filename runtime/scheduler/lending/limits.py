"""How much of a sequence its path and the devices that lend can hold.

A sequence with a context of more page sets than its path holds starts with a share of the path's pages, and lends as
it computes (IL-26). All other sequences start with pages for all of their context.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from runtime.kv.pages import groups_for
from runtime.lending_config import LendingConfig
from runtime.scheduler.devices.devices import Devices
from runtime.scheduler.sequences.parts import Weights
from runtime.types import ModelSpec

#: Share of its path's pages with which a sequence starts that does not fit there: the rest is for its neighbours.
_START = 0.5


class LendingLimits:
    """Capacities with loans."""

    def __init__(self, devices: Devices, config: LendingConfig) -> None:
        self._devices = devices
        self._cap = config.cap if config.mode != "off" else 0.0

    @property
    def on(self) -> bool:
        return self._cap > 0

    def takes(self, spec: ModelSpec, path: Iterable[str]) -> bool:
        """Return whether page sets of a model's sequences on these devices may be lent.

        Attention in parts knows no window and no virtual tokens. A hand-off takes all K and V along, so that nothing is
        lent before it, on devices that do not decode.
        """
        if not self._cap or spec.windowed or spec.virtual_tokens:
            return False
        roles = self._devices.roles
        return not roles.apart or all(roles[name].decodes for name in path)

    def most(self, device: str) -> int:
        """Return the pages that a device lends in all (IL-08)."""
        return int(self._devices[device].pages.assured * self._cap)

    def lent_groups(self, spec: ModelSpec, weights: Weights, pages: int) -> int:
        """Return the page sets, of `pages` pages each, that devices off a path may lend to one on it, whatever they
        hold now.

        Whole ones on each device: what is left over on several of them is none. Devices that have died count if they
        come back.
        """
        if not self.takes(spec, _names(weights)):
            return 0
        on_path = {name for name, _ in weights}
        able = (each for each in self._devices if each.lends and not each.final and each.name not in on_path)
        return sum(self.most(each.name) // len(weights) // pages for each in able)

    def holds(self, spec: ModelSpec, weights: Weights) -> int:
        """Return the page sets of one sequence that a path holds, with those that other devices hold for it."""
        return min(
            (
                self._devices[name].pages.assured // pages + self.lent_groups(spec, weights, pages)
                for name, pages in weights
            ),
            default=0,
        )

    def local(self, weights: Weights) -> int:
        """Return the page sets of one sequence that a path holds by itself."""
        return min((self._devices[name].pages.assured // pages for name, pages in weights), default=0)

    def why_not(self, spec: ModelSpec, tokens: int, groups: int, weights: Weights) -> str | None:
        """Return why a path can never hold a sequence of so many tokens and page sets, or None."""
        if groups <= self.holds(spec, weights):
            return None
        for name, pages in weights:
            if groups * pages > (has := self._devices[name].pages.assured):
                why = f"its {tokens} tokens need {groups * pages} pages on {name}, which has {has}"
                more = self.lent_groups(spec, weights, pages) * pages
                return f"{why}; the devices that are not on its path lend at most {more}" if more else why
        return None

    def first_groups(self, spec: ModelSpec, tokens: int, weights: Weights) -> int:
        """Return the page sets with which a sequence of so many tokens starts on a path."""
        groups = groups_for(spec, tokens)
        if not weights or not self.takes(spec, _names(weights)) or groups <= (local := self.local(weights)):
            return groups
        return max(1, int(local * _START))

    def chunk(self, spec: ModelSpec, weights: Weights) -> int:
        """Return the most tokens of a prompt that run at once on a path: half of its pages hold them."""
        return max(1, self.local(weights) // 2 - 1) * spec.page_tokens

    def spare(self, names: Sequence[str], lent: dict[str, int]) -> int:
        """Return the pages that these devices can lend now. `lent`: pages that they lend already."""
        devices = [self._devices[name] for name in names]
        return sum(
            max(0, min(each.pages.free, self.most(each.name) - lent.get(each.name, 0)))
            for each in devices
            if each.alive
        )


def _names(weights: Weights) -> list[str]:
    return [name for name, _ in weights]
