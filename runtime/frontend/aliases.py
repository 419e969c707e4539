"""An alias as the frontend sees it: which model answers a request for it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from blake3 import blake3

from zoo.records import AliasTarget

_PERCENT = 100


@dataclass(frozen=True, slots=True)
class ServedAlias:
    """A name that stands for served models.

    Fields:
        change: Number of the change in the catalogue that made it so.
        created: Unix seconds of that change.
    """

    name: str
    targets: tuple[AliasTarget, ...]
    change: int = 0
    created: int = 0

    @property
    def models(self) -> tuple[str, ...]:
        return tuple(target.model for target in self.targets)

    def target_for(self, user: str | None) -> str:
        """Return the model that answers a request: the same for one user as long as the shares stay.

        A user keeps their model as far as the shares allow it: from a:90,b:10 to a:80,b:20 no user leaves b. Requests
        without a user are spread by chance.
        """
        if len(self.targets) == 1:
            return self.targets[0].model
        at = secrets.randbelow(_PERCENT) if not user else _place_of(self.name, user)
        for target in self.targets:
            if at < target.share:
                return target.model
            at -= target.share
        return self.targets[-1].model


def _place_of(alias: str, user: str) -> int:
    digest = blake3(f"{alias}\0{user}".encode("utf-8", "surrogatepass")).digest(8)
    return int.from_bytes(digest, "little") % _PERCENT
