"""Record where the weights of each load came from: disk, or host memory (UN-04).

What is built ahead for a stage waits in host memory for a moment, and still counts as read from disk. Units that are in
use on the device already come from nowhere, and are not counted.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadTierBytes:
    """Bytes of a load's units, by where they came from."""

    disk: int = 0
    host: int = 0


class LoadTiers:
    """Bytes by tier of the loads under way, and of the last one that has ended."""

    def __init__(self) -> None:
        self._built: dict[str, set[str]] = {}
        self._under_way: dict[str, LoadTierBytes] = {}
        self._ended: tuple[str, LoadTierBytes] = ("", LoadTierBytes())

    def record_build(self, stage: str, digest: str) -> None:
        """Record that a unit was read and built ahead for a stage."""
        self._built.setdefault(stage, set()).add(digest)

    def record_use(self, stage: str, digest: str, nbytes: int, *, built: bool) -> None:
        """Record that a stage gets a unit that was not in use. `built`: it was read just now."""
        known = self._under_way.get(stage, LoadTierBytes())
        if built or digest in self._built.get(stage, ()):
            self._under_way[stage] = LoadTierBytes(known.disk + nbytes, known.host)
        else:
            self._under_way[stage] = LoadTierBytes(known.disk, known.host + nbytes)

    def end_load(self, stage: str) -> None:
        """End the record of a stage: it is loaded, or could not be."""
        self._built.pop(stage, None)
        self._ended = stage, self._under_way.pop(stage, LoadTierBytes())

    def of_load(self, stage: str) -> LoadTierBytes:
        """Return the bytes of the last load if it was this stage's; none for any other."""
        name, found = self._ended
        return found if name == stage else LoadTierBytes()
