"""Read the tensors of adapters ahead of the load of their stage, which then only attaches them (QL-13).

read          on the thread that prepares loads: small tensors, many of them, each in a file of its own
end           once the stage is loaded, or could not be: what the adapters need was copied
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from surgery.tensors.pool import TensorPool


class AdaptersAhead:
    """Tensors of adapters that wait for the load of a stage. Their pool counts them as used."""

    def __init__(self, pool: TensorPool) -> None:
        self._pool = pool
        self._held: dict[str, list[str]] = {}

    def read(self, stage: str, digests: Sequence[str]) -> None:
        """Read tensors for a stage; once more is harmless. Raises zoo.errors.DamagedObject."""
        held = self._held.setdefault(stage, [])
        new = [digest for digest in digests if digest not in held]
        self._pool.acquire_all(new)
        held += new

    def end(self, stage: str) -> None:
        """Release what was read for a stage."""
        self._pool.release(self._held.pop(stage, ()))

    @property
    def nbytes(self) -> int:
        """Bytes of tensors that nothing else uses, counted in the pool's bytes."""
        uses = Counter(digest for some in self._held.values() for digest in some)
        return sum(self._pool.nbytes_of(each) for each, count in uses.items() if self._pool.users(each) == count)
